"""Two hosts, one server, one store: what is lost with a host moves, and what lives stays."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from perdure.client import temporal_names
from perdure.home_folder import host_of
from perdure.rollouts.activity_messages import HostState
from perdure.types import RolloutRequest
from tests.s3_server import with_bucket
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack
from tests.stack.second_host import BUCKET, Line, lose, serves, two_hosts
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOVED_WITHIN_S = 90.0
A_MINUTE = 60 / 72
"""Of the time after which a silent host is lost."""

Hosts = tuple[Stack, Stack, Line]


@pytest.fixture(scope="module", autouse=True)
def _here() -> None:
    if missing := why_not_here():
        pytest.skip(missing)


@pytest_asyncio.fixture(loop_scope="module")
async def hosts(tmp_path: Path, silent_s: float | None) -> AsyncIterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        if silent_s is not None:
            patch.setenv("PERDURE_HOST__SILENT_S", str(silent_s))
        with with_bucket(BUCKET) as server:
            async with two_hosts(tmp_path, server) as hosts:
                yield hosts


@pytest.fixture
def silent_s(request: pytest.FixtureRequest) -> float:
    """In place of 72 s, for tests that are not about the time itself."""
    seconds: float = request.config.getoption("--silent", 24.0)
    return seconds


@pytest.mark.parametrize("silent_s", [None])
async def test_rollouts_of_a_lost_host_move_within_ninety_seconds(hosts: Hosts) -> None:
    """kill -9 of a whole host: its rollouts are booted on the other one, at most the turns in flight are
    bought again, and no clean-up is sent there."""
    first, second, _ = hosts
    requests = await second.met("moves", 3)
    await first.start_worker()
    bought = first.engine.stats().calls
    upkeep = temporal_names.upkeep_queue(host_of(second.settings))
    lost_at = time.monotonic()
    await lose(second)
    first.engine.let_go()
    await _moved_to(first, requests)
    seconds = time.monotonic() - lost_at

    for request in requests:
        episode = await first.episode(request)
        assert (episode.reward, len(episode.attempts)) == (1.0, 2), first.last_words()
        history = await first.handle(request).fetch_history()
        assert not [
            event
            for event in history.events
            if event.activity_task_scheduled_event_attributes.task_queue.name == upkeep
        ]
    again = first.engine.stats().calls - len(requests) * first.engine.turns
    print(
        f"moved after {seconds:.1f} s; of {bought} turns and {len(requests)} in flight, {again} again"
    )
    assert seconds < MOVED_WITHIN_S
    assert again <= len(requests), first.engine.times_sampled()


async def test_a_stopped_worker_is_no_lost_host(hosts: Hosts, silent_s: float) -> None:
    """SIGSTOP for longer than a host may be silent: nothing moves, and the rollouts go on."""
    first, second, _ = hosts
    requests = await second.met("moves", 2)
    await first.start_worker()
    [worker] = second.workers
    worker.popen.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.7 * silent_s)
    state = await _state(second)
    worker.popen.send_signal(signal.SIGCONT)
    second.engine.let_go()

    assert (state.lost, state.number) == (False, 0)
    await _all_in_attempt(second, requests, 1)


async def test_a_killed_worker_is_no_lost_host(hosts: Hosts, silent_s: float) -> None:
    """No worker for longer than a host may be silent: the next one finds the agents at work."""
    first, second, _ = hosts
    requests = await second.met("moves", 2)
    await first.start_worker()
    await second.workers[0].kill()
    await asyncio.sleep(1.7 * silent_s)
    state = await _state(second)
    await second.start_worker()
    second.engine.let_go()

    assert (state.lost, state.number) == (False, 0)
    await _all_in_attempt(second, requests, 1)


async def test_a_host_cut_off_for_a_minute_keeps_its_work(hosts: Hosts, silent_s: float) -> None:
    """Nothing moves: the agents worked on, and the host is heard again in time."""
    first, second, line = hosts
    requests = await second.met("moves", 2)
    await first.start_worker()
    line.cut()
    await asyncio.sleep(A_MINUTE * silent_s)
    line.mend()
    second.engine.let_go()

    await _all_in_attempt(second, requests, 1)
    assert (await _state(second)).number == 0


async def test_a_host_cut_off_for_long_ends_its_own_sandboxes(hosts: Hosts) -> None:
    """It reads in the store that its term is over, while it is cut off; later it serves again."""
    first, second, line = hosts
    requests = await second.met("moves", 2)
    await first.start_worker()
    line.cut()
    await _moved_to(first, requests)
    left = [second.box(request, "agent") for request in requests]
    await until(lambda: not any(box.exists for box in left), "it has ended its own sandboxes")
    first.engine.let_go()
    await _all_in_attempt(first, requests, 2)
    line.mend()
    await until(lambda: serves(second, 1), "the second host serves again")
    await first.workers[0].kill()
    [again] = await second.met("again")
    second.engine.let_go()

    await _all_in_attempt(second, [again], 1)


async def test_a_server_that_was_away_takes_no_host_for_lost(hosts: Hosts, silent_s: float) -> None:
    """Temporal is away for longer than a host may be silent: no sandbox ends, nothing moves."""
    first, second, _ = hosts
    requests = await second.met("moves", 2)
    await first.temporal.kill()
    await asyncio.sleep(1.5 * silent_s)
    await first.start_temporal()
    second.engine.let_go()

    await _all_in_attempt(second, requests, 1)
    assert (await _state(second)).number == 0


async def _moved_to(host: Stack, requests: list[RolloutRequest]) -> None:
    booted = [host.box(request, "agent", 2) for request in requests]
    await until(lambda: all(box.exists for box in booted), "all have a sandbox on the other host")


async def _all_in_attempt(host: Stack, requests: list[RolloutRequest], attempt: int) -> None:
    for request in requests:
        episode = await host.episode(request)
        assert (episode.reward, len(episode.attempts)) == (1.0, attempt), host.last_words()


async def _state(host: Stack) -> HostState:
    handle = host.client.get_workflow_handle(temporal_names.host_id(host_of(host.settings)))
    state: HostState = await handle.query("state", result_type=HostState)
    return state
