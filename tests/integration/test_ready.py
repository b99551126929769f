"""Sandboxes booted ahead: taken once, fresh, owned by whoever took them, and gone with their worker."""

import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from activities.boot_sandbox import BootRecord
from activities.ready import MARK
from perdure.sandboxes.base import SandboxInfo
from perdure.storage import keys
from perdure.types import Outcome, RolloutRequest
from tests import stack as stacks
from tests.stack import Stack, until

pytestmark = pytest.mark.temporal

READY = 2


@pytest.fixture
async def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    if missing := stacks.why_not_here():
        pytest.skip(missing)
    monkeypatch.setenv("PERDURE_READY_SANDBOXES", str(READY))
    async with stacks.running(tmp_path / "stack") as stack:
        yield stack


async def standing(stack: Stack) -> Sequence[SandboxInfo]:
    return [box for box in await stack.provider.list({"run": "ready"}) if box.alive]


async def filled(stack: Stack, *taken: str) -> Sequence[SandboxInfo]:
    """Wait until as many stand ready as may, besides those that were taken."""

    async def enough() -> Sequence[SandboxInfo]:
        found = [box for box in await standing(stack) if box.identity not in taken]
        return found if len(found) == READY else ()

    found: Sequence[SandboxInfo] = await until(enough, f"{READY} sandboxes are ready")
    return found


async def record_of(stack: Stack, request: RolloutRequest) -> BootRecord:
    stored = await stack.store.get(f"{keys.attempt(request, 1)}/sandbox.json")
    return BootRecord.model_validate_json(stored.data)


async def test_a_rollout_takes_one_that_stands_ready(stack: Stack) -> None:
    """The first rollout boots its own; the second is solved in one of those booted meanwhile."""
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
    """A terminated rollout's is swept although it was booted for nobody; the ready ones stay."""
    await stack.episode(await stack.start("first"))
    await filled(stack)
    stack.engine.hold(3)
    request = await stack.start("terminated")
    await until(lambda: stack.engine.waiting, "the agent waits for its answer")
    taken = (await record_of(stack, request)).identity
    await filled(stack, taken)
    await stack.handle(request).terminate()
    swept = await stack.sweep(grace_s=0)
    left = {box.identity for box in await standing(stack)}

    assert MARK in taken
    assert (swept.killed, taken in left, len(left)) == (1, False, READY)


async def test_a_worker_that_is_told_to_stop_leaves_none(stack: Stack) -> None:
    """SIGTERM: the sandboxes that nobody took are killed with the worker."""
    await stack.episode(await stack.start("first"))
    await filled(stack)
    await stack.workers[0].kill(signal.SIGTERM)

    assert await standing(stack) == []
