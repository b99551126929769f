"""The line of `perdure run` about what interrupted its rollouts."""

from perdure.cli.runs.interruptions import Interruptions
from perdure.episodes.episode import (
    AttemptSummary,
    EarlierVerdict,
    Episode,
    EpisodeParts,
    ModelUsage,
    build_episode,
)
from perdure.types import FinishReason, RolloutRequest, RolloutStatus, Turn


def episode(*attempts: AttemptSummary, replayed: int = 0, retried: int = 0) -> Episode:
    """`retried`: the attempt that had a verdict before a later start repeated the rollout."""
    turns = [
        Turn(index=i, replayed_from=f"s-1/{i}", finish_reason=FinishReason.STOP)
        for i in range(replayed)
    ]
    made = build_episode(
        EpisodeParts(
            request=RolloutRequest(run_id="r", instance="tests/a"),
            status=RolloutStatus.CANCELLED,
            started_at=0.0,
            finished_at=1.0,
            attempts=attempts,
            turns=turns,
        ),
        (),
    )
    earlier = EarlierVerdict(
        status=RolloutStatus.GRADED, attempt=retried, finished_at=0.0, key="earlier"
    )
    return made.model_copy(update={"earlier": (earlier,) if retried else ()})


def attempt(number: int, *, bought: int = 0, watched_again: bool = False) -> AttemptSummary:
    usage = (ModelUsage(model="m", turns=bought),) if bought else ()
    return AttemptSummary(
        attempt=number, provider="bubblewrap", bought=usage, watched_again=watched_again
    )


def line(*episodes: Episode, left_behind: int | None = None) -> str:
    return Interruptions.total(map(Interruptions.of, episodes)).line(left_behind)


def test_a_run_without_interruptions_prints_nothing() -> None:
    """Also if it is empty, and if a person repeated a rollout that had a verdict."""
    assert line() == line(episode(attempt(1)), left_behind=0) == ""
    assert line(episode(attempt(1, bought=3), attempt(2), retried=1)) == ""


def test_it_sums_up_what_the_episodes_recorded() -> None:
    """Lost sandboxes, lost watches and calls that were bought again, each with its number."""
    found = line(
        episode(attempt(1, bought=2), attempt(2), replayed=3),
        episode(attempt(1, bought=1), attempt(2), replayed=1),
        episode(attempt(1), attempt(2)),
        episode(attempt(1, watched_again=True)),
        left_behind=0,
    )

    assert found == (
        "Interrupted: 1 agent continued in the same sandbox; 2 agents continued in a new sandbox; "
        "1 agent began again in a new sandbox; 3 recorded model calls bought again; "
        "sandboxes left behind: 0"
    )


def test_a_lost_grading_counts() -> None:
    """Its evidence stays in the attempt's folder."""
    graded = attempt(1).model_copy(update={"evidence": ("runs/r/tests-lost-1.log",)})

    assert line(episode(graded)) == "Interrupted: 1 grading repeated in a new sandbox"
