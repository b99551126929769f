"""What a failing Daytona does to a sandbox: the real SDK against the double, one fault each.

After each, whatever was injected: the operation is right or fails with the type that says what to
do, nothing was made or run twice, and no sandbox is left.
"""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    OutcomeUnknown,
    RateLimited,
    SandboxLost,
)
from perdure.sandboxes import calls, daytona, daytona_calls
from perdure.sandboxes.base import ExecState, Sandbox, SandboxSpec
from perdure.sandboxes.bubblewrap import BubblewrapProvider
from perdure.sandboxes.daytona import Connection, DaytonaProvider
from perdure.types import Limits

pytest.importorskip("daytona")
pytest.importorskip("aiohttp")

ID = "p-fault-agent-1"
SPEC = SandboxSpec("/testbed", labels={"run": "r1"}, limits=Limits(output_mb=1), ttl_s=300)
CREATE = "POST /api/sandbox$"
LOOK = "GET /api/sandbox/"
EXEC = "POST /toolbox/.*/process/execute"
UPLOAD = "POST /toolbox/.*/files/bulk-upload"
PASSING: dict[str, dict[str, Any]] = {
    "401 once": {"status": 401},
    "408": {"status": 408},
    "429": {"status": 429},
    "429 with Retry-After in seconds": {"status": 429, "headers": {"Retry-After": "1"}},
    "429 with Retry-After as a date": {
        "status": 429,
        "headers": {"Retry-After": "Sat, 21 Nov 2026 00:00:00 GMT"},
    },
    "429 of a throttler": {"status": 429, "headers": {"Retry-After-sandbox-create": "1"}},
    "500 JSON": {"status": 500},
    "500 HTML": {"status": 500, "body": "<html>oops</html>"},
    "502": {"status": 502},
    "503": {"status": 503},
    "504": {"status": 504},
    "200 HTML": {"status": 200, "body": "<html>sign in</html>"},
    "reset": {"reset": True},
    "black hole": {"hang": True},
}


class Bench:
    """A provider, its double, and what the double says is true."""

    def __init__(self, provider: DaytonaProvider, server: Any) -> None:
        self.provider, self.server = provider, server

    def inject(self, match: str, **rule: Any) -> None:
        self.server.faults.add([{"match": match, **rule}])

    @property
    def live(self) -> list[str]:
        return [record["id"] for record in self.server.sandboxes.all()]

    def asked(self, match: str) -> list[float]:
        """When requests like this came."""
        return [entry["at"] for entry in self.server.faults.log if match in entry["line"]]

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
    from perdure.testing.daytona_server import serving

    if missing := BubblewrapProvider(tmp_path).check():
        pytest.skip(missing[0])
    monkeypatch.setattr(daytona_calls, "REFUSAL_PASSES_S", 0.7)  # the double caches refusals 0.5 s
    monkeypatch.setattr(daytona_calls, "RELEASE_S", 0.2)
    async with serving(tmp_path / "server") as (server, url):
        monkeypatch.setenv("DAYTONA_API_URL", f"{url}/api")
        monkeypatch.setenv("DAYTONA_API_KEY", "dtn_0")
        provider = DaytonaProvider(tmp_path / "home")
        provider.connection = Connection(request_s=3.0)
        await provider.list()  # the key has worked once
        yield Bench(provider, server)
        assert all(rule.hits for rule in server.faults.rules), "a fault was never met"
        for record in server.sandboxes.all():
            await server.guests.kill(record["id"])


def impatient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    defaults = calls.again.__kwdefaults__ or {}
    monkeypatch.setattr(calls.again, "__kwdefaults__", {**defaults, "patience_s": seconds})


# -- making ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", PASSING)
async def test_create_survives_a_passing_fault(bench: Bench, fault: str, when: str) -> None:
    """However the answer of a create is lost, one sandbox is made, and none is left after it."""
    bench.inject(CREATE, when=when, **PASSING[fault])
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live, bench.live) == (b"up\n", 1, [])


@pytest.mark.parametrize("fault", ["401 once", "500 HTML", "502", "reset"])
async def test_fault_while_a_boot_is_watched_leaks_nothing(bench: Bench, fault: str) -> None:
    """The SDK gives up its create at one bad look at the boot; the sandbox is found and used."""
    bench.server.settings["boot_s"] = 0.5
    bench.inject(LOOK, skip=1, **PASSING[fault])
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live, bench.live) == (b"up\n", 1, [])


async def test_refused_name_is_adopted(bench: Bench) -> None:
    """409: whoever made the sandbox of this name, it is ours and is taken."""
    async with bench.box() as box:
        await box.write_file("mark", b"one")
        bench.inject(LOOK, status=404)  # a look that comes too early sees nothing
        again = await bench.provider.create(SPEC, ID)

        assert (await again.read_file("mark"), len(bench.live)) == (b"one", 1)


async def test_another_spec_under_the_same_identity_is_refused(bench: Bench) -> None:
    """An identity stands for one spec: another one is named as a mistake, and nothing changes."""
    async with bench.box():
        with pytest.raises(ConfigurationError, match="another image"):
            await bench.provider.create(replace(SPEC, workdir="/elsewhere"), ID)


async def test_slow_boot_is_waited_for(bench: Bench) -> None:
    """A boot that takes longer than the SDK waits is the same sandbox, not a second one."""
    bench.inject(CREATE, state="pulling_snapshot", state_s=4.0)
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live) == (b"up\n", 1)


@pytest.mark.parametrize("state", ["creating", "pulling_snapshot", "building_snapshot"])
async def test_boot_that_stands_still_is_condemned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """A boot in which nothing moves is deleted in time: a new generation may be tried."""
    monkeypatch.setattr(daytona, "STARTING_S", 0.5)
    monkeypatch.setattr(daytona, "PATIENCE_S", {})
    bench.inject(CREATE, state=state)
    with pytest.raises(SandboxLost, match=state):
        await bench.provider.create(SPEC, ID)

    assert bench.live == []


async def test_stuck_sandbox_that_cannot_be_deleted_is_left_to_the_reaper(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete refused for the state is asked again; later, when it may, it is deleted."""
    monkeypatch.setattr(daytona, "STARTING_S", 0.5)
    bench.inject(CREATE, state="creating")
    bench.inject("DELETE", status=400, body={"message": "Sandbox is not in a valid state"}, times=3)
    with pytest.raises(SandboxLost):
        await bench.provider.create(SPEC, ID)

    assert bench.live == []


@pytest.mark.parametrize("state", ["error", "build_failed"])
async def test_failed_boot_is_lost(bench: Bench, state: str) -> None:
    """A boot that the service gave up is lost with its reason, and nothing of it stays."""
    bench.inject(CREATE, state=state)
    with pytest.raises(SandboxLost, match=f"injected {state}"):
        await bench.provider.create(SPEC, ID)

    assert bench.live == []


async def test_quota_taken_by_others_is_waited_for(bench: Bench) -> None:
    """The account's quota is full until somebody releases: then the create succeeds."""
    bench.server.settings.update(max_cpu=1.0, others_cpu=1.0)
    creating = asyncio.create_task(bench.provider.create(SPEC, ID))
    while len(bench.asked("POST /api/sandbox")) < 2:
        await asyncio.sleep(0.01)
    bench.server.settings["others_cpu"] = 0.0
    box = await creating
    said = (await box.exec("echo mine")).stdout
    await box.kill()

    assert (said, bench.live) == (b"mine\n", [])


async def test_full_quota_is_said_to_be_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota that stays full is an error to wait with, of which nothing was made."""
    impatient(monkeypatch, 0.5)
    bench.server.settings["max_cpu"] = 0.0

    with pytest.raises(RateLimited, match="CPU limit") as caught:
        await bench.provider.create(SPEC, ID)
    assert caught.value.limit == "concurrency"


async def test_creates_are_paced_as_the_service_asks(bench: Bench) -> None:
    """`Retry-After` of the throttler is waited for before the create is asked again."""
    bench.inject(CREATE, status=429, headers={"Retry-After-sandbox-create": "2"})
    async with bench.box():
        first, second = bench.asked("POST /api/sandbox")

    assert second - first > 1.9


async def test_create_whose_outcome_stays_unknown_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no answer ever comes the type says look by identity; kill then finds what was made."""
    impatient(monkeypatch, 0.5)
    bench.inject(CREATE, when="after", reset=True, times=None)
    bench.inject(LOOK, status=503, skip=1, times=None)  # nor can it be looked up
    with pytest.raises(OutcomeUnknown):
        await bench.provider.create(SPEC, ID)
    made = len(bench.live)
    bench.server.faults.clear()
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


async def test_lagging_list_makes_nothing_twice(bench: Bench) -> None:
    """A sandbox that the list does not show yet is adopted, attached to and killed all the same."""
    bench.server.settings["list_lag_s"] = 600
    async with bench.box() as box:
        await box.write_file("mark", b"one")
        again = await bench.provider.create(SPEC, ID)
        seen = await (await bench.provider.attach(ID)).read_file("mark")
        live = len(bench.live)

    assert (again.identity, seen, live, bench.live) == (ID, b"one", 1, [])


@pytest.mark.parametrize(("status", "word"), [(401, "DAYTONA_API_KEY"), (403, "may not")])
async def test_refusal_that_stays_needs_a_person(bench: Bench, status: int, word: str) -> None:
    """A key that never worked, or may not, stops the run and is named."""
    bench.provider = DaytonaProvider(bench.provider.root.parent)
    bench.inject(".", status=status, times=None)

    with pytest.raises(ConfigurationError, match=word):
        await bench.provider.create(SPEC, ID)


async def test_unknown_snapshot_is_named(bench: Bench) -> None:
    """404 on create is an image that is not there: the message says where it is named."""
    bench.inject(CREATE, status=404, times=None)

    with pytest.raises(ConfigurationError, match="PERDURE_DAYTONA_SNAPSHOT"):
        await bench.provider.create(SPEC, ID)


async def test_env_file_of_the_folder_is_no_setting(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a `.env` says is refused by name, for the SDK would obey whoever wrote that file."""
    (tmp_path / ".env").write_text("DAYTONA_TARGET=elsewhere\n")
    monkeypatch.chdir(tmp_path)

    assert "DAYTONA_TARGET" in bench.provider.check()[0]


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "fault", ["408", "429", "500 HTML", "502", "200 HTML", "reset", "black hole"]
)
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


@pytest.mark.parametrize("how", ["empty", "absent", "unreadable"])
async def test_an_exit_code_that_lies_changes_no_result(bench: Bench, how: str) -> None:
    """An exit code that is empty, absent or not yet readable makes no failure a success."""
    async with bench.box() as box:
        bench.inject(EXEC, exit_code=how, times=2)
        result = await box.exec("echo ran >>count; echo out; exit 7")

        assert (result.status.code, result.stdout, await bench.count(box)) == (
            7,
            b"out\n",
            b"ran\n",
        )


async def test_a_command_sent_twice_runs_once(bench: Bench) -> None:
    """A proxy that replays requests starts nothing twice."""
    async with bench.box() as box:
        bench.inject(EXEC, twice=True, times=2)
        result = await box.exec("echo ran >>count; exit 5")

        assert (result.status.code, await bench.count(box)) == (5, b"ran\n")


async def test_refused_key_is_waited_out(bench: Bench) -> None:
    """A 401 that the proxy caches passes: it is not asked again before the cache forgets."""
    async with bench.box() as box:
        bench.inject(EXEC, status=401, refuse_for_s=0.5)
        bench.server.faults.log.clear()
        said = (await box.exec("echo in")).stdout

        assert said == b"in\n"
        assert len(bench.asked("")) == 2, bench.asked("")


async def test_sandbox_killed_under_a_command_is_lost(bench: Bench) -> None:
    """A sandbox that dies at the k-th call is SandboxLost, no exit code and no success."""
    async with bench.box() as box:
        await box.start("long", ["sleep", "600"])
        bench.inject(EXEC, kill=True, skip=1)
        await box.poll("long")

        with pytest.raises(SandboxLost):
            await box.poll("long")


async def test_sandbox_killed_with_its_answer_is_lost(bench: Bench) -> None:
    """A sandbox that dies when a command has run, before its answer, is lost all the same."""
    async with bench.box() as box:
        bench.inject(EXEC, kill=True, when="after", reset=True)

        with pytest.raises(SandboxLost):
            await box.exec("true")


async def test_proxy_that_denies_a_living_sandbox_is_asked_again(bench: Bench) -> None:
    """An early `not found` of the proxy is checked with the control plane, which knows better."""
    async with bench.box() as box:
        bench.inject(EXEC, status=404, times=2)

        assert (await box.exec("echo alive")).stdout == b"alive\n"


async def test_dead_daemon_of_a_started_sandbox_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """502 for a long time, while the service says started: the daemon is dead, and so is the box."""
    monkeypatch.setattr(daytona, "SILENT_S", 0.5)
    async with bench.box() as box:
        bench.inject(EXEC, status=502, times=None)

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


async def test_signal_whose_answer_is_lost_kills_once(bench: Bench) -> None:
    """A SIGKILL asked for twice ends the command once, and says so."""
    async with bench.box() as box:
        await box.start("long", ["sleep", "600"])
        bench.inject(EXEC, when="after", reset=True)
        await box.signal("long", signal.SIGKILL)

        assert (await box.poll("long")).cause == "signal"


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", ["401 once", "500 JSON", "502", "reset", "429"])
async def test_upload_arrives_whole_after_a_fault(
    bench: Bench, fault: str, when: str, tmp_path: Path
) -> None:
    """A large file whose upload or placing failed is there once, whole, with nothing beside it."""
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4000)
    async with bench.box() as box:
        bench.inject(UPLOAD, when=when, **PASSING[fault])
        bench.inject(EXEC, when="after", reset=True)
        await box.put("d/big", tmp_path / "big")
        listed = (await box.exec("ls -A d; stat -c %s d/big")).stdout

        assert listed == b"big\n1024000\n"


@pytest.mark.parametrize("how", ["missing", "short"])
async def test_upload_that_was_not_kept_is_sent_again(
    bench: Bench, how: str, tmp_path: Path
) -> None:
    """An upload answered as done that is not there, or not whole, never becomes the file."""
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4000)
    async with bench.box() as box:
        bench.inject(UPLOAD, upload=how)
        await box.put("big", tmp_path / "big")

        assert (await box.exec("stat -c %s big")).stdout == b"1024000\n"


@pytest.mark.parametrize(
    ("status", "word"), [(413, "larger than the service takes"), (507, "disk is full")]
)
async def test_upload_that_cannot_be_taken_is_named(
    bench: Bench, tmp_path: Path, status: int, word: str
) -> None:
    """413 and 507 are no rate limits: they say what is too large and are not retried."""
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    async with bench.box() as box:
        bench.inject(UPLOAD, status=status)

        with pytest.raises(ConfigurationError, match=word):
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


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["408", "429", "500 HTML", "502", "reset", "black hole"])
async def test_kill_survives_faults_and_is_success_when_gone(bench: Bench, fault: str) -> None:
    """A kill whose answer is lost is asked again; that it is gone by then is success."""
    await bench.provider.create(SPEC, ID)
    bench.inject("DELETE", when="after", **PASSING[fault])
    await bench.provider.kill(ID)

    assert bench.live == []


async def test_expired_sandbox_is_lost_and_gone(bench: Bench) -> None:
    """At the end of its time the service ends it, and its owner is told that it is lost."""
    bench.server.settings["minute_s"] = 1.0
    async with bench.box() as box:
        await box.touch(60)
        while bench.live:
            await asyncio.sleep(0.05)

        with pytest.raises(SandboxLost):
            await box.exec("true")


async def test_sandbox_that_nobody_uses_ends_by_itself(bench: Bench) -> None:
    """The idle timer does not see processes: a busy sandbox that nobody asks ends, and is deleted."""
    async with bench.box() as box:
        await box.start("busy", ["sleep", "600"])
        bench.server.settings["minute_s"] = 0.1
        while bench.live:
            await asyncio.sleep(0.05)

        with pytest.raises(SandboxLost):
            await box.poll("busy")


async def test_wrong_clock_of_the_service_changes_no_lifetime(bench: Bench) -> None:
    """A service an hour behind calls what it still has alive, and nobody here calls it expired."""
    bench.server.settings["clock_offset_s"] = -3600.0
    async with bench.box() as box:
        await box.touch(600)
        (info,) = await bench.provider.list()

        assert (info.alive, info.expires > time.time()) == (True, True)


async def test_server_killed_and_started_again_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the double: sandbox, running command and name are there when it is back."""
    if missing := BubblewrapProvider(tmp_path).check():
        pytest.skip(missing[0])
    port = _free_port()
    monkeypatch.setenv("DAYTONA_API_URL", f"http://127.0.0.1:{port}/api")
    monkeypatch.setenv("DAYTONA_API_KEY", "dtn_0")
    provider = DaytonaProvider(tmp_path / "home")
    with _server(tmp_path / "server", port):
        box = await provider.create(SPEC, ID)
        await box.start("long", ["bash", "-c", "until [ -e go ]; do sleep 0.01; done; exit 5"])
    with _server(tmp_path / "server", port):
        again = await DaytonaProvider(tmp_path / "home").create(SPEC, ID)
        await again.write_file("go", b"")
        code = (await again.wait("long", 60)).code
        await provider.kill(ID)

        assert (code, await provider.list()) == (5, [])


@contextmanager
def _server(state: Path, port: int) -> Iterator[None]:
    """As people start it; ends by SIGKILL."""
    argv = [sys.executable, "-m", "perdure.testing.daytona_server", "--state", str(state)]
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


# -- how each failure is typed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after-sandbox-lifecycle": "3"}, 3.0),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 1.0),
        ({"Retry-After": "soon"}, None),
        ({"X-RateLimit-Limit": "9"}, None),
    ],
)
def test_retry_after_is_read_in_all_its_forms(
    headers: dict[str, str], seconds: float | None
) -> None:
    """Seconds, dates and throttlers' own headers are waits; anything else is none."""
    assert daytona_calls.retry_after(headers) == seconds


def test_time_of_a_date_is_from_now() -> None:
    """A date in the future is a wait until then."""
    stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))

    assert 90 < (daytona_calls.retry_after({"Retry-After": stamp}) or 0) < 101
