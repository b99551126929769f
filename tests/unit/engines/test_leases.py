"""Which engine a session gets, which calls wait, and how many agents an engine may have."""

import asyncio
from collections import Counter

import pytest

from perdure.engines.clients.vllm_control import Vitals
from perdure.engines.pool.leases import (
    IDLE_S,
    RECLAIM_S,
    Candidate,
    Capacity,
    EngineStart,
    Leases,
    affinity,
)
from perdure.engines.pool.queueing import FairQueue


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(clock=clock)


def engines(
    leases: Leases, places: list[Candidate], sessions: int, group: str = ""
) -> Counter[str]:
    """How many of so many new sessions each engine gets."""
    taken = [leases.take(f"{group}-{n}", group, places) for n in range(sessions)]
    return Counter(lease.engine for lease in taken if lease)


def test_new_sessions_follow_the_weights(leases: Leases) -> None:
    """An engine of weight 3 gets three sessions for each of the other's."""
    places = [Candidate("a", 1, weight=3.0), Candidate("b", 2)]

    assert engines(leases, places, 40) == {"a": 30, "b": 10}


def test_a_session_stays_with_its_engine(leases: Leases) -> None:
    """Its KV cache is there, so a less loaded engine is no reason to move."""
    places = [Candidate("a", 1), Candidate("b", 2)]
    first = leases.take("s", "", places)
    engines(leases, places, 5)

    assert first is not None
    assert [leases.take("s", "", places) for _ in range(3)] == [first] * 3


def test_siblings_share_an_engine(leases: Leases) -> None:
    """Samples of one instance share one prompt, which is prefilled once."""
    places = [Candidate("a", 1), Candidate("b", 2)]

    groups = [engines(leases, places, 8, group) for group in ("x", "y", "z", "w")]

    assert all(len(group) == 1 for group in groups)
    assert {name: leases.agents(name) for name in "ab"} == {"a": 16, "b": 16}


@pytest.mark.parametrize("pair", [f"{n}{n + 1}" for n in range(0, 8, 2)])
def test_two_small_groups_do_not_share_one_of_two_engines(leases: Leases, pair: str) -> None:
    """Even if both prefer the same engine, four more agents there send the second group elsewhere."""
    places = [Candidate("a", 1), Candidate("b", 2)]

    for group in pair:
        engines(leases, places, 4, group)

    assert {name: leases.agents(name) for name in "ab"} == {"a": 4, "b": 4}


def test_an_engine_of_another_generation_is_another_engine(leases: Leases) -> None:
    """A lease on an earlier generation of an engine is void."""
    before = leases.take("s", "", [Candidate("a", 1)])
    after = leases.take("s", "", [Candidate("a", 2)])

    assert before is not None
    assert after is not None
    assert (before.generation, after.generation) == (1, 2)


def test_a_session_moves_when_its_engine_goes(leases: Leases) -> None:
    """It moves even to a full engine, because a session with a lease never goes back to the queue."""
    a, b = Candidate("a", 1), Candidate("b", 2, capacity=0)
    leases.take("s", "", [a, b])
    moved = leases.take("s", "", [b])

    assert moved is not None
    assert (moved.engine, leases.moved, leases.agents("a")) == ("b", 1, 0)


def test_nothing_is_leased_beyond_capacity(leases: Leases) -> None:
    """Other gateways' requests count as well."""
    places = [Candidate("a", 1, capacity=3, foreign=1.0), Candidate("b", 2, capacity=1)]

    assert engines(leases, places, 9) == {"a": 2, "b": 1}


def test_an_idle_agent_gives_up_its_place_to_one_that_waits(leases: Leases, clock: Clock) -> None:
    """After a minute in a tool it loses its lease; never while it generates."""
    place = Candidate("a", 1, capacity=2)
    engines(leases, [place], 2)
    leases.use("-1", 100)
    clock.now = RECLAIM_S + 1

    assert leases.reclaim([place])
    assert (leases.get("-0"), leases.reclaim([place])) == (None, False)


def test_the_lease_of_an_idle_session_expires(leases: Leases, clock: Clock) -> None:
    """A session that was never closed does not hold its lease for ever."""
    leases.take("s", "", [Candidate("a", 1)])
    clock.now = IDLE_S + 1

    assert (leases.expire(), leases.agents("a")) == (1, 0)


def test_an_engine_that_joins_gets_its_share(leases: Leases) -> None:
    """Sessions with the cheapest prefill move first, those that generate last."""
    old, new = Candidate("a", 1), Candidate("b", 2)
    engines(leases, [old], 20)
    leases.use("-3", 10)
    for n in range(4, 20):
        leases.done(f"-{n}", 1000 * n)

    moved = leases.rebalance([old, new], "b")

    stayed = leases.get("-3")
    assert stayed is not None
    assert (moved, leases.agents("b"), stayed.engine) == (7, 7, "a")


def first_choices(places: list[Candidate], groups: int = 4000) -> dict[str, str]:
    """The engine that each of so many groups prefers."""
    keys = [f"run-7/{n}" for n in range(groups)]
    return {key: max(places, key=lambda place: affinity(key, place)).name for key in keys}


def test_preferences_follow_the_weights() -> None:
    """An engine of weight 3 is the first choice of three in five groups, within 3 %."""
    places = [Candidate("a", 1, weight=3.0), Candidate("b", 2), Candidate("c", 3)]
    counts = Counter(first_choices(places).values())

    assert {name: counts[name] / 4000 for name in "abc"} == pytest.approx(
        {"a": 0.6, "b": 0.2, "c": 0.2}, abs=0.03
    )


def test_preferences_change_only_for_the_engine_that_joins_or_leaves() -> None:
    """A group's order of the other engines stays as it was."""
    few = first_choices([Candidate("a", 1), Candidate("b", 2), Candidate("c", 3)])
    more = first_choices(
        [Candidate("a", 1), Candidate("b", 2), Candidate("c", 3), Candidate("d", 4)]
    )
    changed = {key for key in few if few[key] != more[key]}

    assert {more[key] for key in changed} == {"d"}
    assert len(changed) == pytest.approx(1000, abs=100)


def test_processes_agree_without_messages() -> None:
    """Each of two gateways sees half of each group; no group's prompt is prefilled twice."""
    here, there = Leases(), Leases()
    places = [Candidate("a", 1), Candidate("b", 2)]
    for n in range(6):
        for sample in range(8):
            (here, there)[sample % 2].take(f"{n}-{sample}", f"g{n}", places)
    homes = {
        (lease.group, lease.engine)
        for leases in (here, there)
        for session in (f"{n}-{sample}" for n in range(6) for sample in range(8))
        if (lease := leases.get(session)) is not None
    }

    assert len(homes) == 6
    assert here.agents("a") + there.agents("a") == 24


def test_preferences_yield_to_load(leases: Leases) -> None:
    """No engine exceeds 1.1 times the load of the emptiest one plus 4 agents and a group."""
    places = [Candidate(name, 1) for name in "abcd"]
    for n in range(64):
        engines(leases, places, 8, f"g{n}")
    loads = [leases.agents(name) for name in "abcd"]

    assert max(loads) <= 1.1 * (min(loads) + 1) + 4 + 8


def test_a_session_stays_on_the_engine_that_another_process_used(leases: Leases) -> None:
    """Its KV cache is there, also if this process did not know it; an earlier generation has no
    cache."""
    places = [Candidate("a", 1), Candidate("b", 2)]
    leases.take("s", "", places)
    found = [
        leases.take("s", "", places, last=EngineStart(name, n)) for name, n in (("a", 1), ("b", 2))
    ]
    gone = leases.take("s", "", places, last=EngineStart("a", 7))

    assert [lease.start for lease in found if lease] == [("a", 1), ("b", 2)]
    assert gone is not None
    assert (gone.engine, leases.agents("a"), leases.agents("b")) == ("b", 0, 1)


def test_processes_move_the_same_groups_to_an_engine_that_joins() -> None:
    """Both move the groups that prefer it, so the sessions of a group stay together."""
    old, new = Candidate("a", 1), Candidate("b", 2)
    processes = [Leases(), Leases()]
    for leases in processes:
        for n in range(32):
            leases.take(f"{n}", f"g{n}", [old])
        leases.rebalance([old, new], "b")
    moved = [
        {n for n in range(32) if (lease := leases.get(f"{n}")) and lease.engine == "b"}
        for leases in processes
    ]

    assert moved[0] == moved[1]
    assert len(moved[0]) == 12
    assert all(affinity(f"g{n}", new) > affinity(f"g{n}", old) for n in moved[0])


@pytest.mark.parametrize(
    ("kv_tokens", "context", "agents"),
    [(4_800_000, 32_000, 128), (650_000, 10_000, 64), (3_000_000, 30_000, 90), (None, 0, 64)],
)
def test_capacity_follows_kv_tokens_and_context(
    kv_tokens: int | None, context: float, agents: int
) -> None:
    """Between 64 and 128 agents while there is no KV pressure."""
    capacity = Capacity()
    capacity.observe(Vitals(kv_tokens=kv_tokens), agents=9, mean_context=context)

    assert capacity.agents == agents


def test_a_setting_bounds_the_agents_of_an_engine() -> None:
    """More than 128 where contexts fit, and fewer than 64 from the beginning."""
    large, small = Capacity(most=500), Capacity(most=8)
    for capacity in (large, small):
        capacity.observe(Vitals(kv_tokens=48_000_000), agents=9, mean_context=32_000)

    assert (large.agents, small.agents, Capacity(most=8).agents) == (500, 8, 8)


def watched(
    capacity: Capacity, looks: int, hit_rate: float, *, starved: int = 1, running: int = 9
) -> list[int]:
    """Its capacity at each of so many looks at an engine for 18 agents that has 64."""
    seen = []
    for look in range(looks):
        vitals = Vitals(
            kv_tokens=650_000,
            running=running,
            starved=starved,
            cache_queries=1e6 * look,
            cache_hits=1e6 * look * hit_rate,
        )
        capacity.observe(vitals, agents=64, mean_context=32_000)
        seen.append(capacity.agents)
    return seen


def test_an_engine_that_reads_prompts_again_and_again_gets_no_more_agents_than_fit() -> None:
    """Prompts of others evict the contexts of agents in tools, and requests queue inside the engine."""
    seen = watched(Capacity(), 120, hit_rate=0.05)

    assert (seen[0], 18 in seen, min(seen) < 18) == (64, True, True)


@pytest.mark.parametrize(
    ("hit_rate", "starved"),
    [(0.95, 1), (0.05, 0)],
    ids=["a queue alone", "an engine that has the time"],
)
def test_contexts_that_do_not_fit_are_no_reason_by_themselves(
    hit_rate: float, starved: int
) -> None:
    """64 stay if the cache serves them, or if the engine has time to read prompts again."""
    assert set(watched(Capacity(), 60, hit_rate, starved=starved)) == {64}


def test_an_idle_engine_is_given_more_agents() -> None:
    """After a cut, and beyond what fits, because it has time to read a prompt again."""
    capacity = Capacity()
    watched(capacity, 60, hit_rate=0.05)

    assert watched(capacity, 120, 0.95, starved=0, running=0)[-1] == 65


def test_preemptions_lower_capacity_whatever_fits() -> None:
    """Requests that were thrown out mean too many agents; what an engine counted before it was
    known here does not."""
    capacity, seen = Capacity(), []
    for preemptions in [1000] * 20 + list(range(1000, 1060)):
        vitals = Vitals(kv_tokens=4_800_000, running=9, preemptions=preemptions)
        capacity.observe(vitals, agents=90, mean_context=32_000)
        seen.append(capacity.agents)

    assert (seen[19], seen[-1] < 100) == (128, True)


def test_agents_above_a_lowered_capacity_wait_at_their_next_turn(leases: Leases) -> None:
    """Only if the capacity was lowered under pressure, and never while the agent generates."""
    place = Candidate("a", 1, capacity=4)
    engines(leases, [place], 4)
    leases.use("-0", 100)
    lowered = Candidate("a", 1, capacity=2, strict=True)

    sat = [leases.take(f"-{n}", "", [lowered]) is not None for n in range(4)]

    assert (sat, leases.agents("a")) == ([True, False, False, True], 2)
    assert leases.take("-3", "", [Candidate("a", 1, capacity=1)]) is not None


async def test_runs_take_turns() -> None:
    """A small run's call does not wait behind all of a large one's."""
    queue, order, room = FairQueue(), list[str](), 0

    async def call(run: str) -> None:
        def attempt() -> bool:
            if len(order) < room:
                order.append(run)
                return True
            return False

        await queue.wait(run, attempt)

    calls = [asyncio.ensure_future(call(run)) for run in ("large",) * 4 + ("small",)]
    await asyncio.sleep(0)
    for room in range(1, 6):  # noqa: B007  # read by the attempts
        queue.serve()
    await asyncio.gather(*calls)

    assert order == ["large", "small", "large", "large", "large"]


async def test_a_call_that_gave_up_leaves_the_queue() -> None:
    """Its turn goes to the next one."""
    queue, served = FairQueue(), list[str]()

    async def call(name: str) -> None:
        def attempt() -> bool:
            served.append(name)
            return True

        await queue.wait("run", attempt)

    gone, stays = (asyncio.ensure_future(call(name)) for name in ("gone", "stays"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    queue.serve()
    await stays

    assert (served, len(queue)) == (["stays"], 0)
