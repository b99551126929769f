"""Which sample of a run each foreign attempt becomes."""

from typing import Any

import pytest

from perdure.adoption.foreign_rollouts import (
    ForeignRollout,
    digest_of,
    most_samples,
    of_one_maker,
    places,
)
from perdure.errors import ConfigurationError

REFS = {"a-1": "d/a-1", "b-2": "d/b-2"}


def attempt(instance_id: str = "a-1", **fields: Any) -> ForeignRollout:
    return ForeignRollout(
        instance_id=instance_id, origin="Harbor 1", **{"file": "f", "agent": "x", **fields}
    )


def test_verdicts_come_before_patches_and_failures_take_no_sample() -> None:
    """So a larger -n samples what is missing, and instances outside the run are told apart."""
    attempts = [
        attempt(file="1", patch="p"),
        attempt(file="2", lacks="ConnectionError"),
        attempt(file="3", scores={"reward": 0.0}),
        attempt("c-3", file="4", scores={"reward": 1.0}),
    ]

    placed, unknown = places(attempts, REFS, "")

    assert [(one.sample_index, one.adopted.file) for one in placed] == [(0, "3"), (1, "1")]
    assert [one.adopted.reward for one in placed] == [0.0, None]
    assert [one.instance_id for one in unknown] == ["c-3"]
    assert most_samples(placed) == 2


def test_work_of_several_agents_is_refused_until_one_is_chosen() -> None:
    """Attempts of different agents are not samples of one run."""
    attempts = [attempt(agent=name, model="m", patch="p") for name in ("x", "y")]
    failed = attempt(agent="z", lacks="ConnectionError")

    with pytest.raises(ConfigurationError, match=r"by x with m, y with m, and .*--by NAME"):
        of_one_maker([*attempts, failed], "")
    assert of_one_maker(attempts, "y") == attempts[1:]
    assert of_one_maker([attempts[0], failed], "") == [attempts[0], failed]


def test_a_verdict_of_several_scores_is_refused_until_one_is_chosen() -> None:
    several = [attempt(scores={"style": 1.0, "tests": 0.0})]

    with pytest.raises(ConfigurationError, match=r"f has no score 'reward', only style, tests"):
        places(several, REFS, "")
    assert places(several, REFS, "tests")[0][0].adopted.reward == 0.0


def test_the_digest_changes_with_a_verdict_and_with_a_patch() -> None:
    """Otherwise a run could be continued with other results."""
    variants: list[dict[str, Any]] = [{"scores": {"reward": 1.0}}, {"scores": {"reward": 0.0}}]
    variants += [{"patch": "p"}, {"patch": "q"}]

    digests = {digest_of(places([attempt(**one)], REFS, "")[0]) for one in variants}

    assert len(digests) == len(variants)
