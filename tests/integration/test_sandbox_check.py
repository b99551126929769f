"""`perdure sandboxes check`: real sandboxes of this host, and E2B's SDK against the double."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import AccountExhausted, ConfigurationError, NotFound, SandboxLost
from perdure.sandboxes.base import Sandbox
from perdure.sandboxes.guest.service_provider import ServiceProvider
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.testing import sandbox_burst, sandbox_check
from perdure.testing.sandbox_check import Bounds, BrokenPromise, CheckedContract, SandboxCheck
from perdure.testing.sandbox_check_page import page, public
from perdure.types import AccountCaps
from tests.checkout_paths import ROOT
from tests.service_harness import E2B, serving
from tests.stack.wait_until import until

FEW = ["create_twice_adopts", "attach_to_nothing_is_not_found", "memory_is_bounded"]
BOUNDS = Bounds(burst=3, limit_s=300)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract of three tests: `tests/contracts` runs all of them on every provider."""
    monkeypatch.setattr(sandbox_check, "contract_tests", lambda: FEW)
    monkeypatch.setattr(sandbox_check, "SETTLE_S", 1.0)


@pytest.fixture
async def double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Any, ServiceProvider]]:
    async with serving(E2B, tmp_path / "server", monkeypatch) as (server, _):
        yield server, E2B.made(tmp_path / "home")


def local(home: Path, kind: type[LocalProvider] = LocalProvider) -> LocalProvider:
    return kind(Settings(home=home, sandbox={"allow_local": True}))


async def checked(
    provider: Any, bounds: Bounds = BOUNDS, caps: AccountCaps | None = None
) -> SandboxCheck:
    return await sandbox_check.check(provider, bounds, caps or AccountCaps(), lambda _: None)


def test_every_part_names_tests_of_the_contract() -> None:
    """A renamed test does not leave its part of the report."""
    named = [name for names in sandbox_check.PARTS.values() for name in names]

    assert set(named) <= set(sandbox_check.contract_tests())
    assert len(named) == len(set(named))


@pytest.mark.usefixtures("few")
async def test_a_burst_above_the_cap_waits_and_leaves_nothing(
    double: tuple[Any, ServiceProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sandboxes boot, never more than the account allows; refusals are counted, and the report
    names the cap that they showed."""
    monkeypatch.setattr(sandbox_burst, "HOLD_S", 0.5)
    server, provider = double
    server.settings["max_live"] = 2
    monkeypatch.setattr(sandbox_check, "TESTS_AT_ONCE", 1)
    found = await checked(provider, Bounds(burst=4, limit_s=300, price_per_hour=3600.0))
    burst = found.burst

    assert burst is not None
    assert burst.created == 4
    assert burst.refused >= 1
    assert burst.most_at_once in (1, 2)
    assert burst.live_cap == burst.most_at_once
    assert (found.left_behind, server.sandboxes.all()) == (0, [])
    assert found.estimated_cost == pytest.approx(found.sandbox_seconds)
    assert found.sandbox_seconds > burst.sandbox_seconds > 0
    assert found.passed
    assert f'{{"e2b": {{"live": {burst.live_cap}}}}}' in page(found)


@pytest.mark.usefixtures("few")
async def test_what_is_not_promised_is_named(double: tuple[Any, ServiceProvider]) -> None:
    """A limit that the provider does not enforce counts neither as kept nor as failed."""
    found = await checked(double[1])
    (limits,) = [one for one in found.parts if one.part == "resource limits"]

    assert (limits.kept, limits.failed) == (0, 0)
    assert list(found.not_promised) == ["gateway_answers_and_may_restart", "memory_is_bounded"]


async def test_a_wrong_key_is_named_before_anything_is_made(
    double: tuple[Any, ServiceProvider],
) -> None:
    server, provider = double
    server.faults.add([{"match": ".", "status": 401, "times": None}])
    with pytest.raises(ConfigurationError, match="E2B_API_KEY"):
        await checked(provider)

    assert server.keys.all() == []


async def test_an_account_without_credits_is_named(double: tuple[Any, ServiceProvider]) -> None:
    server, provider = double
    body = {"message": "the team has no credits"}
    server.faults.add([{"match": E2B.create, "status": 402, "body": body, "times": None}])

    with pytest.raises(AccountExhausted, match="no credits"):
        await checked(provider)


async def test_a_bound_of_money_refuses_before_the_first_call(
    double: tuple[Any, ServiceProvider],
) -> None:
    """The worst case counts: no kill works, and each sandbox lives until its own time limit."""
    server, provider = double
    bounds = Bounds(burst=50, limit_s=300, price_per_hour=0.1, max_cost=1.0)
    with pytest.raises(ConfigurationError, match="lower --burst"):
        await checked(provider, bounds)
    with pytest.raises(ConfigurationError, match="needs --price"):
        await checked(provider, Bounds(burst=1, limit_s=300, max_cost=1.0))

    assert server.faults.log == []


class Leaky(LocalProvider):
    """Forgets the first kill of the first sandbox of a burst."""

    has_leaked = False

    async def kill(self, identity: str) -> None:
        if identity.startswith("burst-") and identity.endswith("-0") and not self.has_leaked:
            self.has_leaked = True
        else:
            await super().kill(identity)


@pytest.mark.usefixtures("few")
async def test_a_sandbox_left_behind_fails_the_check_and_is_removed(tmp_path: Path) -> None:
    provider = local(tmp_path / "home", Leaky)
    found = await checked(provider)

    assert (found.left_behind, found.passed) == (1, False)
    assert list(await provider.list()) == []


class Forgetful(LocalProvider):
    """Says that an unknown sandbox is lost."""

    async def attach(self, identity: str) -> Sandbox:
        try:
            return await super().attach(identity)
        except NotFound:
            raise SandboxLost("e2b_of-nobody at https://host.example/x is gone") from None


@pytest.mark.usefixtures("few")
async def test_a_broken_promise_is_named_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the test, what it promises and the error, but no key or URL."""
    monkeypatch.setenv("E2B_API_KEY", "e2b_of-nobody")
    found = public(await checked(local(tmp_path / "home", Forgetful)))

    assert not found.passed
    assert found.broken == [
        BrokenPromise(
            test="attach_to_nothing_is_not_found",
            promise="attach to an identity that was never used raises NotFound, not SandboxLost.",
            problem="SandboxLost: <hidden> at <url> is gone",
        )
    ]


@pytest.mark.usefixtures("few")
async def test_a_check_out_of_time_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(sandbox_check, "run_burst", endless)
    provider = local(tmp_path / "home")
    found = await checked(provider, Bounds(burst=3, limit_s=10))

    assert "--minutes" in found.stopped
    assert not found.passed
    assert list(await provider.list()) == []


async def test_a_cancelled_promise_leaves_no_process_that_creates(tmp_path: Path) -> None:
    """Ctrl-C also ends the process that plays a dying worker, before the last kill."""
    provider = local(tmp_path / "home")
    promise = CheckedContract().test_lost_answer_makes_no_second_box(provider)
    testing = asyncio.create_task(promise)
    await until(lambda: bool(multiprocessing.active_children()), "the other process runs")
    testing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await testing

    assert multiprocessing.active_children() == []
    assert list(await provider.list()) == []


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    """Starts `perdure sandboxes check --provider local` in `tmp_path`."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "PERDURE_HOME": str(tmp_path / "home"),
        "PERDURE_SANDBOX__ALLOW_LOCAL": "true",
    }
    argv = [sys.executable, "-m", "perdure.cli.main", "sandboxes", "check", "--provider", "local"]

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            argv, cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )

    return begin


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
async def test_an_interrupted_check_leaves_nothing(
    tmp_path: Path, start: Callable[[], subprocess.Popen[str]], signum: int
) -> None:
    """Ctrl-C removes its sandboxes. What kill -9 left is removed by the next check of this home."""
    provider = local(tmp_path / "home/checks")
    process = start()
    try:

        async def has_sandboxes() -> bool:
            return any(info.alive for info in await provider.list())

        await until(has_sandboxes, "the check has a sandbox")
        process.send_signal(signum)
        await asyncio.to_thread(process.wait, 120)
    finally:
        process.kill()
        process.communicate()
    left = len(await provider.list())
    found = await checked(provider)

    assert (left > 0) == (signum == signal.SIGKILL)
    assert (found.left_by_earlier, found.left_behind) == (left, 0)
    assert list(await provider.list()) == []


def test_the_command_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the page that it writes, and its JSON has the same figures."""
    from perdure.cli.main import invoke

    monkeypatch.setattr(sandbox_check, "contract_tests", lambda: FEW)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERDURE_SANDBOX__ALLOW_LOCAL", "true")
    folder = tmp_path / "sent"
    argv = ["sandboxes", "check", "--provider", "local", "--burst", "2", "--report", str(folder)]
    code = invoke(argv)
    written = (folder / "sandbox-check.md").read_text()
    document = json.loads((folder / "sandbox-check.json").read_text())

    assert code == 0, written
    assert capsys.readouterr().out.strip() == written.strip()
    assert "|created|2 of 2|" in written
    assert (document["burst"]["created"], document["left_behind"]) == (2, 0)
    assert str(tmp_path) not in json.dumps(document)
