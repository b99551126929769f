"""Damaged parts of a rollout in the store: what the episode makes of them, and that readers detect
them."""

import hashlib
import random
import tracemalloc
from pathlib import Path

import pytest

from perdure.episodes import turns_parquet
from perdure.episodes.episode import parse_episode
from perdure.episodes.episode_store import read_episode, read_segments
from perdure.errors import NotFound
from perdure.reports.rollout_facts import read_facts
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import AgentRun, Ending
from perdure.rollouts.boot_stage import BootRecord
from perdure.rollouts.episode_stage import emit_episode
from perdure.rollouts.gateway_session.session_cleanup import forget_sessions
from perdure.rollouts.grade_stage import checkpoint
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import AgentEnd, Outcome, RolloutRequest, RolloutStatus, Turn
from tests.store_with_runs import turns
from tests.unit.rollouts.test_play_again import captured, ending, request_of

BOOTED = BootRecord(identity="s", provider="local", host="h", booted_at=1.0, seconds=1.0)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def as_graded_by(request: RolloutRequest, grade: str) -> Ending:
    """The ending of a workflow that was reset to after its grade, so that its own run id graded
    nothing."""
    graded = ending(request, RolloutStatus.GRADED)
    return graded.model_copy(update={"workflow_run_id": "after-reset", "grade": grade})


def graded_at(request: RolloutRequest, attempt: int) -> Ending:
    return ending(request, RolloutStatus.GRADED).model_copy(update={"attempts": attempt})


async def test_a_reset_keeps_the_grade_of_its_history(store: LocalStore) -> None:
    """The grade was stored under the run id before the reset."""
    request = request_of("b", 0)
    await captured(store, request)

    ref = await emit_episode(store, as_graded_by(request, checkpoint("second-run")))

    assert (ref.status, ref.outcome, ref.reward) == (RolloutStatus.GRADED, Outcome.RESOLVED, 1.0)


@pytest.mark.parametrize("name", ["sandbox.json", "agent.json", "patch.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
async def test_a_damaged_checkpoint_costs_no_verdict(
    store: LocalStore, name: str, damage: str
) -> None:
    """The episode names the damaged checkpoint and keeps the data of the others."""
    request = request_of("b", 0)
    await captured(store, request)
    folder = store_keys.attempt(request, 1)
    await stage_checkpoints.write(store, f"{folder}/sandbox.json", BOOTED)
    await stage_checkpoints.write(store, f"{folder}/agent.json", AgentRun(end=AgentEnd.FINISHED))
    data = (await store.get(f"{folder}/{name}")).data
    broken = data[:20] if damage == "cut" else bytes([*data[:-99], data[-99] ^ 1, *data[-98:]])
    await store.put(f"{folder}/{name}", broken)

    ref = await emit_episode(store, ending(request, RolloutStatus.GRADED))

    episode = await read_episode(store, request)
    assert (ref.status, ref.outcome) == (RolloutStatus.GRADED, Outcome.RESOLVED)
    assert episode is not None
    assert [f"{folder}/{name} is unreadable" in line for line in episode.damaged] == [True]


async def test_a_damaged_grade_is_no_verdict_and_is_named(store: LocalStore) -> None:
    """The attempt's other evidence stays in the episode, and the next start grades the patch
    again."""
    request = request_of("b", 0)
    patch = await captured(store, request)
    key = f"{store_keys.attempt(request, 1)}/{checkpoint('second-run')}"
    data = (await store.get(key)).data
    await store.put(key, data.replace(b"1.0", b"0.0"))

    ref = await emit_episode(store, ending(request, RolloutStatus.GRADED))

    episode = await read_episode(store, request)
    assert (ref.status, ref.reward) == (RolloutStatus.FAILED, None)
    assert ref.failure is not None
    assert f"{key} is unreadable: its sha256 differs; start the rollout" in ref.failure.message
    assert episode is not None
    assert (episode.patch, len(episode.attempts)) == (patch, 1)


async def test_one_changed_byte_of_an_episode_is_noticed(store: LocalStore) -> None:
    """No reader trusts a reward that a user or a disk has changed."""
    request = request_of("b", 0)
    await captured(store, request)
    await emit_episode(store, ending(request, RolloutStatus.GRADED))
    key = store_keys.episode(request)
    data = (await store.get(key)).data
    await store.put(key, data.replace(b'"reward": 1.0', b'"reward": 0.0', 1))

    with pytest.raises(ValueError, match="sha256 differs"):
        await read_episode(store, request)
    assert (await read_facts(store, "r")).unreadable == (key,)


async def recorded(store: LocalStore, request: RolloutRequest) -> bytes:
    """The file of turns that the gateway wrote for attempt 1."""
    folder, data = store_keys.attempt(request, 1), turns_parquet.encode(turns())
    digest = hashlib.sha256(data).hexdigest()
    run = AgentRun(end=AgentEnd.FINISHED, turns=len(turns()), turns_sha256=digest)
    await captured(store, request)
    await stage_checkpoints.write(store, f"{folder}/agent.json", run)
    await store.put(f"{folder}/turns.parquet", data)
    return data


class DamagedJournals:
    """A gateway that can read no journal."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def write_turns(self, session_id: str) -> None:
        raise NotFound(f"session {session_id!r} is damaged: record 3 is missing")

    async def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)


async def damage(store: LocalStore, key: str, how: str) -> None:
    data = (await store.get(key)).data
    if how == "gone":
        await store.delete(key)
    elif how == "cut":
        await store.put(key, data[: len(data) // 2])
    else:
        await store.put(key, bytes([*data[:99], data[99] ^ 1, *data[100:]]))


DAMAGE = pytest.mark.parametrize("how", ["gone", "cut", "flipped"])


@DAMAGE
async def test_lost_turns_are_taken_from_the_journal(store: LocalStore, how: str) -> None:
    """The episode has all turns from the journal, and nothing is missing."""
    request = request_of("b", 0)
    data = await recorded(store, request)
    key = f"{store_keys.attempt(request, 1)}/turns.parquet"
    await damage(store, key, how)

    async def again(session: str) -> None:
        await store.put(key, data)

    ref = await emit_episode(store, ending(request, RolloutStatus.GRADED), again)

    episode = await read_episode(store, request)
    assert episode is not None
    assert (ref.turns, ref.trainable, episode.damaged) == (len(turns()), True, ())


@DAMAGE
async def test_an_episode_without_its_turns_says_so(store: LocalStore, how: str) -> None:
    """If the journal lacks them too, the verdict stays, and nothing is trained."""
    request = request_of("b", 0)
    await recorded(store, request)
    await damage(store, f"{store_keys.attempt(request, 1)}/turns.parquet", how)

    ref = await emit_episode(store, ending(request, RolloutStatus.GRADED))

    episode = await read_episode(store, request)
    assert episode is not None
    assert (ref.outcome, ref.turns, ref.trainable) == (Outcome.RESOLVED, 0, False)
    assert ["no journal has its turns" in line for line in episode.damaged] == [True]


@pytest.mark.parametrize(("how", "forgotten"), [("kept", 1), ("flipped", 0)])
async def test_the_journal_of_lost_turns_is_kept(
    store: LocalStore, tmp_path: Path, how: str, forgotten: int
) -> None:
    """The journal is the only place that still has some of the turns."""
    request = request_of("b", 0)
    await recorded(store, request)
    if how == "flipped":
        await damage(store, f"{store_keys.attempt(request, 1)}/turns.parquet", how)
    gateway = DamagedJournals()
    services = Services(Settings(home=tmp_path / "home", store=store.url))
    services.__dict__["gateway"] = gateway

    graded = ending(request, RolloutStatus.GRADED)
    ref = await emit_episode(store, graded, gateway.write_turns)
    await forget_sessions(services, graded, ref)

    episode = await read_episode(store, request)
    assert episode is not None
    assert len(gateway.forgotten) == forgotten
    assert ["record 3 is missing" in line for line in episode.damaged] == [True] * (1 - forgotten)


@DAMAGE
async def test_a_regrading_keeps_the_tokens_of_lost_turns(store: LocalStore, how: str) -> None:
    """A new verdict replaces the old one, and the tokens of the episode stay."""
    request = request_of("b", 0)
    await recorded(store, request)
    await emit_episode(store, ending(request, RolloutStatus.GRADED))
    before = await read_episode(store, request)
    assert before is not None
    segments = (await read_segments(store, before)).segments
    await damage(store, f"{store_keys.attempt(request, 1)}/turns.parquet", how)

    ref = await emit_episode(store, as_graded_by(request, checkpoint("second-run")))

    after = await read_episode(store, request)
    assert after is not None
    assert after.provenance.workflow_run_id == "after-reset"
    assert (ref.turns, ref.trainable) == (len(turns()), True)
    assert after.trained_tokens == before.trained_tokens > 0
    assert (await read_segments(store, after)).segments == segments


async def test_the_tokens_of_a_replaced_episode_are_kept(store: LocalStore) -> None:
    """A later run that lost everything replaces the verdict, and the earlier tokens stay
    readable."""
    request = request_of("b", 0)
    await recorded(store, request)
    await emit_episode(store, ending(request, RolloutStatus.GRADED))
    later = ending(request, RolloutStatus.FAILED).model_copy(
        update={"workflow_run_id": "later", "attempts": 2}
    )
    await emit_episode(store, later)

    now = await read_episode(store, request)
    assert now is not None
    (earlier,) = now.earlier
    kept = parse_episode(earlier.key, (await store.get(earlier.key)).data)
    assert now.segments == ()
    assert len((await read_segments(store, kept)).segments) == len(kept.segments) > 0


async def test_a_changed_byte_of_the_tokens_is_noticed(store: LocalStore) -> None:
    """No trainer reads ids or logprobs that no engine sampled."""
    request = request_of("b", 0)
    await recorded(store, request)
    await emit_episode(store, ending(request, RolloutStatus.GRADED))
    episode = await read_episode(store, request)
    assert episode is not None
    await damage(store, episode.tokens_key, "flipped")

    with pytest.raises(ValueError, match=r"episode\.parquet is unreadable: its sha256 differs"):
        await read_segments(store, episode)


async def test_an_unreadable_file_of_a_discarded_attempt_is_named(store: LocalStore) -> None:
    """The verdict stays, and the episode says that the cost of the attempt is unknown."""
    request = request_of("b", 0)
    await recorded(store, request)
    key = f"{store_keys.attempt(request, 1)}/turns.parquet"
    await damage(store, key, "flipped")
    await captured(store, request, attempt=2)

    ref = await emit_episode(store, graded_at(request, 2))

    episode = await read_episode(store, request)
    assert episode is not None
    assert (ref.outcome, episode.attempts[0].bought) == (Outcome.RESOLVED, ())
    assert episode.damaged == (f"{key} is unreadable: the cost of attempt 1 is unknown",)


async def test_turns_of_discarded_attempts_are_read_one_at_a_time(store: LocalStore) -> None:
    """A rollout with many long attempts needs only the memory of one of them."""
    request, last = request_of("b", 0), 13
    data = turns_parquet.encode([Turn(index=0, answer=random.Random(0).randbytes(2_000_000).hex())])
    for number in range(1, last):
        await store.put(f"{store_keys.attempt(request, number)}/turns.parquet", data)
    await captured(store, request, last)

    tracemalloc.start()
    await emit_episode(store, graded_at(request, last))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    episode = await read_episode(store, request)
    assert episode is not None
    assert [len(one.bought) for one in episode.attempts] == [1] * (last - 1) + [0]
    assert peak < 6 * len(data)
