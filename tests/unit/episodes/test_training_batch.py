"""Finished rollouts as padded arrays: exact values, and who counts."""

import math
from typing import Any

import pytest

from perdure.episodes.episode import EpisodeParts, EpisodeSegments, build_episode
from perdure.episodes.training_batch import Batch, BatchBuilder
from perdure.episodes.trajectory_segments import cut
from perdure.types import Grade, Outcome, Rewards, RolloutRequest, RolloutStatus, Turn, VersionSpan


def turn(index: int, prompt: tuple[int, ...], sampled: tuple[int, ...], **fields: Any) -> Turn:
    version = 7 + index
    return Turn(
        index=index,
        prompt_ids=prompt,
        completion_ids=sampled,
        logprobs=tuple(-0.25 * (index + 1) for _ in sampled),
        versions=(VersionSpan(version=version, start=0, end=len(sampled)),),
        **fields,
    )


ONE_SEGMENT = (turn(0, (11, 12), (21,)), turn(1, (11, 12, 21, 31), (22,), parent=0))
TWO_SEGMENTS = (turn(0, (11, 12), (23,)), turn(1, (90,), (24,)))


def rollout(
    sample_index: int,
    reward: float | None,
    turns: tuple[Turn, ...] = ONE_SEGMENT,
    row: str = "a",
    **fields: Any,
) -> EpisodeSegments:
    outcome = Outcome.RESOLVED if reward else Outcome.UNRESOLVED
    parts = EpisodeParts(
        request=RolloutRequest(
            run_id="r", instance=f"d/{row}", sample_index=sample_index, **fields
        ),
        status=RolloutStatus.FAILED if reward is None else RolloutStatus.GRADED,
        grade=None if reward is None else Grade(outcome=outcome, rewards=Rewards(binary=reward)),
        started_at=0.0,
        finished_at=1.0,
        turns=turns,
    )
    segments = tuple(cut(turns))
    return EpisodeSegments(build_episode(parts, segments), segments)


def batch(*found: EpisodeSegments, **options: Any) -> Batch[Any]:
    builder = BatchBuilder(**options)
    for one in found:
        builder.add(one)
    return builder.batch()


def test_each_segment_is_a_row() -> None:
    """Shorter rows are padded on the right; logprobs and versions are those of the sampled token."""
    made = batch(rollout(0, 1.0), rollout(1, 0.0, TWO_SEGMENTS))

    assert made.tokens.tolist() == [[11, 12, 21, 31, 22], [11, 12, 23, 0, 0], [90, 24, 0, 0, 0]]
    assert made.mask.astype(int).tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert made.logprobs.tolist() == [
        [0, 0, -0.25, 0, -0.5],
        [0, 0, -0.25, 0, 0],
        [0, -0.5, 0, 0, 0],
    ]
    assert made.versions.tolist() == [[-1, -1, 7, -1, 8], [-1, -1, 7, -1, -1], [-1, 8, -1, -1, -1]]
    assert made.lengths.tolist() == [5, 3, 2]
    assert made.rewards.tolist() == [1, 0, 0]
    assert made.rollouts.tolist() == [0, 1, 1]


def test_a_rollout_that_is_too_stale_counts_and_has_no_row() -> None:
    """Versions 7 and 8 sampled it. Its reward is in the mean of the others."""
    stale = rollout(2, 1.0, policy_version=7, max_staleness=0, too_stale="finish")
    made = batch(rollout(0, 1.0), rollout(1, 0.0), stale, std_normalization=False)

    assert made.rollouts.tolist() == [0, 1]
    assert made.advantages.tolist() == [pytest.approx(1 / 3), pytest.approx(-2 / 3)]
    assert made.episodes[2].too_stale.startswith("sampled by policy versions 7 to 8")


@pytest.mark.parametrize(
    ("fields", "is_too_stale"),
    [
        ({"max_staleness": 1}, False),
        ({"max_staleness": 0}, True),
        ({"max_staleness": 1, "policy_version": 6}, True),
        ({"max_staleness": 1, "policy_version": 7}, False),
    ],
)
def test_age_counts_from_the_version_asked_for_or_from_the_oldest(
    fields: dict[str, Any], is_too_stale: bool
) -> None:
    """Of a rollout that versions 7 and 8 sampled. The reward stays, and nothing is trained."""
    episode = rollout(0, 1.0, too_stale="finish", **fields).episode

    assert (bool(episode.too_stale), episode.trainable) == (is_too_stale, not is_too_stale)
    assert (episode.reward, episode.trained_tokens) == (1.0, 0 if is_too_stale else 2)
    assert episode.trajectory.untrained_tokens == ({"too_stale": 2} if is_too_stale else {})


def test_unknown_versions_may_be_too_old() -> None:
    """As in `fresh`: what has no version is not trained under a limit."""
    unknown = ONE_SEGMENT[1].model_copy(update={"versions": ()})
    found = rollout(0, 1.0, (ONE_SEGMENT[0], unknown), max_staleness=5, too_stale="finish")

    assert "did not report" in found.episode.too_stale


def test_dtypes_are_those_of_the_docstring() -> None:
    """A gather of torch needs int64 tokens."""
    made = batch(rollout(0, 1.0))
    names = ("tokens", "mask", "logprobs", "versions", "lengths", "rewards", "advantages")
    dtypes = [getattr(made, name).dtype.name for name in (*names, "rollouts", "groups")]

    assert dtypes == [
        "int64",
        "bool",
        "float32",
        "int64",
        "int64",
        "float32",
        "float32",
        *["int64"] * 2,
    ]


def test_advantages_are_of_the_group_s_graded_rollouts() -> None:
    """(r - mean) / (std + 1e-6), each rollout once, without those that have no reward. The mean and
    the standard deviation of 1, 0, 0 are 1/3 and sqrt(1/3)."""
    members = [rollout(0, 1.0), rollout(1, 0.0, TWO_SEGMENTS), rollout(2, None), rollout(3, 0.0)]
    made = batch(*members, rollout(0, 1.0, row="b"))
    scale = math.sqrt(1 / 3) + 1e-6
    expected = [2 / 3 / scale, *[-1 / 3 / scale] * 3, 0.0]

    assert made.advantages.tolist() == pytest.approx(expected)
    assert made.groups.tolist() == [0, 0, 0, 0, 1]
    assert made.group_ids == ("r/a", "r/b")
    assert [made.episodes[k].sample_index for k in made.rollouts] == [0, 1, 1, 3, 0]
    assert len(made.episodes) == 5


def test_equal_rewards_have_no_advantage() -> None:
    """Exactly 0, also where a float mean would differ from the rewards by a rounding error."""
    made = batch(*(rollout(k, 0.1) for k in range(3)))

    assert made.advantages.tolist() == [0.0] * 3


def test_advantages_need_no_standard_deviation() -> None:
    """Dr. GRPO subtracts only the mean."""
    made = batch(rollout(0, 1.0), rollout(1, 0.0), std_normalization=False)

    assert made.advantages.tolist() == [0.5, -0.5]


def test_a_batch_without_rewards_is_empty() -> None:
    """It has its episodes, with what went wrong, and arrays without rows."""
    made = batch(rollout(0, None))

    assert (made.tokens.shape, made.rewards.shape, len(made.episodes)) == ((0, 0), (0,), 1)
