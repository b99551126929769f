"""Episodes in the store for people and trainers, and the totals of a run."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from perdure.cli.runs.run_text import differences, failures
from perdure.client.batch_collection import FinishedGroup
from perdure.episodes.episode import (
    AttemptSummary,
    Episode,
    EpisodeParts,
    ModelUsage,
    build_episode,
)
from perdure.episodes.episode_assembly import assemble, calls_of
from perdure.episodes.episode_parquet import encode_segments
from perdure.episodes.episode_store import read_episode, read_run
from perdure.episodes.run_manifest import build_manifest, counted, pass_at
from perdure.episodes.trajectory_segments import cut
from perdure.episodes.turns_parquet import encode
from perdure.errors import Boundary
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.storage.s3_store import S3Store
from perdure.types import (
    CalibrationState,
    Failure,
    Grade,
    GroupRequest,
    Outcome,
    Purpose,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
    Verification,
    VersionSpan,
)
from tests.s3_server import with_bucket
from tests.stored_episodes import store_episode

ROLLOUTS, PAGE = 45, 20
RESOLVED = Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0))
UNRESOLVED = Grade(outcome=Outcome.UNRESOLVED, rewards=Rewards(binary=0.0))
LOST = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="gone")
TURNS = (
    Turn(
        index=0,
        prompt_ids=(1, 2),
        completion_ids=(3,),
        logprobs=(-0.5,),
        versions=(VersionSpan(version=4, start=0, end=1),),
        bridge_miss="first",
    ),
    Turn(
        index=1,
        prompt_ids=(9,),
        completion_ids=(5, 6),
        logprobs=(-0.25, -1.0),
        versions=(VersionSpan(version=5, start=0, end=2),),
        bridge_miss="prefix_changed",
    ),
)


def parts(grade: Grade | None = RESOLVED, sample_index: int = 0, **fields: Any) -> EpisodeParts:
    instance = fields.pop("instance_ref", "tests/click-1")
    values: dict[str, Any] = {
        "request": RolloutRequest(run_id="r", instance=instance, sample_index=sample_index),
        "status": RolloutStatus.GRADED if grade else RolloutStatus.FAILED,
        "failure": None if grade else LOST,
        "started_at": 100.0,
        "finished_at": 160.5,
        "grade": grade,
        "attempts": (AttemptSummary(attempt=1),),
    }
    return EpisodeParts(**{**values, **fields})


def episode(grade: Grade | None = RESOLVED, sample_index: int = 0, **fields: Any) -> Episode:
    made = parts(grade, sample_index, **fields)
    return build_episode(made, cut(made.turns))


def rows(made: EpisodeParts) -> list[dict[str, Any]]:
    segments = cut(made.turns)
    data = encode_segments(build_episode(made, segments), segments)
    found: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    return found


def test_episode_sums_up_its_turns() -> None:
    """Counts, versions and bridge misses are those of the recorded turns."""
    made = episode(turns=TURNS)

    assert (made.turns, len(made.segments), made.prompt_tokens, made.sampled_tokens) == (2, 2, 3, 3)
    assert (made.policy_version_min, made.policy_version_max) == (4, 5)
    assert made.bridge_misses == {"prefix_changed": 1}
    assert (made.trainable, made.trained_tokens) == (True, 3)
    assert [s.trained_tokens for s in made.segments] == [1, 2]


def test_failed_rollout_has_reward_null() -> None:
    """Without a verdict, the JSON has the reward null, never 0 and never absent."""
    written = json.loads(episode(grade=None, turns=TURNS).model_dump_json())

    assert (written["reward"], written["status"]) == (None, "failed")
    assert written["failure"]["boundary"] == "sandbox"
    assert not written["trainable"]


def test_failed_rollout_has_rows_with_reward_null() -> None:
    """A failed rollout's tokens are kept, with reward null in every row."""
    found = rows(parts(grade=None, turns=TURNS))

    assert [(row["reward"], row["rollout_reward"]) for row in found] == [(None, None)] * 2


def test_rollout_without_turns_has_one_row() -> None:
    """Without turns there is one row with empty arrays, so readers count the rollout."""
    (row,) = rows(parts(grade=None))

    assert (row["segment_kind"], row["num_segments"], row["response_ids"]) == (None, 0, [])
    assert (row["reward"], row["status"]) == (None, "failed")


def test_segment_rows_carry_their_share() -> None:
    """Each segment has its share of the reward, and the arrays as cut."""
    first, second = rows(parts(turns=TURNS))

    assert (first["reward"], first["rollout_reward"], first["num_segments"]) == (1.0, 1.0, 2)
    assert (first["segment_kind"], second["segment_kind"]) == ("wipe", "final")
    assert (second["prompt_ids"], second["response_ids"]) == ([9], [5, 6])
    assert (second["logprobs"], second["versions"]) == ([-0.25, -1.0], [5, 5])
    assert first["rollout_id"] == second["rollout_id"] == "rollout/r/click-1/0"


def test_hosted_turns_are_not_trainable() -> None:
    """One turn without exact ids makes the whole episode untrainable."""
    hosted = Turn(index=2, trainable=False)

    assert not episode(turns=(*TURNS, hosted)).trainable


@pytest.mark.parametrize(
    ("grade", "status"), [(RESOLVED, RolloutStatus.FAILED), (None, RolloutStatus.GRADED)]
)
def test_status_and_grade_must_agree(grade: Grade | None, status: RolloutStatus) -> None:
    """A failed rollout cannot have a verdict, and a graded one must have one."""
    with pytest.raises(ValueError, match="contradicts grade"):
        episode(grade=grade, status=status)


def test_reference_is_small() -> None:
    """The reference that passes through workflows is under 500 bytes with a typical failure."""
    ref = episode(grade=None).ref("file:///home/somebody/perdure/.perdure/store")

    assert len(ref.model_dump_json(exclude_defaults=True)) < 500
    assert ref.uri.endswith("/runs/r/rollouts/click-1/0/episode.json")


async def write(store: LocalStore, made: EpisodeParts) -> Episode:
    segments = cut(made.turns)
    return await store_episode(store, made, segments)


async def test_written_episode_is_read_back(tmp_path: Path) -> None:
    """Both forms are at their keys, and the readable one reads back equal."""
    store, made = LocalStore(tmp_path), parts(turns=TURNS)
    written = await write(store, made)

    assert await read_episode(store, made.request) == written
    assert await store.exists(store_keys.episode_tokens(made.request))


async def test_unfinished_rollout_has_no_episode(tmp_path: Path) -> None:
    """Reading gives None before the episode is written."""
    assert await read_episode(LocalStore(tmp_path), parts().request) is None


async def test_repeating_the_write_changes_nothing(tmp_path: Path) -> None:
    """A repeated activity of the same workflow run finds its first episode."""
    store, made = LocalStore(tmp_path), parts(workflow_run_id="w1")
    first = await write(store, made)
    second = await write(store, replace(made, finished_at=999.0))

    assert second == first


async def test_reset_workflow_replaces_the_episode(tmp_path: Path) -> None:
    """Another workflow run of the same rollout, as after a reset, writes its own verdict."""
    store = LocalStore(tmp_path)
    await write(store, parts(UNRESOLVED, workflow_run_id="w1"))
    await write(store, parts(RESOLVED, workflow_run_id="w2"))
    found = await read_episode(store, parts().request)

    assert found is not None
    assert found.reward == 1.0


async def test_run_is_read_in_order(tmp_path: Path) -> None:
    """A run's episodes are ordered by instance and sample, without other runs' episodes."""
    store = LocalStore(tmp_path)
    for sample in (10, 2):
        await write(store, parts(sample_index=sample))
    await write(store, parts(grade=None, instance_ref="tests/attrs-1"))
    trap = "runs/r/rollouts/click-1/2/attempts/1/agent/episode.json"
    await store.put(trap, b"what an agent called so")

    found = [(e.instance_id, e.sample_index) for e in await read_run(store, "r")]
    assert found == [("attrs-1", 0), ("click-1", 2), ("click-1", 10)]


async def test_a_run_in_s3_is_one_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One paged listing finds a run's episodes, however many; it has no other runs."""
    monkeypatch.setattr("perdure.storage.s3_store.PAGE", PAGE)
    with with_bucket("results") as server:
        store = S3Store("s3://results/store", endpoint_url=server.url)
        for run, number in (("r", ROLLOUTS), ("other", 1)):
            for sample in range(number):
                at = f"runs/{run}/rollouts/click-1/{sample}"
                await store.put(f"{at}/attempts/1/patch.diff", b"")
                await store.put(
                    f"{at}/episode.json", episode(None, sample).model_dump_json().encode()
                )
        before = server.lists
        found = await read_run(store, "r")

        assert sorted(one.sample_index for one in found) == list(range(ROLLOUTS))
        assert server.lists - before == -(-2 * ROLLOUTS // PAGE)


def samples(*grades: Grade | None, instance_ref: str = "tests/click-1") -> list[Episode]:
    return [episode(grade, k, instance_ref=instance_ref) for k, grade in enumerate(grades)]


@pytest.mark.parametrize(
    ("episodes", "passed"),
    [
        (
            samples(RESOLVED, RESOLVED, UNRESOLVED, UNRESOLVED),
            {"1": 0.5, "2": 0.8333, "3": 1.0, "4": 1.0},
        ),
        (samples(UNRESOLVED), {"1": 0.0}),
        (
            [
                *samples(RESOLVED, UNRESOLVED),
                *samples(UNRESOLVED, instance_ref="tests/attrs-1"),
            ],
            {"1": 0.25, "2": 1.0},
        ),
        ([], {}),
    ],
)
def test_pass_at_k_is_unbiased(episodes: Sequence[Episode], passed: dict[str, float]) -> None:
    """pass@k is 1 - C(n-c, k) / C(n, k), averaged over the instances with k samples."""
    assert pass_at(episodes) == passed


def manifest(episodes: Sequence[Episode]) -> dict[str, Any]:
    return build_manifest("r", [counted(episode) for episode in episodes])


def test_manifest_counts_failures_apart() -> None:
    """Failed rollouts are counted by boundary and do not lower the mean reward."""
    totals = manifest(samples(RESOLVED, None, UNRESOLVED))

    assert (totals["rollouts"], totals["graded"], totals["resolved"]) == (3, 2, 1)
    assert (totals["mean_reward"], totals["pass_at_1"]) == (0.5, 0.5)
    assert totals["failures_by_boundary"] == {"sandbox": 1}
    assert [entry["reward"] for entry in totals["episodes"]] == [1.0, None, 0.0]


def test_manifest_tells_environment_from_engine_time() -> None:
    """The environment's seconds are the agent's, without those in which it waited for an engine or
    the engine sampled."""
    slow = TURNS[0].model_copy(update={"engine_seconds": 4.0, "waiting_seconds": 3.0})
    totals = manifest([episode(turns=(slow,), stage_seconds={"agent": 10.0})])

    assert (totals["environment_seconds"], totals["engine_seconds"]) == (3.0, 4.0)


def test_manifest_of_nothing_graded_has_no_mean() -> None:
    """If no rollout has a verdict, the means are null, not 0."""
    totals = manifest(samples(None))

    assert (totals["mean_reward"], totals["pass_at_1"]) == (None, None)


def test_a_manifest_marks_rows_that_are_not_proved() -> None:
    """Rewards of quarantined rows are counted separately; entries have the row's state."""
    proved = RESOLVED.model_copy(update={"calibration": CalibrationState.PROVED})
    bad = RESOLVED.model_copy(update={"calibration": CalibrationState.QUARANTINED})

    totals = manifest(samples(proved, bad, RESOLVED, None))

    assert totals["calibration"] == {"not_calibrated": 1, "proved": 1, "quarantined": 1}
    assert [entry.get("calibration") for entry in totals["episodes"]] == [
        *("proved", "quarantined", "not_calibrated", None)
    ]


def test_a_manifest_counts_what_twins_change() -> None:
    """An exposed forgery is resolved only officially; its entry and reference say so."""
    exposed = RESOLVED.model_copy(
        update={
            "outcome": Outcome.TAMPERED,
            "official": Outcome.RESOLVED,
            "rewards": Rewards(binary=0.0),
            "verification": Verification(state="exposed"),
        }
    )
    found = samples(RESOLVED, exposed)

    totals = manifest(found)

    assert (totals["resolved"], totals["official_resolved"]) == (1, 2)
    assert totals["verification"] == {"exposed": 1}
    assert [entry.get("official") for entry in totals["episodes"]] == [None, "resolved"]
    assert [one.ref("file:///x").official for one in found] == [None, Outcome.RESOLVED]
    assert differences([one.ref("file:///x") for one in found]) == [
        f"{found[1].instance_id} #1: officially resolved, but tampered"
    ]


def test_a_withheld_reward_is_none_everywhere_and_the_verdict_stays() -> None:
    """Episode, reference, and manifest say why; the mean covers only rewards that count."""
    why = "unverified, and its patch has signals: a.py: gc.get_objects (objects)"
    kept = RESOLVED.model_copy(update={"signals": ("a.py: gc.get_objects (objects)",)})
    found = samples(kept.model_copy(update={"withheld": why}), kept, UNRESOLVED)
    ref = found[0].ref("file:///x")

    totals = manifest(found)

    assert (found[0].reward, found[0].rewards) == (None, None)
    assert (ref.status, ref.reward, ref.withheld) == (RolloutStatus.GRADED, None, why)
    assert found[0].why_no_reward == f"its reward is withheld: {why}"
    assert failures([one.ref("file:///x") for one in found]) == [
        f"{found[0].instance_id} #0: reward withheld: {why}"
    ]
    assert (totals["graded"], totals["resolved"], totals["mean_reward"]) == (3, 2, 0.5)
    assert (totals["with_signals"], totals["resolved_with_signals"]) == (2, 2)
    assert totals["withheld_rewards"] == 1
    assert [entry.get("withheld") for entry in totals["episodes"]] == [why, None, None]


def test_what_discarded_attempts_bought_is_kept() -> None:
    """By model; a call that the last attempt replayed counts only with that attempt."""
    first = [
        Turn(index=n, prompt_ids=(1, 2), completion_ids=(3,), logprobs=(0.0,), model="m")
        for n in range(3)
    ]
    last = first[0].model_copy(update={"replayed_from": "p-ab12-agent-1/0"})
    tried = parts(attempts=(AttemptSummary(attempt=1), AttemptSummary(attempt=2)))

    made = assemble(tried, encode([last]), {1: calls_of(encode(first))}).episode

    assert [one.bought for one in made.attempts] == [
        (ModelUsage(model="m", turns=2, prompt_tokens=4, sampled_tokens=2),),
        (),
    ]
    assert made.usage == (ModelUsage(model="m", turns=1, prompt_tokens=2, sampled_tokens=1),)
    assert made.models == ("m",)


def test_no_model_is_named_policy() -> None:
    """That name requests whatever model is served; nop calls none."""
    asked = Turn(index=0, trainable=False, asked_model="policy", model="policy")

    assert build_episode(parts(turns=(asked,)), ()).models == ("unnamed",)
    assert build_episode(parts(), ()).models == ()


def test_collected_batches_count_what_is_trained() -> None:
    """Side calls, unused answers and untrained episodes do not count."""
    side = TURNS[1].model_copy(update={"purpose": Purpose.SIDE, "trainable": False})
    turns = (TURNS[0], side)
    trained = build_episode(parts(turns=turns), cut(turns)).ref("file:///x")
    failed = build_episode(parts(None, turns=turns), cut(turns)).ref("file:///x")

    assert (trained.tokens, trained.trained_tokens) == (3, 1)
    group = GroupRequest(rollout=RolloutRequest(run_id="r", instance="d/i"))
    assert FinishedGroup(group, (trained, failed)).trainable_tokens == 1


def test_the_grade_of_a_truncated_rollout_is_only_for_information() -> None:
    """It gives no outcome, no reward and nothing to train on. Scores leave the rollout out."""
    stopped = Failure(boundary=Boundary.RUN, type="Truncated", message="the run's deadline")
    made = episode(RESOLVED, status=RolloutStatus.TRUNCATED, failure=stopped, turns=TURNS)
    counts = manifest([made, episode(UNRESOLVED, 1)])

    assert (made.outcome, made.reward, made.trainable) == (None, None, False)
    assert made.grade is not None
    assert made.grade.outcome is Outcome.RESOLVED
    assert (counts["graded"], counts["resolved"], counts["mean_reward"]) == (1, 0, 0.0)
    assert counts["by_status"] == {"graded": 1, "truncated": 1}
