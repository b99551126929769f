"""The policy versions that may sample for a session."""

import pytest
from pydantic import ValidationError

from perdure.engines.pool.policy_versions import Versions
from perdure.errors import ConfigurationError
from perdure.types import RolloutRequest, RunRequest

HELD = Versions.of({"policy_version": "12", "max_staleness": "1"})


@pytest.mark.parametrize(
    ("version", "included", "allowed"),
    [
        (11, False, True),
        (12, True, True),
        (13, True, True),
        (14, False, False),
        (None, False, True),
    ],
)
def test_a_group_accepts_its_version_and_max_staleness_later_ones(
    version: int | None, included: bool, allowed: bool
) -> None:
    """An engine with older or unknown weights may fit after an update; one with newer weights never
    does."""
    assert (HELD.include(version), HELD.allow(version)) == (included, allowed)


@pytest.mark.parametrize("labels", [{}, {"policy_version": "12"}])
def test_without_max_staleness_any_version_is_accepted(labels: dict[str, str]) -> None:
    """A policy version alone restricts nothing."""
    assert Versions.of(labels).include(None)


def test_finishing_counts_from_the_oldest_version_by_itself() -> None:
    """A trainer's own engines have no version before they answer. Without `max_staleness`, nothing is too
    old."""
    RolloutRequest(run_id="r", instance="toy/add", max_staleness=1, too_stale="finish")
    with pytest.raises(ConfigurationError, match="too_stale 'finish' needs max_staleness"):
        RolloutRequest(run_id="r", instance="toy/add", too_stale="finish")


def test_max_staleness_needs_a_policy_version() -> None:
    """It is refused by name, in a rollout and in the template of a run."""
    with pytest.raises(ConfigurationError, match="policy_version"):
        RolloutRequest(run_id="r", instance="toy/add", max_staleness=1)
    run = RunRequest(run_id="r", dataset="toy", rollout={"max_staleness": 1})
    with pytest.raises(ValidationError, match="policy_version"):
        run.rollout_request("toy/add")
