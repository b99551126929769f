"""Four hosts, one Temporal, one S3, gateways on two of them, addresses written nowhere.

one    gateway, all roles but `grade`
two    gateway, all roles but `grade`
three  no gateway, all roles but `grade`
four   no gateway, all roles; added while rollouts wait
"""

import asyncio
import contextlib
import time
from functools import partial

import pytest

from perdure.errors import NotFound
from perdure.rollouts.gateway_session.gateway_session import AWAY, GatewayOutage
from perdure.storage import store_keys
from perdure.types import RolloutRequest
from tests.hosts.host_cluster import Cluster
from tests.stack.wait_until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NO_GRADING = "workflows boot agent io"
A_MINUTE_S = 60.0
PATIENCE_S = 900.0


async def _ended(cluster: Cluster, requests: list[RolloutRequest], attempts: int = 1) -> None:
    for request in requests:
        over = partial(cluster.stack.is_over, request)
        await until(over, f"{request.workflow_id} is over", PATIENCE_S)
        episode = await cluster.stack.episode(request)
        found = (episode.reward, len(episode.attempts))
        assert found == (1.0, attempts), f"{episode}\n{cluster.last_words()}"


async def _begun(cluster: Cluster, run: str, count: int) -> list[RolloutRequest]:
    assert cluster.hosts, "the first test adds the hosts: run the whole file"
    cluster.stack.engine.hold(3)
    return [await cluster.stack.start(run, sample_index=k) for k in range(count)]


def _at_work(cluster: Cluster, requests: list[RolloutRequest], attempt: int = 1) -> set[str]:
    """Rollouts whose agent waits for the held answer."""
    names = {cluster.stack.identity(r, "agent", attempt): r.workflow_id for r in requests}
    arrived = {one.rpartition("-")[0] for one in cluster.stack.engine.waiting}
    return {names[one] for one in arrived & names.keys()}


async def _sees_the_gateway_again(cluster: Cluster, request: RolloutRequest) -> bool:
    """Whether the worker noted the outage of the gateway, and afterwards its return."""
    key = f"{store_keys.attempt(request, 1)}/{AWAY}"
    with contextlib.suppress(NotFound):
        away = GatewayOutage.model_validate_json((await cluster.stack.store.get(key)).data)
        return away.turns is not None
    return False


async def _all_at_work(
    cluster: Cluster, requests: list[RolloutRequest], count: int | None = None
) -> None:
    count = len(requests) if count is None else count
    what = f"{count} of {len(requests)} agents wait for their answer"
    await until(lambda: len(_at_work(cluster, requests)) >= count, what, PATIENCE_S)


async def test_rollouts_begin_where_seats_are_free_and_a_new_host_works_at_once(
    cluster: Cluster,
) -> None:
    """Three hosts with four seats take four of six; the fourth host, added then, takes the others and
    does all grading."""
    await asyncio.gather(
        cluster.add("one", seats=1, roles=NO_GRADING, gateway=True),
        cluster.add("two", seats=1, roles=NO_GRADING, gateway=True),
        cluster.add("three", seats=2, roles=NO_GRADING),
    )
    requests = await _begun(cluster, "spread", 6)
    await _all_at_work(cluster, requests, 4)
    before = {r.workflow_id: await cluster.where(r) for r in requests}
    await cluster.add("four", seats=2)
    joined = time.monotonic()
    await _all_at_work(cluster, requests)
    at_work_s = time.monotonic() - joined
    after = {r.workflow_id: await cluster.where(r) for r in requests}
    cluster.stack.engine.let_go()
    await _ended(cluster, requests)
    graded = [
        place for r in requests for place in await cluster.places(r, "grade_in_fresh_sandbox")
    ]
    print(f"the added host had its rollouts at work {at_work_s:.1f} s after it polled")

    assert sorted(before.values()) == ["", "", "one", "three", "three", "two"]
    assert sorted(after.values()) == ["four", "four", "one", "three", "three", "two"]
    assert {place.split("-")[0] for place in graded} == {"four"}


async def test_a_host_split_from_the_network_for_a_minute_returns(cluster: Cluster) -> None:
    """Its agents continue in their first attempt, because its worker sees the gateway again while they
    wait for an answer. An agent that ended before that would be replayed in a second attempt."""
    requests = await _begun(cluster, "split", 6)
    await _all_at_work(cluster, requests)
    split = [r for r in requests if await cluster.where(r) == "three"]
    three = cluster.hosts["three"]
    three.cut()
    await asyncio.sleep(A_MINUTE_S)
    three.mend()
    for request in split:
        sees = partial(_sees_the_gateway_again, cluster, request)
        await until(sees, f"{request.workflow_id} sees the gateway again", PATIENCE_S)
    cluster.stack.engine.let_go()
    await _ended(cluster, requests)

    assert split
    assert (await cluster.state(three)).number == 0


async def test_a_drained_host_gives_its_rollouts_away(cluster: Cluster) -> None:
    """SIGTERM to its worker, then the end of its sandboxes and of its signs of life: they begin again
    elsewhere, and are graded when it is back."""
    requests = await _begun(cluster, "drained", 6)
    await _all_at_work(cluster, requests)
    four = cluster.hosts["four"]
    moving = [r for r in requests if await cluster.where(r) == "four"]
    four.stop("worker")
    await cluster.leave(four)
    cluster.stack.engine.let_go()

    async def moved() -> bool:
        return all([len(await cluster.places(r, "boot_sandbox")) == 2 for r in moving])

    await until(moved, "its rollouts boot elsewhere", PATIENCE_S)
    boots = [place for r in moving for place in await cluster.places(r, "boot_sandbox")]
    await cluster.start_worker(four, seats=2)
    await _ended(cluster, [r for r in requests if r not in moving])
    await _ended(cluster, moving, 2)

    assert [place == "four" for place in boots] == [True, False] * 2


async def test_a_lost_host_with_a_gateway(cluster: Cluster) -> None:
    """Its rollouts start again elsewhere; agents on hosts that used its gateway ask the other one."""
    requests = await _begun(cluster, "lost", 6)
    await _all_at_work(cluster, requests)
    two = cluster.hosts["two"]
    lost = [r for r in requests if await cluster.where(r) == "two"]
    lost_at = time.monotonic()
    two.lose()
    cluster.stack.engine.let_go()
    await _ended(cluster, [r for r in requests if r not in lost])
    await _ended(cluster, lost, 2)
    print(f"all graded {time.monotonic() - lost_at:.0f} s after the loss of a host and its gateway")

    assert len(lost) == 1


async def test_a_lost_host_returns_and_works(cluster: Cluster) -> None:
    """With the disk it had, and without sandboxes of its earlier term."""
    two = await cluster.add("two", seats=1, roles=NO_GRADING, gateway=True)
    requests = await _begun(cluster, "back", 6)
    await _all_at_work(cluster, requests)
    there = [r for r in requests if await cluster.where(r) == "two"]
    cluster.stack.engine.let_go()
    await _ended(cluster, requests)

    assert len(there) == 1
    assert (await cluster.state(two)).number == 1
