"""Which engine a session gets, which calls wait, and how many agents an engine may have."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from perdure.engines.clients.vllm_control import Vitals
from perdure.engines.pool.engine_capacity import Capacity
from perdure.engines.pool.fair_queue import FairQueue
from perdure.engines.pool.session_routing import (
    IDLE_S,
    RECLAIM_S,
    Candidate,
    EngineStart,
    Leases,
    affinity,
)


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


def at(name: str, generation: int, *, capacity: int = 64, **more: Any) -> Candidate:
    return Candidate(EngineStart(name, generation), capacity, **more)


def engines(
    leases: Leases, places: list[Candidate], sessions: int, group: str = ""
) -> Counter[str]:
    """How many of so many new sessions each engine gets."""
    taken = [leases.take(f"{group}-{n}", group, places) for n in range(sessions)]
    return Counter(lease.start.name for lease in taken if lease)


def test_new_sessions_follow_the_weights(leases: Leases) -> None:
    """An engine of weight 3 gets three sessions for each of the other's."""
    places = [at("a", 1, weight=3.0), at("b", 2)]

    assert engines(leases, places, 40) == {"a": 30, "b": 10}


def test_a_session_stays_with_its_engine(leases: Leases) -> None:
    """Its KV cache is there, so a less loaded engine is no reason to move."""
    places = [at("a", 1), at("b", 2)]
    first = leases.take("s", "", places)
    engines(leases, places, 5)

    assert first is not None
    assert [leases.take("s", "", places) for _ in range(3)] == [first] * 3


def test_siblings_share_an_engine(leases: Leases) -> None:
    """Samples of one instance share one prompt, which is prefilled once."""
    places = [at("a", 1), at("b", 2)]

    groups = [engines(leases, places, 8, group) for group in ("x", "y", "z", "w")]

    assert all(len(group) == 1 for group in groups)
    assert {name: leases.agents(name) for name in "ab"} == {"a": 16, "b": 16}


@pytest.mark.parametrize("pair", [f"{n}{n + 1}" for n in range(0, 8, 2)])
def test_two_small_groups_do_not_share_one_of_two_engines(leases: Leases, pair: str) -> None:
    """Even if both prefer the same engine, four more agents there send the second group elsewhere."""
    places = [at("a", 1), at("b", 2)]

    for group in pair:
        engines(leases, places, 4, group)

    assert {name: leases.agents(name) for name in "ab"} == {"a": 4, "b": 4}


def test_an_engine_of_another_generation_is_another_engine(leases: Leases) -> None:
    """A lease on an earlier generation of an engine is void."""
    before = leases.take("s", "", [at("a", 1)])
    after = leases.take("s", "", [at("a", 2)])

    assert before is not None
    assert after is not None
    assert (before.start.generation, after.start.generation) == (1, 2)


def test_a_session_moves_when_its_engine_goes(leases: Leases) -> None:
    """It moves even to a full engine, because a session with a lease never goes back to the queue."""
    a, b = at("a", 1), at("b", 2, capacity=0)
    leases.take("s", "", [a, b])
    moved = leases.take("s", "", [b])

    assert moved is not None
    assert (moved.start.name, leases.moved, leases.agents("a")) == ("b", 1, 0)


def test_nothing_is_leased_beyond_capacity(leases: Leases) -> None:
    """Other gateways' requests count as well."""
    places = [at("a", 1, capacity=3, foreign=1.0), at("b", 2, capacity=1)]

    assert engines(leases, places, 9) == {"a": 2, "b": 1}


def test_an_idle_agent_gives_up_its_place_to_one_that_waits(leases: Leases, clock: Clock) -> None:
    """After a minute in a tool it loses its lease; never while it generates."""
    place = at("a", 1, capacity=2)
    engines(leases, [place], 2)
    leases.use("-1", 100)
    clock.now = RECLAIM_S + 1

    assert leases.reclaim([place])
    assert (leases.get("-0"), leases.reclaim([place])) == (None, False)


def test_the_lease_of_an_idle_session_expires(leases: Leases, clock: Clock) -> None:
    """A session that was never closed does not hold its lease for ever."""
    leases.take("s", "", [at("a", 1)])
    clock.now = IDLE_S + 1

    leases.expire()

    assert leases.agents("a") == 0


def test_a_group_spills_to_the_emptiest_engine(leases: Leases) -> None:
    """An overloaded engine gets no more sessions of its group; a session that it has stays."""
    places = [at("a", 1), at("b", 2)]
    taken = [leases.take(f"{n}", "g", places) for n in range(20)]
    home = taken[0].start.name if taken[0] else ""
    away = "b" if home == "a" else "a"
    first = leases.take("0", "g", places)

    assert [leases.agents(name) for name in (home, away)] == [16, 4]
    assert first == taken[0]


def test_a_group_goes_elsewhere_if_other_gateways_load_its_home(leases: Leases) -> None:
    """Their requests count as agents: three of them are more than the margin."""
    places = [at("a", 1), at("b", 2)]
    home = max(places, key=lambda place: affinity("g", place))
    home.foreign = 3.0
    lease = leases.take("s", "g", places)

    assert lease is not None
    assert lease.start != home.start


def test_the_groups_of_a_dead_engine_move_once(leases: Leases) -> None:
    """Each goes whole to one other engine, and stays there."""
    places = [at(name, n) for n, name in enumerate("abc")]
    for n in range(9):
        engines(leases, places, 4, f"g{n}")
    dead = {
        s: lease
        for n in range(9)
        for i in range(4)
        if (lease := leases.get(s := f"g{n}-{i}")) and lease.start.name == "a"
    }
    for session, lease in dead.items():
        leases.take(session, lease.group, places[1:])
    after = {lease.group: set[str]() for lease in dead.values()}
    for session, before in dead.items():
        lease = leases.take(session, before.group, places[1:])
        after[before.group] |= {lease.start.name} if lease else set()

    assert dead
    assert leases.moved == len(dead)
    assert all(len(names) == 1 for names in after.values())


def test_an_engine_that_joins_gets_its_share(leases: Leases) -> None:
    """Sessions move at their next turn while their engine is overloaded; one that generates stays."""
    old, new = at("a", 1), at("b", 2)
    engines(leases, [old], 60)
    leases.use("-0", 100)
    for n in range(60):
        leases.take(f"-{n}", "", [old, new])
    stayed = leases.get("-0")

    assert stayed is not None
    assert stayed.start.name == "a"
    assert (leases.moved, leases.agents("b")) == (17, 17)


def first_choices(places: list[Candidate], groups: int = 4000) -> dict[str, str]:
    """The engine that each of so many groups prefers."""
    keys = [f"run-7/{n}" for n in range(groups)]
    return {key: max(places, key=lambda place: affinity(key, place)).start.name for key in keys}


def test_preferences_follow_the_weights() -> None:
    """An engine of weight 3 is the first choice of three in five groups, within 3 %."""
    places = [at("a", 1, weight=3.0), at("b", 2), at("c", 3)]
    counts = Counter(first_choices(places).values())

    assert {name: counts[name] / 4000 for name in "abc"} == pytest.approx(
        {"a": 0.6, "b": 0.2, "c": 0.2}, abs=0.03
    )


def test_preferences_change_only_for_the_engine_that_joins_or_leaves() -> None:
    """A group's order of the other engines stays as it was."""
    few = first_choices([at("a", 1), at("b", 2), at("c", 3)])
    more = first_choices([at("a", 1), at("b", 2), at("c", 3), at("d", 4)])
    changed = {key for key in few if few[key] != more[key]}

    assert {more[key] for key in changed} == {"d"}
    assert len(changed) == pytest.approx(1000, abs=100)


def test_processes_agree_without_messages() -> None:
    """Each of two gateways sees half of each group; no group's prompt is prefilled twice."""
    here, there = Leases(), Leases()
    places = [at("a", 1), at("b", 2)]
    for n in range(6):
        for sample in range(8):
            (here, there)[sample % 2].take(f"{n}-{sample}", f"g{n}", places)
    homes = {
        (lease.group, lease.start.name)
        for leases in (here, there)
        for session in (f"{n}-{sample}" for n in range(6) for sample in range(8))
        if (lease := leases.get(session)) is not None
    }

    assert len(homes) == 6
    assert here.agents("a") + there.agents("a") == 24


def test_preferences_yield_to_load(leases: Leases) -> None:
    """No engine exceeds 1.1 times the load of the emptiest one plus 4 agents and a group."""
    places = [at(name, 1) for name in "abcd"]
    for n in range(64):
        engines(leases, places, 8, f"g{n}")
    loads = [leases.agents(name) for name in "abcd"]

    assert max(loads) <= 1.1 * (min(loads) + 1) + 4 + 8


def test_a_session_stays_on_the_engine_that_another_process_used(leases: Leases) -> None:
    """Its KV cache is there, also if this process did not know it; an earlier generation has no
    cache."""
    places = [at("a", 1), at("b", 2)]
    leases.take("s", "", places)
    found = [
        leases.take("s", "", places, last=EngineStart(name, n)) for name, n in (("a", 1), ("b", 2))
    ]
    gone = leases.take("s", "", places, last=EngineStart("a", 7))

    assert [lease.start for lease in found if lease] == [("a", 1), ("b", 2)]
    assert gone is not None
    assert (gone.start.name, leases.agents("a"), leases.agents("b")) == ("b", 0, 1)


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
    capacity: Capacity, looks: int, *, starved: int = 1, running: int = 9, agents: int = 64
) -> list[int]:
    """Its capacity after each of so many health checks of an engine that 18 contexts fit in."""
    seen = []
    for _ in range(looks):
        vitals = Vitals(kv_tokens=650_000, running=running, starved=starved)
        capacity.observe(vitals, agents=agents, mean_context=32_000)
        seen.append(capacity.agents)
    return seen


def test_an_engine_whose_requests_wait_for_kv_cache_keeps_the_agents_that_fit() -> None:
    """A short wait is no reason; a long one takes one agent after the other."""
    capacity = Capacity()
    seen = watched(capacity, 120)

    assert (seen[9], seen[-1], capacity.lowered) == (64, 18, True)


def test_contexts_that_do_not_fit_are_no_reason_by_themselves() -> None:
    """64 stay if the engine has time to read prompts again."""
    assert set(watched(Capacity(), 60, starved=0)) == {64}


def test_an_idle_engine_is_given_more_agents() -> None:
    """After a cut, and beyond what fits, because it has time to read a prompt again."""
    capacity = Capacity()
    lowest = min(watched(capacity, 120))

    assert watched(capacity, 40, starved=0, running=0)[-1] > lowest


def test_preemptions_count_as_a_lack_of_kv_cache() -> None:
    """SGLang reports nothing else. What an engine counted before it was known here does not count."""
    capacity, seen = Capacity(), []
    for preemptions in [1000] * 20 + list(range(1000, 1060)):
        vitals = Vitals(kv_tokens=650_000, running=9, preemptions=preemptions)
        capacity.observe(vitals, agents=64, mean_context=32_000)
        seen.append(capacity.agents)

    assert (seen[19], seen[-1] < 64) == (64, True)


def test_agents_above_a_lowered_capacity_wait_at_their_next_turn(leases: Leases) -> None:
    """Only if the capacity was lowered under pressure, and never while the agent generates."""
    place = at("a", 1, capacity=4)
    engines(leases, [place], 4)
    leases.use("-0", 100)
    lowered = at("a", 1, capacity=2, strict=True)

    sat = [leases.take(f"-{n}", "", [lowered]) is not None for n in range(4)]

    assert (sat, leases.agents("a")) == ([True, False, False, True], 2)
    assert leases.take("-3", "", [at("a", 1, capacity=1)]) is not None


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
