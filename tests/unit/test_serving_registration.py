"""How replicas enter and leave the shared roster, and their places after deaths."""

import pytest

from perdure.errors import NotFound
from perdure.serving.commands import EnginePlan
from perdure.serving.registration import Registration, add_engine, drain_engine, remove_engine
from perdure.serving.roster import LoneRoster
from perdure.serving.state import EngineState

PLAN = EnginePlan(model="m")
URL = "http://127.0.0.1:8000"


async def test_a_generation_is_given_once() -> None:
    """Two boots never get the same fencing number, registered or not."""
    pool = Registration(LoneRoster())

    given = [await pool.reserve_generation() for _ in range(3)]

    assert given == [1, 2, 3]


async def test_a_replica_joins_under_the_generation_it_was_started_with() -> None:
    """The roster's generation is the one in the name that requests carry."""
    roster = LoneRoster()

    name = await Registration(roster).join(PLAN, URL, 5)

    record = (await roster.read()).get(name)
    assert record is not None
    assert (record.generation, record.wire_model) == (5, "policy-g5")


async def test_a_late_goodbye_does_not_touch_the_next_boot() -> None:
    """A boot that leaves an address takes only itself out of the pool."""
    roster = LoneRoster()
    pool = Registration(roster)
    await pool.join(PLAN, URL, 1)
    name = await pool.join(PLAN, URL, 2)

    await pool.leave(name, 1)

    assert (await roster.read()).get(name) is not None


async def test_a_notice_sets_the_deadline() -> None:
    """A replica on a leaving node takes nothing new, and is known to end at the deadline."""
    roster = LoneRoster()
    name = await Registration(roster).join(PLAN, URL, 1)

    await Registration(roster).drain(name, 1, 1234.0)

    record = (await roster.read()).get(name)
    assert record is not None
    assert (record.state, record.drain_by) == (EngineState.DRAINING, 1234.0)


async def test_an_engine_added_again_gets_another_weight() -> None:
    """Adding is safe to repeat: generation and state stay."""
    roster = LoneRoster()
    first = await add_engine(roster, f"{URL}/v1", "policy", 1.0)

    again = await add_engine(roster, URL, "policy", 3.0)

    assert again == first.model_copy(update={"weight": 3.0})


async def test_a_removed_engine_can_be_added_as_a_new_generation() -> None:
    """Out is out: what comes back is fenced from what was there."""
    roster = LoneRoster()
    first = await add_engine(roster, URL, "policy", 1.0)
    await remove_engine(roster, first.name)

    again = await add_engine(roster, URL, "policy", 1.0)

    assert (again.generation > first.generation, again.removed) == (True, False)


async def test_an_unknown_engine_is_told_with_the_fix() -> None:
    """A wrong name names the command that lists them."""
    with pytest.raises(NotFound, match="engines list"):
        await drain_engine(LoneRoster(), "nobody:1", 1.0)
