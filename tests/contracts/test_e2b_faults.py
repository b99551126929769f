"""What a failing E2B does to a sandbox: the real SDK against the double, one fault each.

After each, whatever was injected: the operation is right or fails with the type that says what to
do, nothing was made or run twice, and no sandbox is left.
"""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError, ControlPlaneError, OutcomeUnknown, SandboxLost
from perdure.sandboxes import calls, e2b_calls
from perdure.sandboxes.base import ExecState, Sandbox, SandboxSpec
from perdure.sandboxes.bubblewrap import BubblewrapProvider
from perdure.sandboxes.e2b import Connection, E2BProvider
from perdure.types import Limits

pytest.importorskip("e2b")
pytest.importorskip("aiohttp")

ID = "p-fault-agent-1"
SPEC = SandboxSpec("/testbed", labels={"run": "r1"}, limits=Limits(output_mb=1), ttl_s=300)
CREATE = "POST /v2/sandboxes$"
EXEC = "POST /process.Process/Start"
UPLOAD = "POST /files"
PASSING: dict[str, dict[str, Any]] = {
    "401 once": {"status": 401},
    "408": {"status": 408},
    "429": {"status": 429},
    "429 with Retry-After in seconds": {"status": 429, "headers": {"Retry-After": "1"}},
    "429 with Retry-After as a date": {
        "status": 429,
        "headers": {"Retry-After": "Sat, 21 Nov 2026 00:00:00 GMT"},
    },
    "500 JSON": {"status": 500},
    "500 HTML": {"status": 500, "body": "<html>oops</html>"},
    "502": {"status": 502},
    "503": {"status": 503},
    "504": {"status": 504},
    "reset": {"reset": True},
    "black hole": {"hang": True},
}


def impatient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    defaults = calls.again.__kwdefaults__ or {}
    monkeypatch.setattr(calls.again, "__kwdefaults__", {**defaults, "patience_s": seconds})


class Bench:
    """A provider, its double, and what the double says is true."""

    def __init__(self, provider: E2BProvider, server: Any) -> None:
        self.provider, self.server = provider, server

    def inject(self, match: str, **rule: Any) -> None:
        self.server.faults.add([{"match": match, **rule}])

    @property
    def live(self) -> list[str]:
        return [record["id"] for record in self.server.sandboxes.all()]

    @asynccontextmanager
    async def box(self, spec: SandboxSpec = SPEC) -> AsyncIterator[Sandbox]:
        try:
            yield await self.provider.create(spec, ID)
        finally:
            await self.provider.kill(ID)

    async def count(self, box: Sandbox) -> bytes:
        return await box.read_file("count")


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    from perdure.testing.e2b_server import serving

    if missing := BubblewrapProvider(tmp_path).check():
        pytest.skip(missing[0])
    monkeypatch.setattr(e2b_calls, "REFUSAL_PASSES_S", 0.7)  # the double caches refusals 0.5 s
    monkeypatch.setattr(e2b_calls, "RELEASE_S", 0.2)
    async with serving(tmp_path / "server") as (server, url):
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
            monkeypatch.setenv(name, url)
        monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
        provider = E2BProvider(tmp_path / "home")
        provider.connection = Connection(request_s=3.0)
        await provider.list()  # the key has worked once
        yield Bench(provider, server)
        assert all(rule.hits for rule in server.faults.rules), "a fault was never met"
        for record in server.sandboxes.all():
            await server.guests.kill(record["id"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", PASSING)
async def test_create_survives_a_passing_fault(bench: Bench, fault: str, when: str) -> None:
    """However the answer of a create is lost, one sandbox is made, and none is left after it."""
    bench.inject(CREATE, when=when, **PASSING[fault])
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live, bench.live) == (b"up\n", 1, [])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", ["408", "429", "500 HTML", "502", "reset", "black hole"])
async def test_a_command_runs_once_whatever_happens_to_its_answer(
    bench: Bench, fault: str, when: str
) -> None:
    """A lost answer of a start is asked for again and starts nothing twice."""
    async with bench.box() as box:
        bench.inject(EXEC, when=when, **PASSING[fault])
        await box.start("once", ["bash", "-c", "echo ran >>count; exit 3"])
        status = await box.wait("once", 60)

        assert (status.state, status.code, await bench.count(box)) == (
            ExecState.EXITED,
            3,
            b"ran\n",
        )


@pytest.mark.parametrize("how", ["cut", "no_end", "empty_end", "unavailable"])
async def test_a_stream_that_lies_changes_no_result(bench: Bench, how: str) -> None:
    """A stream that is cut, or ends without or with an empty end, makes no failure a success."""
    async with bench.box() as box:
        bench.inject(EXEC, stream=how, times=2)
        result = await box.exec("echo ran >>count; echo out; exit 7")

        assert (result.status.code, result.stdout, await bench.count(box)) == (
            7,
            b"out\n",
            b"ran\n",
        )


async def test_refused_key_is_waited_out(bench: Bench) -> None:
    """A 401 that the proxy caches passes: it is not asked again before the cache forgets."""
    async with bench.box() as box:
        bench.inject(EXEC, status=401, refuse_for_s=0.5)

        assert (await box.exec("echo in")).stdout == b"in\n"


@pytest.mark.parametrize(("status", "word"), [(401, "E2B_API_KEY"), (403, "may not")])
async def test_refusal_that_stays_needs_a_person(bench: Bench, status: int, word: str) -> None:
    """A key that never worked, or may not, stops the run and is named."""
    bench.provider = E2BProvider(bench.provider.root.parent)
    bench.inject(".", status=status, times=None)

    with pytest.raises(ConfigurationError, match=word):
        await bench.provider.create(SPEC, ID)


async def test_unknown_template_is_named(bench: Bench) -> None:
    """404 on create is a template that is not there: the message says where it is named."""
    bench.inject(CREATE, status=404, times=None)

    with pytest.raises(ConfigurationError, match="PERDURE_E2B_TEMPLATE"):
        await bench.provider.create(SPEC, ID)


@pytest.mark.parametrize("word", ["idempotency_in_progress", "idempotency_outcome_unknown"])
async def test_conflict_about_the_key_ends_with_one_sandbox(bench: Bench, word: str) -> None:
    """A service unsure of the key's first request made one sandbox; it is adopted."""
    body = {"code": 409, "message": word, "error_code": word}
    bench.inject(CREATE, when="after", status=409, body=body)
    async with bench.box():
        live = len(bench.live)

    assert (live, bench.live) == (1, [])


async def test_create_whose_outcome_stays_unknown_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no answer ever comes the type says look by identity; kill then finds what was made."""
    impatient(monkeypatch, 0.5)
    bench.inject(CREATE, when="after", reset=True, times=None)
    with pytest.raises(OutcomeUnknown):
        await bench.provider.create(SPEC, ID)
    made = len(bench.live)
    await bench.provider.kill(ID)

    assert (made, bench.live) == (1, [])


async def test_cancelled_create_leaves_nothing(bench: Bench) -> None:
    """A create that is cancelled while the service boots ends with no sandbox."""
    bench.server.settings["boot_s"] = 0.3
    creating = asyncio.create_task(bench.provider.create(SPEC, ID))
    while not bench.live:
        await asyncio.sleep(0.01)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating

    assert bench.live == []


async def test_full_account_is_waited_for(bench: Bench) -> None:
    """At the cap of concurrent sandboxes a create waits until one of ours is gone."""
    bench.server.settings["max_live"] = 1
    await bench.provider.create(SPEC, "p-other-1")
    creating = asyncio.create_task(bench.provider.create(SPEC, ID))
    while not any(entry["line"] == "POST /v2/sandboxes" for entry in bench.server.faults.log[-1:]):
        await asyncio.sleep(0.01)
    await bench.provider.kill("p-other-1")
    box = await creating
    said = (await box.exec("echo mine")).stdout
    await box.kill()

    assert (said, bench.live) == (b"mine\n", [])


async def test_lagging_list_makes_nothing_twice(bench: Bench) -> None:
    """A sandbox that the list does not show yet is adopted, attached to and killed all the same."""
    bench.server.settings["list_lag_s"] = 600
    async with bench.box() as box:
        await box.write_file("mark", b"one")
        again = await bench.provider.create(SPEC, ID)
        seen = await (await bench.provider.attach(ID)).read_file("mark")
        live = len(bench.live)

    assert (again.identity, seen, live, bench.live) == (ID, b"one", 1, [])


async def test_sandbox_killed_under_a_command_is_lost(bench: Bench) -> None:
    """A sandbox that dies at the k-th call is SandboxLost, no exit code and no success."""
    async with bench.box() as box:
        await box.start("long", ["sleep", "600"])
        bench.inject(EXEC, kill=True, skip=1)
        await box.poll("long")

        with pytest.raises(SandboxLost):
            await box.poll("long")


async def test_proxy_that_denies_a_living_sandbox_is_asked_again(bench: Bench) -> None:
    """An early `not found` of the proxy is checked with the control plane, which knows better."""
    body = {"sandboxId": "x", "message": "The sandbox was not found", "code": 502}
    async with bench.box() as box:
        bench.inject(f"{EXEC}|/health", status=502, body=body, times=2)

        assert (await box.exec("echo alive")).stdout == b"alive\n"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", ["500 JSON", "502", "reset", "429"])
async def test_upload_arrives_whole_after_a_fault(
    bench: Bench, fault: str, when: str, tmp_path: Path
) -> None:
    """A large file whose upload or placing failed is there once, whole, with nothing beside it."""
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4000)
    async with bench.box() as box:
        bench.inject(UPLOAD, when=when, **PASSING[fault])
        bench.inject(EXEC, when="after", skip=0, reset=True)
        await box.put("d/big", tmp_path / "big")
        listed = (await box.exec("ls -A d; stat -c %s d/big")).stdout

        assert listed == b"big\n1024000\n"


async def test_upload_too_large_for_the_service_is_named(bench: Bench, tmp_path: Path) -> None:
    """413 is no rate limit: it says that the file is too large and is not retried."""
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    async with bench.box() as box:
        bench.inject(UPLOAD, status=413, times=None)

        with pytest.raises(ConfigurationError, match="larger than the service takes"):
            await box.put("big", tmp_path / "big")


async def test_fault_in_the_set_up_is_survived(bench: Bench, tmp_path: Path) -> None:
    """Faults all through the boot of a sandbox with a tree leave one sandbox with one whole tree."""
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a/file").write_text("base")
    bench.inject(UPLOAD, status=502, when="after")
    bench.inject(EXEC, status=503, skip=1)
    bench.inject(EXEC, reset=True, when="after", skip=2)
    async with bench.box(replace(SPEC, tree=tree)) as box:
        said = (await box.exec("cat a/file; ls -A")).stdout

    assert (said, bench.live) == (b"basea\n", [])


async def test_kill_survives_faults_and_is_success_when_gone(bench: Bench) -> None:
    """A kill whose answer is lost is asked again; that it is gone by then is success."""
    await bench.provider.create(SPEC, ID)
    bench.inject("DELETE", reset=True, when="after")
    await bench.provider.kill(ID)

    assert bench.live == []


async def test_expired_sandbox_is_lost_and_gone(bench: Bench) -> None:
    """At the end of its time the service ends it, and its owner is told that it is lost."""
    async with bench.box() as box:
        await box.touch(1)
        while bench.live:
            await asyncio.sleep(0.05)

        with pytest.raises(SandboxLost):
            await box.exec("true")


async def test_lasting_outage_is_tried_again_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that stays down is no lost sandbox: Temporal may ask again."""
    async with bench.box() as box:
        impatient(monkeypatch, 0.3)
        bench.inject(EXEC, status=503, times=None)
        with pytest.raises(ControlPlaneError):
            await box.exec("true")
        bench.server.faults.clear()

        assert (await box.exec("exit 4")).status.code == 4


async def test_server_killed_and_started_again_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the double: sandbox, running command and key are there when it is back."""
    if missing := BubblewrapProvider(tmp_path).check():
        pytest.skip(missing[0])
    port = _free_port()
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    provider = E2BProvider(tmp_path / "home")
    with _server(tmp_path / "server", port):
        box = await provider.create(SPEC, ID)
        await box.start("long", ["bash", "-c", "until [ -e go ]; do sleep 0.01; done; exit 5"])
    with _server(tmp_path / "server", port):
        again = await E2BProvider(tmp_path / "home").create(SPEC, ID)
        await again.write_file("go", b"")
        code = (await again.wait("long", 60)).code
        await provider.kill(ID)

        assert (code, await provider.list()) == (5, [])


@contextmanager
def _server(state: Path, port: int) -> Iterator[None]:
    """As people start it; ends by SIGKILL."""
    argv = [sys.executable, "-m", "perdure.testing.e2b_server", "--state", str(state)]
    process = subprocess.Popen([*argv, "--port", str(port)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_signal_whose_answer_is_lost_kills_once(bench: Bench) -> None:
    """A SIGKILL asked for twice ends the command once, and says so."""
    async with bench.box() as box:
        await box.start("long", ["sleep", "600"])
        bench.inject(EXEC, when="after", reset=True)
        await box.signal("long", signal.SIGKILL)

        assert (await box.poll("long")).cause == "signal"
