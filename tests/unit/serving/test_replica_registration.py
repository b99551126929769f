"""How replicas and engines enter, change in and leave the shared roster."""

import pytest

from perdure.engines.engine_roster import InMemoryRoster, add_engine, drain_engine, remove_engine
from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState
from perdure.engines.weights.weight_publishing import Published
from perdure.engines.weights.weight_update import _left_paused
from perdure.errors import NotFound
from perdure.serving.replica_plan import EnginePlan
from perdure.serving.replica_registration import ReplicaRegistration, lacks

PLAN = EnginePlan(model="m")
URL = "http://127.0.0.1:8000"
PUBLISHED = Published(version=8, source="/checkpoints/8")


async def test_a_generation_is_given_once() -> None:
    """Two starts never get the same fencing number, registered or not."""
    pool = ReplicaRegistration(InMemoryRoster())

    given = [await pool.reserve_generation() for _ in range(3)]

    assert given == [1, 2, 3]


async def test_a_replica_joins_under_the_generation_it_was_started_with() -> None:
    """The roster's generation is the one in the name that requests carry."""
    roster = InMemoryRoster()

    name = await ReplicaRegistration(roster).join(PLAN, URL, 5)

    record = (await roster.read()).get(name)
    assert record is not None
    assert (record.generation, record.wire_model) == (5, "policy-g5")


async def joined(roster: InMemoryRoster, published: Published | None) -> EngineRecord:
    name = await ReplicaRegistration(roster).join(PLAN, URL, 5, published)
    record = (await roster.read()).get(name)
    assert record is not None
    return record


async def test_a_replica_takes_no_session_before_it_has_what_was_published() -> None:
    """It joins paused, the manager loads the version into it, and it is ready with that version."""
    roster = InMemoryRoster()
    record = await joined(roster, PUBLISHED)
    assert (record.state, lacks(record, PUBLISHED)) == (EngineState.PAUSED, True)
    pool = ReplicaRegistration(roster)
    held = await pool.hold(record.name, 5, 8)
    assert held is not None

    await pool.finish_catch_up(held)

    ready = (await roster.read()).get(record.name)
    assert ready is not None
    assert (ready.state, ready.version, ready.held_by) == (EngineState.READY, 8, "")
    assert not lacks(ready, PUBLISHED)


async def test_a_replica_that_cannot_have_what_was_published_never_serves() -> None:
    """Its start is condemned, with the reason."""
    roster = InMemoryRoster()
    record = await joined(roster, PUBLISHED)
    held = await ReplicaRegistration(roster).hold(record.name, 5, 8)
    assert held is not None

    await ReplicaRegistration(roster).finish_catch_up(held, "no checkpoint there")

    dead = (await roster.read()).get(record.name)
    assert dead is not None
    assert (dead.state, dead.reason) == (EngineState.DEAD, "no checkpoint there")
    assert not dead.may_return("policy-g5")


async def test_what_only_the_trainer_can_bring_is_left_to_it() -> None:
    """Tensors that the trainer sent itself are stored nowhere, so a late replica waits for its next update."""
    sent = PUBLISHED.model_copy(update={"source": ""})

    record = await joined(InMemoryRoster(), sent)

    assert _left_paused(record)
    assert not lacks(record, sent)


async def test_a_replica_that_a_trainer_holds_is_not_taken_from_it() -> None:
    """The manager never loads weights into an engine that an update holds."""
    roster = InMemoryRoster()
    record = await joined(roster, None)
    update = record.to(EngineState.PAUSED, held_by="update 9, 1234", coming=9)
    await roster.change(lambda now: now.having(update))

    held = await ReplicaRegistration(roster).hold(record.name, 5, 8)

    assert held is None
    assert not lacks(update, PUBLISHED)


@pytest.mark.parametrize(("version", "behind"), [(None, True), (7, True), (8, False), (9, False)])
async def test_a_replica_that_serves_an_older_version_is_brought_the_newer(
    version: int | None, behind: bool
) -> None:
    """It joined while the trainer was publishing; one with a newer version is left to the trainer."""
    record = await joined(InMemoryRoster(), None)
    serving = record.to(EngineState.READY, version=version)

    assert lacks(serving, PUBLISHED) is behind


async def test_a_replica_that_a_trainer_made_newer_meanwhile_keeps_that() -> None:
    """If the trainer publishes 9 after the manager read 8, the replica stays at 9."""
    roster = InMemoryRoster()
    record = await joined(roster, None)
    newer = record.to(EngineState.READY, version=9)
    await roster.change(lambda now: now.having(newer))

    held = await ReplicaRegistration(roster).hold(record.name, 5, 8)

    assert held is None
    assert (await roster.read()).get(record.name) == newer


async def test_a_late_leave_does_not_touch_the_next_start() -> None:
    """A replica that leaves removes only its own generation, not a later one at its address."""
    roster = InMemoryRoster()
    pool = ReplicaRegistration(roster)
    await pool.join(PLAN, URL, 1)
    name = await pool.join(PLAN, URL, 2)

    await pool.leave(name, 1)

    assert (await roster.read()).get(name) is not None


async def test_a_notice_sets_the_deadline() -> None:
    """A replica on a leaving node takes no new calls and ends at the deadline."""
    roster = InMemoryRoster()
    name = await ReplicaRegistration(roster).join(PLAN, URL, 1)

    await ReplicaRegistration(roster).drain(name, 1, 1234.0)

    record = (await roster.read()).get(name)
    assert record is not None
    assert (record.state, record.drain_by) == (EngineState.DRAINING, 1234.0)


async def test_an_engine_added_again_gets_another_weight() -> None:
    """Adding is safe to repeat: generation and state stay."""
    roster = InMemoryRoster()
    first = await add_engine(roster, EngineSpec(f"{URL}/v1"), "policy")

    again = await add_engine(roster, EngineSpec(URL, 3.0), "policy")

    assert again == first.model_copy(update={"weight": 3.0})


async def test_a_removed_engine_can_be_added_as_a_new_generation() -> None:
    """An engine that was removed and comes back is fenced from its earlier generation."""
    roster = InMemoryRoster()
    first = await add_engine(roster, EngineSpec(URL), "policy")
    await remove_engine(roster, first.name)

    again = await add_engine(roster, EngineSpec(URL), "policy")

    assert (again.generation > first.generation, again.removed) == (True, False)


async def test_a_draining_engine_that_is_added_again_is_taken_back() -> None:
    """Adding it again cancels the drain, so it does not leave at the old deadline."""
    roster = InMemoryRoster()
    first = await add_engine(roster, EngineSpec(URL), "policy")
    await drain_engine(roster, first.name, 300.0)

    again = await add_engine(roster, EngineSpec(URL), "policy")

    assert (again.state, again.drain_by) == (EngineState.STARTING, None)


async def test_an_unknown_engine_is_refused_with_the_fix() -> None:
    """A wrong name names the command that lists them."""
    with pytest.raises(NotFound, match="engines list"):
        await drain_engine(InMemoryRoster(), "nobody:1", 1.0)
