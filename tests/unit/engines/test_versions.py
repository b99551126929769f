"""Which versions may sample a session."""

import pytest
from pydantic import ValidationError

from perdure.engines.pool.versions import Versions
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
def test_a_group_takes_its_version_and_as_many_later_ones(
    version: int | None, included: bool, allowed: bool
) -> None:
    """Older and unknown weights may fit after an update; newer ones never."""
    assert (HELD.include(version), HELD.allow(version)) == (included, allowed)


@pytest.mark.parametrize("labels", [{}, {"policy_version": "12"}])
def test_without_a_staleness_any_version_will_do(labels: dict[str, str]) -> None:
    """A policy version alone restricts nothing."""
    assert Versions.of(labels).include(None)


def test_a_staleness_needs_the_version_that_it_counts_from() -> None:
    """Refused by name, in a rollout and in the template of a run."""
    with pytest.raises(ConfigurationError, match="policy_version"):
        RolloutRequest(run_id="r", instance="toy/add", max_staleness=1)
    run = RunRequest(run_id="r", dataset="toy", rollout={"max_staleness": 1})
    with pytest.raises(ValidationError, match="policy_version"):
        run.rollout_request("toy/add")
