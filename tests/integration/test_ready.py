"""Ready sandboxes: unused, taken once, owned by the rollout that took them, gone with their worker."""

import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.activity_context import ThisTry
from perdure.client import names
from perdure.rollouts.boot import BootRecord, take_ready
from perdure.rollouts.job import Job
from perdure.rollouts.messages import Attempt
from perdure.rollouts.sandbox.ready import MARK, ReadySandboxes, Unmetered, give_way
from perdure.rollouts.services import Services
from perdure.sandboxes.base import SandboxInfo, SandboxSpec
from perdure.sandboxes.permits import AccountState
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.tree import Settings
from perdure.storage import keys
from perdure.storage.local import LocalStore
from perdure.types import Outcome, RolloutRequest
from tests import burst
from tests.stack.host import why_not_here
from tests.stack.stack import Stack, running
from tests.stack.waiting import PATIENCE_S, until

pytestmark = pytest.mark.temporal

READY = 2


@pytest.fixture
async def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    monkeypatch.setenv("PERDURE_SANDBOX__READY", str(READY))
    async with running(tmp_path / "stack") as stack:
        yield stack


async def ready_ones(stack: Stack) -> Sequence[SandboxInfo]:
    return [box for box in await stack.provider.list({"run": "ready"}) if box.alive]


async def filled(stack: Stack, *taken: str) -> Sequence[SandboxInfo]:
    """Wait until all permitted sandboxes are ready, besides those that were taken."""

    async def enough() -> Sequence[SandboxInfo]:
        found = [box for box in await ready_ones(stack) if box.identity not in taken]
        return found if len(found) == READY else ()

    found: Sequence[SandboxInfo] = await until(enough, f"{READY} sandboxes are ready")
    return found


async def record_of(stack: Stack, request: RolloutRequest) -> BootRecord:
    stored = await stack.store.get(f"{keys.attempt(request, 1)}/sandbox.json")
    return BootRecord.model_validate_json(stored.data)


async def test_a_rollout_takes_a_ready_sandbox(stack: Stack) -> None:
    """The first rollout boots its own; the second uses one that was booted meanwhile."""
    first = await stack.start("first")
    await stack.episode(first)
    ready = {box.identity for box in await filled(stack)}
    second = await stack.start("second")
    episode = await stack.episode(second)
    own, taken = await record_of(stack, first), await record_of(stack, second)

    assert episode.outcome is Outcome.RESOLVED
    assert (own.identity == stack.identity(first, "agent"), taken.identity in ready) == (True, True)
    print(f"boot seconds: {own.seconds:.3f} own, {taken.seconds:.3f} ready")


async def test_the_reaper_knows_who_took_one(stack: Stack) -> None:
    """The one that a terminated rollout took is swept; those that are still ready stay."""
    await stack.episode(await stack.start("first"))
    await filled(stack)
    stack.engine.hold(3)
    request = await stack.start("terminated")
    await until(lambda: stack.engine.waiting, "the agent waits for its answer")
    taken = (await record_of(stack, request)).identity
    await filled(stack, taken)
    await stack.handle(request).terminate()
    swept = await stack.sweep(grace_s=0)
    left = {box.identity for box in await ready_ones(stack)}

    assert MARK in taken
    assert (swept.killed, taken in left, len(left)) == (1, False, READY)


async def test_a_worker_that_is_told_to_stop_leaves_none(stack: Stack) -> None:
    """After SIGTERM, the sandboxes that no rollout took are killed with the worker."""
    await stack.episode(await stack.start("first"))
    await filled(stack)
    await stack.workers[0].kill(signal.SIGTERM)

    assert await ready_ones(stack) == []


@pytest.fixture
async def crowd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Stack, Any]]:
    """An account of four sandboxes, two of which may be ready ones."""
    pytest.importorskip("e2b")
    pytest.importorskip("aiohttp")
    if missing := why_not_here():
        pytest.skip(missing)
    monkeypatch.setenv("PERDURE_SANDBOX__READY", str(READY))
    said = '{"e2b": {"live": 4}}'
    async with burst.capped(tmp_path, monkeypatch, live=4, rate=100, said=said) as pair:
        yield pair


@pytest.mark.longer
async def test_ready_ones_and_rollouts_share_an_account(crowd: tuple[Stack, Any]) -> None:
    """Two are ready on an account of four when twelve rollouts come, half of them with another spec:
    all are graded, none gets a 429, and at the end only ready ones are left."""
    stack, server = crowd
    await stack.episode(await stack.start("first", sandbox="e2b", agent="nop"))

    async def two_ready() -> bool:
        return len(server.sandboxes.all()) == READY

    await until(two_ready, "two are ready")
    limits = {"output_mb": 8}
    others = [
        await stack.start("other", sandbox="e2b", agent="nop", sample_index=n, limits=limits)
        for n in range(6)
    ]
    seen = await burst.run_burst(stack, server, 6, limit_s=PATIENCE_S)
    graded = [(await stack.episode(request)).reward is not None for request in others]

    async def all_known() -> bool:
        return len(server.sandboxes.all()) == await permits(stack)

    await until(all_known, "each sandbox has its permit, and each permit its sandbox")

    assert (seen.graded, seen.errors, seen.refused, all(graded)) == (6, 0, 0, True)


async def permits(stack: Stack) -> int:
    """Permits that the account's workflow counts as held."""
    keeper = stack.client.get_workflow_handle(
        names.account_id(E2BProvider(Settings(home=stack.home)).account)
    )
    return len((await keeper.query("state", result_type=AccountState)).permits)


async def test_a_try_that_died_after_it_took_one_leaves_it_to_the_next(tmp_path: Path) -> None:
    """The next try of the attempt, in another worker, has the same sandbox; another attempt has not."""
    settings = Settings(home=tmp_path / "home", sandbox={"ready": 1, "allow_local": True})
    store, free = LocalStore(str(tmp_path / "store")), Unmetered()
    provider = LocalProvider(settings)
    spec = SandboxSpec("/testbed", labels={"run": "r1"})
    died, after = ReadySandboxes(settings, store, {}), ReadySandboxes(settings, store, {})
    died.refill(provider, spec, free)
    await died.filled()
    took = await died.take(provider, spec, "rollout/r1/add/0", "1/taking.txt")
    assert took is not None
    other = await after.take(provider, spec, "rollout/r1/add/0", "2/taking.txt")
    same = await after.take(provider, spec, "rollout/r1/add/0", "1/taking.txt")
    await took.kill()
    gone = await after.take(provider, spec, "rollout/r1/add/0", "1/taking.txt")

    assert same is not None
    assert (same.identity, other, gone) == (took.identity, None, None)


async def test_one_is_ended_or_taken_never_both(tmp_path: Path) -> None:
    """A claim in the store decides: one that is taken is not ended, one that is ended not taken."""
    settings = Settings(home=tmp_path / "home", sandbox={"ready": 2, "allow_local": True})
    store, free = LocalStore(str(tmp_path / "store")), Unmetered()
    provider = LocalProvider(settings)
    spec = SandboxSpec("/testbed", labels={"run": "r1"})
    ready = ReadySandboxes(settings, store, {})
    ready.refill(provider, spec, free)
    await ready.filled()
    took = await ready.take(provider, spec, "rollout/r1/add/0", "1/taking.txt")
    assert took is not None
    (left,) = [one.identity for one in await provider.list() if one.identity != took.identity]
    ended = [await give_way(store, provider, name) for name in (took.identity, left)]
    nothing = await ready.take(provider, spec, "rollout/r1/add/1", "1/taking.txt")
    alive = [one.identity for one in await provider.list() if one.alive]
    await took.kill()

    assert (ended, nothing, alive) == ([False, True], None, [took.identity])


async def test_a_later_try_takes_none_that_it_had_not_taken_before(tmp_path: Path) -> None:
    """The try before may have begun to create the attempt's own sandbox, which would be left over."""
    allowed = {"ready": 1, "allow_local": True}
    settings = Settings(home=tmp_path / "home", store=str(tmp_path / "s"), sandbox=allowed)
    services, environment = Services(settings), ActivityEnvironment()
    provider = services.provider("local")
    spec = SandboxSpec("/testbed", labels={"run": "r1"})
    request = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop", sandbox="local")
    services.ready.refill(provider, spec, Unmetered())
    await services.ready.filled()
    found = []
    for number in (2, 1):
        environment.info = replace(environment.info, attempt=number)
        attempt = Attempt(request=request, attempt=1)
        job = await environment.run(Job.of, services, attempt, ThisTry())
        found.append(await environment.run(take_ready, job, spec))
    await services.close()
    taken = await provider.list()
    for box in taken:
        await provider.kill(box.identity)

    assert [box and box.identity for box in found] == [None, taken[0].identity]
