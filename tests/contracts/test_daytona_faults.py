"""Failures that only Daytona has. `test_service_faults` tests the others."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError, RateLimited, SandboxLost
from perdure.sandboxes.base import Exec
from perdure.sandboxes.guest.service_retries import retry_after
from perdure.sandboxes.providers.daytona import provider as daytona
from tests.service_harness import DAYTONA, HURRY_S, ID, SPEC, Bench, Service, impatient

CREATE, LOOK, EXEC = DAYTONA.create, DAYTONA.look_up, DAYTONA.execute


@pytest.fixture
def service() -> Service:
    return DAYTONA


# -- making ---------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 401},
        {"status": 500, "body": "<html>oops</html>"},
        {"status": 502},
        {"reset": True},
    ],
    ids=str,
)
async def test_fault_while_a_boot_is_watched_leaks_nothing(
    bench: Bench, fault: dict[str, Any]
) -> None:
    """The SDK gives up a create after one failed poll. The sandbox is then found and used."""
    bench.server.settings["boot_s"] = 0.5
    bench.inject(LOOK, skip=1, **fault)
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live, bench.live) == (b"up\n", 1, [])


async def test_refused_name_is_adopted(bench: Bench) -> None:
    """409 means that a sandbox of this name is ours: it is adopted, whichever worker created it."""
    async with bench.box() as box:
        await box.write_file("mark", b"one")
        bench.inject(LOOK, status=404)  # a look that comes too early sees nothing
        again = await bench.provider.create(SPEC, ID)

        assert (await again.read_file("mark"), len(bench.live)) == (b"one", 1)


async def test_another_spec_under_the_same_identity_is_refused(bench: Bench) -> None:
    """An identity has one spec. Another spec is a configuration error and changes nothing."""
    async with bench.box():
        with pytest.raises(ConfigurationError, match="another image"):
            await bench.provider.create(replace(SPEC, workdir="/elsewhere"), ID)


async def test_slow_boot_is_waited_for(bench: Bench) -> None:
    """A boot that takes longer than the SDK waits gives one sandbox, not two."""
    bench.hurry()
    bench.inject(CREATE, state="pulling_snapshot", state_s=HURRY_S + 1)
    async with bench.box() as box:
        said, live = (await box.exec("echo up")).stdout, len(bench.live)

    assert (said, live) == (b"up\n", 1)


@pytest.mark.parametrize("state", ["creating", "pulling_snapshot", "building_snapshot"])
async def test_boot_without_progress_is_deleted_and_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """A boot without progress is deleted in time, so that a new generation can boot."""
    bench.hurry()
    monkeypatch.setattr(daytona, "STARTING_S", 0.5)
    monkeypatch.setattr(daytona, "PATIENCE_S", {})
    bench.inject(CREATE, state=state)
    with pytest.raises(SandboxLost, match=state):
        await bench.provider.create(SPEC, ID)

    assert bench.live == []


async def test_stuck_sandbox_that_cannot_be_deleted_is_left_to_the_reaper(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete that is refused because of the state is repeated until it succeeds."""
    bench.hurry()
    monkeypatch.setattr(daytona, "STARTING_S", 0.5)
    bench.inject(CREATE, state="creating")
    bench.inject("DELETE", status=400, body={"message": "Sandbox is not in a valid state"}, times=3)
    with pytest.raises(SandboxLost):
        await bench.provider.create(SPEC, ID)

    assert bench.live == []


@pytest.mark.parametrize("state", ["error", "build_failed"])
async def test_failed_boot_is_lost(bench: Bench, state: str) -> None:
    """A boot that the service gave up is lost with its reason, and leaves nothing behind."""
    bench.inject(CREATE, state=state)
    with pytest.raises(SandboxLost, match=f"injected {state}"):
        await bench.provider.create(SPEC, ID)

    assert bench.live == []


async def test_quota_taken_by_others_is_waited_for(bench: Bench) -> None:
    """A create waits while the account's quota is full, and succeeds when a sandbox ends."""
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
    """A quota that stays full is RateLimited, and nothing was made."""
    impatient(monkeypatch, 0.5)
    bench.server.settings["max_cpu"] = 0.0

    with pytest.raises(RateLimited, match="CPU limit") as caught:
        await bench.provider.create(SPEC, ID)
    assert caught.value.limit == "concurrency"


async def test_creates_are_paced_as_the_service_asks(bench: Bench) -> None:
    """A create is repeated only after the throttler's `Retry-After`."""
    bench.inject(CREATE, status=429, headers={"Retry-After-sandbox-create": "2"})
    async with bench.box():
        first, second = bench.asked("POST /api/sandbox")

    assert second - first > 1.9


async def test_env_file_of_the_folder_is_no_setting(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that is only in a `.env` file is refused by name, because the SDK would use it."""
    (tmp_path / ".env").write_text("DAYTONA_TARGET=elsewhere\n")
    monkeypatch.chdir(tmp_path)

    assert "DAYTONA_TARGET" in bench.provider.check()[0]


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "absent", "unreadable"])
async def test_an_exit_code_that_lies_changes_no_result(bench: Bench, how: str) -> None:
    """An empty, absent or not yet readable exit code never turns a failure into a success."""
    async with bench.box() as box:
        bench.inject(EXEC, exit_code=how, times=2)
        result = await box.exec("echo ran >>count; echo out; exit 7")

        assert (result.status.code, result.stdout, await bench.count(box)) == (
            7,
            b"out\n",
            b"ran\n",
        )


async def test_proxy_that_denies_a_living_sandbox_is_asked_again(bench: Bench) -> None:
    """An early `not found` of the proxy is checked with the control plane, which decides."""
    async with bench.box() as box:
        bench.inject(EXEC, status=404, times=2)

        assert (await box.exec("echo alive")).stdout == b"alive\n"


async def test_dead_daemon_of_a_started_sandbox_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long time of 502 the daemon counts as dead, although the service says `started`."""
    monkeypatch.setattr(daytona, "SILENT_S", 0.5)
    async with bench.box() as box:
        bench.inject(EXEC, status=502, times=None)

        with pytest.raises(SandboxLost):
            await box.exec("true")


# -- the end --------------------------------------------------------------------------------------


async def test_unused_sandbox_ends_by_itself(bench: Bench) -> None:
    """Only calls reset the idle timer: a busy sandbox without calls ends and is deleted."""
    async with bench.box() as box:
        await box.start("busy", Exec(["sleep", "600"]))
        bench.server.settings["minute_s"] = 0.1
        while bench.live:
            await asyncio.sleep(0.05)

        with pytest.raises(SandboxLost):
            await box.poll("busy")


async def test_wrong_clock_of_the_service_changes_no_lifetime(bench: Bench) -> None:
    """A sandbox that the service lists is alive, even if the service's clock is an hour behind."""
    bench.server.settings["clock_offset_s"] = -3600.0
    async with bench.box() as box:
        await box.touch(600)
        (info,) = await bench.provider.list()

        assert (info.alive, info.expires > time.time()) == (True, True)


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
    """Seconds, dates and headers of throttlers give a wait. Other values give none."""
    assert retry_after(headers) == seconds


def test_time_of_a_date_is_from_now() -> None:
    """A date in the future is a wait until then."""
    stamp = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))

    assert 90 < (retry_after({"Retry-After": stamp}) or 0) < 101
