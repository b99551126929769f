"""A store on S3 refuses, resets and stalls under a whole stack: no rollout is lost, none is done twice.

`--rollouts 300` runs the test of the failing store with so many.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from perdure.storage.store_preflight import check_store
from perdure.types import RolloutRequest, RolloutStatus, RunRequest
from tests import loop_agent
from tests.s3_proxy import S3Proxy, cut, lose_answer, refuse, reset
from tests.s3_server import with_bucket
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE
from tests.stack.running_stack import MET, Stack, running
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFUSALS = (
    *(refuse(403, "InvalidAccessKeyId"), refuse(400, "ExpiredToken"), refuse(404, "NoSuchBucket")),
    *(refuse(403, "RequestTimeTooSkewed"), refuse(507), refuse(522), reset),
)
FAULTS = (*REFUSALS, refuse(503, "SlowDown"), refuse(408), lose_answer, cut)
IN_FLIGHT = 6
OUTAGE_S = 30.0
SEATS = 12
"""Rollouts with an agent at once: the machine is shared."""


@pytest.fixture(scope="module")
def proxy() -> Iterator[S3Proxy]:
    """Before an S3 server with one bucket."""
    with with_bucket("results") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERDURE_SLOTS__AGENT", str(SEATS))
        proxy = S3Proxy(server.url)
        yield proxy
        proxy.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def over_s3(proxy: S3Proxy, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    home = tmp_path_factory.mktemp("s3") / "stack"
    async with running(home, store="s3://results/chaos", s3_url=proxy.url) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(over_s3: Stack, proxy: S3Proxy) -> AsyncIterator[Stack]:
    await over_s3.refresh()
    yield over_s3
    proxy.heal()
    over_s3.engine.let_go()


async def test_rollouts_outlive_a_store_that_refuses(stack: Stack, proxy: S3Proxy) -> None:
    """Six agents end while every call is refused for 30 s: all are solved in their first attempt."""
    requests = await stack.met("refused", IN_FLIGHT)
    proxy.play(*REFUSALS)
    stack.engine.let_go()
    await _waiting_for_the_store(stack, requests)
    await asyncio.sleep(OUTAGE_S)  # not a wait for anything: the outage itself
    assert proxy.played > IN_FLIGHT
    proxy.heal()

    for request in requests:
        await stack.solved_once(request)


async def test_workers_and_gateways_start_in_the_middle_of_an_outage(
    stack: Stack, proxy: S3Proxy
) -> None:
    """Both are killed and started again while the store refuses: they wait for it, too.

    A turn in flight whose last half second was not on disk yet may be bought again.
    """
    requests = await stack.met("restarted", 2)
    proxy.play(*REFUSALS)
    stack.engine.let_go()
    await _waiting_for_the_store(stack, requests)
    await stack.kill_all(stack.gateway, *stack.workers)
    await stack.recover()
    await _waiting_for_the_store(stack, requests)
    proxy.heal()

    for request in requests:
        await stack.solved_once(request, again=1)


async def test_a_run_outlives_a_store_that_refuses(stack: Stack, proxy: S3Proxy) -> None:
    """The store refuses before the run starts and again when it ends: the run needs no one."""
    await check_store(stack.settings)
    proxy.play(*REFUSALS)
    run = await stack.perdure.start_run(_run(stack, "whole-run", 2))
    handle = stack.client.get_workflow_handle(run.handle.id)

    async def lists_in_vain() -> bool:
        pending = (await handle.describe()).raw_description.pending_activities
        return any(one.attempt > 1 and "s3://" in one.last_failure.message for one in pending)

    await until(lists_in_vain, "its list waits for the store")
    stack.engine.hold(MET)
    proxy.heal()
    requests = _requests(stack, "whole-run", 2)
    await stack.held(*requests)
    proxy.play(*REFUSALS)
    stack.engine.let_go()
    await _waiting_for_the_store(stack, requests)
    assert (await run.progress()).state == "running"
    proxy.heal()
    summary = await run.result()

    assert summary.by_status == {RolloutStatus.GRADED.value: 2}


async def test_all_are_right_on_a_store_that_fails_a_fifth_of_its_calls(
    stack: Stack, proxy: S3Proxy, request: pytest.FixtureRequest
) -> None:
    """Refusals, resets, lost answers and cut bodies, at random: all solved, none lost or doubled."""
    count: int = request.config.getoption("--rollouts")
    before = proxy.requests
    proxy.play(*FAULTS, share=0.2)
    run = await stack.perdure.start_run(_run(stack, "flaky", count))
    requests = _requests(stack, "flaky", count)
    summary = await run.result()
    print(f"{count} rollouts, {proxy.requests - before} calls, {proxy.played} failed")
    proxy.heal()

    assert summary.by_status == {RolloutStatus.GRADED.value: count}
    for one in requests:
        await stack.solved_once(one)


def _run(stack: Stack, run_id: str, count: int) -> RunRequest:
    rollout = stack.request(run_id).model_dump(
        include={"agent", "agent_options", "heartbeat_timeout_s", "agent_budget_s"}
    )
    assert rollout["agent"] == loop_agent.NAME
    return RunRequest(run_id=run_id, instances=(INSTANCE,), n_samples=count, rollout=rollout)


def _requests(stack: Stack, run_id: str, count: int) -> list[RolloutRequest]:
    return [stack.request(run_id, sample_index=k) for k in range(count)]


async def _waiting_for_the_store(stack: Stack, requests: list[RolloutRequest]) -> None:
    async def all_say_so() -> bool:
        found = [await stack.pending(request) for request in requests]
        return all(
            one is not None and one.attempt > 1 and "s3://results" in one.last_failure.message
            for one in found
        )

    await until(all_say_so, "every rollout says that it waits for the store")
