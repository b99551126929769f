"""Stored parts of a rollout that were damaged: what the episode makes of them, and that readers notice."""

from pathlib import Path

import pytest

from perdure.episodes.episode_store import read_episode
from perdure.reports.facts import read_facts
from perdure.rollouts import checkpoints
from perdure.rollouts.boot import BootRecord
from perdure.rollouts.episode import emit_episode
from perdure.rollouts.grade import checkpoint
from perdure.rollouts.messages import AgentRun, Ending
from perdure.storage import keys
from perdure.storage.local import LocalStore
from perdure.types import AgentEnd, Outcome, RolloutRequest, RolloutStatus
from tests.unit.rollouts.test_play_again import captured, ending, request_of

BOOTED = BootRecord(identity="s", provider="local", host="h", booted_at=1.0, seconds=1.0)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def as_graded_by(request: RolloutRequest, grade: str) -> Ending:
    """Of a workflow that was reset to the task after its grade: its own run id graded nothing."""
    graded = ending(request, RolloutStatus.GRADED)
    return graded.model_copy(update={"workflow_run_id": "after-reset", "grade": grade})


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
    """The episode names it, and keeps what the others say."""
    request = request_of("b", 0)
    await captured(store, request)
    folder = keys.attempt(request, 1)
    await checkpoints.write(store, f"{folder}/sandbox.json", BOOTED)
    await checkpoints.write(store, f"{folder}/agent.json", AgentRun(end=AgentEnd.FINISHED))
    data = (await store.get(f"{folder}/{name}")).data
    broken = data[:20] if damage == "cut" else bytes([*data[:-99], data[-99] ^ 1, *data[-98:]])
    await store.put(f"{folder}/{name}", broken)

    ref = await emit_episode(store, ending(request, RolloutStatus.GRADED))

    episode = await read_episode(store, request)
    assert (ref.status, ref.outcome) == (RolloutStatus.GRADED, Outcome.RESOLVED)
    assert episode is not None
    assert [f"{folder}/{name} is unreadable" in line for line in episode.damaged] == [True]


async def test_a_damaged_grade_is_no_verdict_and_is_named(store: LocalStore) -> None:
    """What else the attempt left stays in the episode; the next start grades the patch again."""
    request = request_of("b", 0)
    patch = await captured(store, request)
    key = f"{keys.attempt(request, 1)}/{checkpoint('second-run')}"
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
    """A reward that somebody or a disk changed is believed by no reader."""
    request = request_of("b", 0)
    await captured(store, request)
    await emit_episode(store, ending(request, RolloutStatus.GRADED))
    key = keys.episode(request)
    data = (await store.get(key)).data
    await store.put(key, data.replace(b'"reward": 1.0', b'"reward": 0.0', 1))

    with pytest.raises(ValueError, match="sha256 differs"):
        await read_episode(store, request)
    assert (await read_facts(store, "r")).unreadable == (key,)
