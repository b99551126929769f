"""What a failing service does to a sandbox: each real SDK against its double, one fault each.

After each fault: the operation is right or fails with the type that says what to do, nothing was
made or run twice, and no sandbox is left. The file with a service's name has the faults that only
this service has.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import (
    AccountExhausted,
    ConfigurationError,
    ControlPlaneError,
    OutcomeUnknown,
    RateLimited,
    SandboxLost,
)
from perdure.sandboxes.agent_user import HOME
from perdure.sandboxes.base import Exec, ExecState
from perdure.sandboxes.guest import service_provider as service_module
from perdure.sandboxes.guest.guest_sandbox import FOLDER
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from tests import held_ports
from tests.checkout_paths import ROOT
from tests.doubles.service_double import LIMITS
from tests.service_harness import ID, SPEC, Bench, Service, impatient

PASSING: dict[str, dict[str, Any]] = {
    "401 once": {"status": 401},
    "408": {"status": 408},
    "409": {"status": 409},
    "429": {"status": 429},
    "429 with Retry-After in seconds": {"status": 429, "headers": {"Retry-After": "1"}},
    "429 with Retry-After as a date": {
        "status": 429,
        "headers": {"Retry-After": "Wed, 01 Jan 2020 00:00:00 GMT"},
    },
    "500 JSON": {"status": 500},
    "500 HTML": {"status": 500, "body": "<html>oops</html>"},
    "502": {"status": 502},
    "503": {"status": 503},
    "504": {"status": 504},
    "200 HTML": {"status": 200, "body": "<html>sign in</html>"},
    "reset": {"reset": True},
    "black hole": {"hang": True},
}
ALIKE = ("409", "429 with Retry-After as a date", "500 HTML", "502", "504")
"""Faults that the code treats like another one of `PASSING`."""

EXCHANGE = (
    f"ln -s {HOME}/execs new && "
    """python3 -c 'import ctypes; ctypes.CDLL(None).renameat2(-100, b"execs", -100, b"new", 2)'"""
)
"""Moves the guest's records to the small disk in one step."""


def _param(fault: str) -> Any:
    return _longer(fault) if fault in ALIKE else fault


def _longer(fault: str) -> Any:
    return pytest.param(fault, marks=pytest.mark.longer)


# -- making ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", [_param(name) for name in PASSING])
async def test_create_survives_a_passing_fault(bench: Bench, fault: str, when: str) -> None:
    """If the answer to a create is lost, one sandbox is made, and none is left after it."""
    if fault == "black hole":
        bench.hurry()
    bench.inject(bench.service.create, when=when, **PASSING[fault])
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live, bench.live) == (b"up\n", 1, [])


async def test_create_whose_outcome_stays_unknown_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create without an answer is OutcomeUnknown; kill then finds what was made."""
    impatient(monkeypatch, 0.5)
    bench.inject(bench.service.create, when="after", reset=True, times=None)
    if bench.service.look_up:  # nor can it be looked up
        bench.inject(bench.service.look_up, status=503, skip=1, times=None)
    with pytest.raises(OutcomeUnknown):
        await bench.provider.create(SPEC, ID)
    made = len(bench.live)
    bench.server.faults.clear()
    await bench.provider.kill(ID)

    assert (made, bench.live) == (1, [])


async def test_cancelled_create_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create that is cancelled while the service boots ends with no sandbox."""
    monkeypatch.setattr(service_module, "CANCEL_GRACE_S", 60.0)
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


@pytest.mark.parametrize("status", [401, 403])
async def test_refusal_that_stays_needs_a_person(bench: Bench, tmp_path: Path, status: int) -> None:
    """A key that never worked, or has no rights, stops the run, and the error names it."""
    fresh = bench.service.made(tmp_path / "fresh")
    bench.inject(".", status=status, times=None)

    word = bench.service.key if status == 401 else "may not"
    with pytest.raises(ConfigurationError, match=word):
        await fresh.create(SPEC, ID)


async def test_unknown_image_is_named(bench: Bench) -> None:
    """404 on create means a missing image. The error says which field names it."""
    bench.inject(bench.service.create, status=404, times=None)

    with pytest.raises(ConfigurationError, match=bench.service.image):
        await bench.provider.create(SPEC, ID)


# -- commands -------------------------------------------------------------------------------------


NO_CREDITS = {
    "e2b": (402, "the team has no credits"),
    "daytona": (403, "Organization is suspended: Depleted credits"),
    "modal": (429, "workspace billing cycle spend limit reached"),
}
"""What the services answer to a create when a user must pay first."""


async def test_an_account_without_credits_is_asked_once(bench: Bench) -> None:
    """No retry helps. The error names the answer, the fix, and when the account is asked again."""
    status, message = NO_CREDITS[bench.service.name]
    bench.inject(bench.service.create, status=status, body={"message": message})
    with pytest.raises(AccountExhausted, match=message) as refused:
        await bench.provider.create(SPEC, ID)

    assert "perdure accounts open" in str(refused.value)
    assert 600 < refused.value.resets_at - time.time() < 7200
    assert (len(bench.asked(bench.service.create)), bench.live) == (1, [])


@pytest.mark.parametrize("hours", [None, 5])
async def test_a_distant_reset_is_told_at_once(bench: Bench, hours: int | None) -> None:
    """A create is not repeated until a quota resets in hours. E2B's SDK does not show the time."""
    if bench.service.name == "e2b":
        pytest.skip("the SDK hides Retry-After")
    bench.provider.waits_at_caps = False
    wait = 2 if hours is None else 3600 * hours
    headers = {"Retry-After": str(wait)}
    bench.inject(bench.service.create, status=429, headers=headers)
    with pytest.raises(RateLimited) as refused:
        await bench.provider.create(SPEC, ID)

    error = refused.value
    assert isinstance(error, AccountExhausted) == (hours is not None)
    if isinstance(error, AccountExhausted):
        assert error.resets_at - time.time() == pytest.approx(wait, abs=60)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "fault",
    [_param(name) for name in ("408", "429", "500 HTML", "502", "200 HTML", "reset", "black hole")],
)
async def test_a_command_runs_once_whatever_happens_to_its_answer(
    bench: Bench, fault: str, when: str
) -> None:
    """If the answer of a start is lost, the repeated start starts nothing twice."""
    if fault == "black hole":
        bench.hurry()
    async with bench.box() as box:
        bench.inject(bench.service.execute, when=when, **PASSING[fault])
        await box.start("once", Exec(["bash", "-c", "echo ran >>count; exit 3"]))
        status = await box.wait("once", 60)

        assert (status.state, status.code, await bench.count(box)) == (
            ExecState.EXITED,
            3,
            b"ran\n",
        )


async def test_a_command_sent_twice_runs_once(bench: Bench) -> None:
    """A proxy that replays requests starts nothing twice."""
    async with bench.box() as box:
        bench.inject(bench.service.execute, twice=True, times=2)
        result = await box.exec("echo ran >>count; exit 5")

        assert (result.status.code, await bench.count(box)) == (5, b"ran\n")


async def test_state_that_is_just_changing_is_waited_out(bench: Bench) -> None:
    """If a renewal or a command gets 409 about a live sandbox, it is repeated."""
    async with bench.box() as box:
        bench.inject(bench.service.renew, status=409)
        await box.touch(600)
        bench.inject(bench.service.execute, status=409)

        assert (await box.exec("echo in")).stdout == b"in\n"


async def test_list_behind_a_lost_proxy_is_asked_again(bench: Bench) -> None:
    """A list cannot be missing: its 404 comes from a proxy and is transient."""
    async with bench.box():
        bench.inject(bench.service.list, status=404)
        found = await bench.provider.list()

        assert [info.identity for info in found] == [ID]


async def test_sandbox_that_reads_do_not_show_yet_is_attached(bench: Bench) -> None:
    """One 404 of a new sandbox may be a lagging read, and is no loss."""
    async with bench.box() as box:
        await box.write_file("mark", b"one")
        bench.inject(bench.service.read, status=404)
        found = await bench.provider.attach(ID)

        assert (await found.read_file("mark"), len(bench.live)) == (b"one", 1)


async def test_refused_key_is_waited_out(bench: Bench) -> None:
    """A cached 401 is transient: the call is repeated only after the proxy's cache has expired."""
    async with bench.box() as box:
        bench.inject(bench.service.execute, status=401, refuse_for_s=0.5)
        bench.server.faults.log.clear()
        said = (await box.exec("echo in")).stdout

        asked = bench.asked(bench.service.execute)
        assert (said, len(asked)) == (b"in\n", bench.service.refusals + 1)


async def test_sandbox_killed_under_a_command_is_lost(bench: Bench) -> None:
    """A sandbox that dies at the k-th call is SandboxLost, not an exit code or a success."""
    async with bench.box() as box:
        await box.start("long", Exec(["sleep", "600"]))
        bench.inject(bench.service.execute, kill=True, skip=1)
        await box.poll("long")

        with pytest.raises(SandboxLost):
            await box.poll("long")


async def test_sandbox_killed_with_its_answer_is_lost(bench: Bench) -> None:
    """A sandbox that dies between the end of a command and its answer is lost too."""
    async with bench.box() as box:
        bench.inject(bench.service.execute, kill=True, when="after", reset=True)

        with pytest.raises(SandboxLost):
            await box.exec("true")


async def test_lasting_outage_is_tried_again_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a service stays down, the sandbox is not lost: Temporal may retry."""
    async with bench.box() as box:
        impatient(monkeypatch, 0.3)
        bench.inject(bench.service.execute, status=503, times=None)
        with pytest.raises(ControlPlaneError):
            await box.exec("true")
        bench.server.faults.clear()

        assert (await box.exec("exit 4")).status.code == 4


async def test_disk_that_a_command_filled_costs_the_sandbox_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no command can be recorded any more, the sandbox is lost; it is no configuration error."""
    small = LIMITS.model_copy(update={"disk_mb": 16})
    monkeypatch.setattr(bench.service.double, "LIMITS", small)
    async with bench.box() as box:
        await box.exec(f"cd {FOLDER} && cp -a execs {HOME} && {EXCHANGE}", user="root", check=True)
        await box.exec(f"cat /dev/zero >{HOME}/full", user="root")

        with pytest.raises(SandboxLost, match="no disk space left"):
            await box.exec("true")


async def test_signal_whose_answer_is_lost_kills_once(bench: Bench) -> None:
    """A SIGKILL requested twice ends the command once, and the result says so."""
    async with bench.box() as box:
        await box.start("long", Exec(["sleep", "600"]))
        bench.inject(bench.service.execute, when="after", reset=True)
        await box.signal("long", signal.SIGKILL)

        assert (await box.wait("long", 60)).cause == "signal"


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "fault", [*("500 JSON", "reset"), *(_longer(name) for name in ("401 once", "429", "502"))]
)
async def test_upload_arrives_whole_after_a_fault(
    bench: Bench, fault: str, when: str, tmp_path: Path
) -> None:
    """A large file whose upload or rename failed exists once, whole, and without leftovers."""
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4000)
    async with bench.box() as box:
        bench.inject(bench.service.upload, when=when, **PASSING[fault])
        bench.inject(bench.service.execute, when="after", reset=True)
        await box.put("d/big", tmp_path / "big")
        listed = (await box.exec("ls -A d; stat -c %s d/big")).stdout

        assert listed == b"big\n1024000\n"


@pytest.mark.parametrize("how", ["missing", "short"])
async def test_upload_that_was_not_kept_is_sent_again(
    bench: Bench, how: str, tmp_path: Path
) -> None:
    """An upload that the service confirms but does not keep whole never becomes the file."""
    (tmp_path / "big").write_bytes(bytes(range(256)) * 4000)
    async with bench.box() as box:
        bench.inject(bench.service.upload, upload=how)
        await box.put("big", tmp_path / "big")

        assert (await box.exec("stat -c %s big")).stdout == b"1024000\n"


@pytest.mark.parametrize("status", [413, 507])
async def test_upload_that_cannot_be_taken_is_named(
    bench: Bench, tmp_path: Path, status: int
) -> None:
    """413 and 507 are no rate limits: they say what is too large and are not retried."""
    if status not in bench.service.upload_refusals:
        return
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    async with bench.box() as box:
        bench.inject(bench.service.upload, status=status)

        with pytest.raises(ConfigurationError, match=bench.service.upload_refusals[status]):
            await box.put("big", tmp_path / "big")


async def test_fault_in_the_set_up_is_survived(bench: Bench, tmp_path: Path) -> None:
    """Faults throughout the boot of a sandbox with a tree leave one sandbox with one whole tree."""
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a/file").write_text("base")
    bench.inject(bench.service.upload, status=502, when="after")
    bench.inject(bench.service.execute, status=503, skip=1)
    bench.inject(bench.service.execute, reset=True, when="after", skip=2)
    async with bench.box(replace(SPEC, tree=tree)) as box:
        said = (await box.exec("cat a/file; ls -A")).stdout

    assert (said, bench.live) == (b"basea\n", [])


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["408", "409", "429", "500 HTML", "502", "reset", "black hole"])
async def test_kill_survives_faults_and_is_success_when_gone(bench: Bench, fault: str) -> None:
    """A kill whose answer is lost is repeated, and succeeds if the sandbox is gone by then."""
    if fault == "black hole":
        bench.hurry()
    await bench.provider.create(SPEC, ID)
    bench.inject(bench.service.end, when="after", **PASSING[fault])
    await bench.provider.kill(ID)

    assert bench.live == []


async def test_expired_sandbox_is_lost_and_gone(bench: Bench) -> None:
    """At its deadline the service ends it, and its owner gets SandboxLost."""
    async with bench.box() as box:
        bench.server.settings["minute_s"] = 3.0  # for a service that counts in minutes
        await box.touch(1)
        while bench.live:
            await asyncio.sleep(0.05)

        with pytest.raises(SandboxLost):
            await box.exec("true")


@pytest.mark.longer
async def test_server_killed_and_started_again_forgets_nothing(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 of the double and a restart, sandbox, running command and identity exist."""
    pytest.importorskip(service.sdk)
    if missing := BubblewrapProvider(Settings(home=tmp_path)).check():
        pytest.skip(missing[0])
    with held_ports.held(1) as (port,):
        for name, value in service.variables(
            f"http://127.0.0.1:{port}", tmp_path / "server"
        ).items():
            monkeypatch.setenv(name, value)
        provider = service.made(tmp_path / "home")
        with _started(service, tmp_path / "server", port):
            box = await provider.create(SPEC, ID)
            await box.start(
                "long", Exec(["bash", "-c", "until [ -e go ]; do sleep 0.01; done; exit 5"])
            )
        with _started(service, tmp_path / "server", port):
            again = await service.made(tmp_path / "home").create(SPEC, ID)
            await again.write_file("go", b"")
            code = (await again.wait("long", 60)).code
            await provider.kill(ID)

            assert (code, await provider.list()) == (5, [])


@contextmanager
def _started(service: Service, state: Path, port: int) -> Iterator[None]:
    """Started as people start it. SIGKILL ends it."""
    argv = [sys.executable, "-m", service.double.__name__, "--state", str(state)]
    process = subprocess.Popen([*argv, "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
