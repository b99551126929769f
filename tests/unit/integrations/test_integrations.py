"""Adapters: the trainers' own objects where they are installed, plain dicts where they are not."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.episodes.episode import EpisodeParts, EpisodeSegments, build_episode
from perdure.episodes.trajectory_segments import cut
from perdure.integrations import skyrl, slime, trainer_imports, verl
from perdure.types import Grade, Outcome, Rewards, RolloutRequest, RolloutStatus, Turn
from tests.unit.integrations import stand_ins


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages of the trainers' names, importable for one test."""
    with stand_ins.installed(tmp_path, monkeypatch):
        yield


@pytest.fixture
def found() -> EpisodeSegments:
    turns = (Turn(index=0, prompt_ids=(1,), completion_ids=(2, 3), logprobs=(-0.5, -0.25)),)
    parts = EpisodeParts(
        request=RolloutRequest(run_id="r", instance="tests/click-1", sample_index=4),
        status=RolloutStatus.GRADED,
        grade=Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0)),
        started_at=0.0,
        finished_at=1.0,
        turns=turns,
    )
    segments = cut(turns)
    return EpisodeSegments(build_episode(parts, segments), tuple(segments))


@pytest.mark.usefixtures("trainers")
def test_slime_gets_its_samples(found: EpisodeSegments) -> None:
    """`Sample.from_dict` takes every field; the status is its own."""
    (sample,) = slime.samples(found, index=7)

    assert (type(sample).__name__, sample.status.name, sample.index) == ("Sample", "COMPLETED", 7)
    assert (sample.tokens, sample.response_length, sample.reward) == ([1, 2, 3], 2, 1.0)


@pytest.mark.usefixtures("trainers")
def test_skyrl_gets_its_trajectory_ids(found: EpisodeSegments) -> None:
    """Instance and sample name the trajectory, in SkyRL's own type."""
    (identity,) = skyrl.generator_output([found])["trajectory_ids"]

    assert dataclasses.asdict(identity) == {"instance_id": "click-1", "repetition_id": 4}


@pytest.mark.usefixtures("trainers")
def test_verl_gets_its_outputs(found: EpisodeSegments) -> None:
    """Every field is one that `AgentLoopOutput` has, with a type that it accepts."""
    (output,) = verl.agent_loop_outputs(found)

    assert (type(output).__name__, output.reward_score) == ("AgentLoopOutput", 1.0)


def test_without_the_trainers_there_are_plain_fields(found: EpisodeSegments) -> None:
    """Nothing has to be installed to look at what a trainer would get."""
    rows: list[Any] = [
        *slime.samples(found),
        *verl.agent_loop_outputs(found),
        skyrl.generator_output([found]),
    ]

    assert [type(row) for row in rows] == [dict] * 3


@pytest.mark.usefixtures("trainers")
def test_a_trainer_that_changed_is_an_error() -> None:
    """If a trainer is installed without the class, that is an error and not a dict."""
    with pytest.raises(ImportError, match="no longer has Trajectory"):
        trainer_imports.find("skyrl.train.generators.base", "Trajectory")
