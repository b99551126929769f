"""Adapters: the trainers' own objects where they are installed, plain dicts where they are not."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perdure.episodes.episode import EpisodeParts, EpisodeSegments, build_episode
from perdure.episodes.segments import cut
from perdure.integrations import installed, skyrl, slime, torchtitan, verl
from perdure.types import Grade, Outcome, Rewards, RolloutRequest, RolloutStatus, Turn

TRAINERS = {
    "slime/utils/types.py": """
        import dataclasses
        import enum

        @dataclasses.dataclass
        class Sample:
            group_index: int | None = None
            index: int | None = None
            rollout_id: int | None = None
            prompt: str = ""
            tokens: list = dataclasses.field(default_factory=list)
            response: str = ""
            response_length: int = 0
            label: str | None = None
            reward: float | None = None
            loss_mask: list | None = None
            weight_versions: list = dataclasses.field(default_factory=list)
            rollout_log_probs: list | None = None
            remove_sample: bool = False
            metadata: dict = dataclasses.field(default_factory=dict)
            session_id: str | None = None

            class Status(enum.Enum):
                COMPLETED = "completed"
                TRUNCATED = "truncated"
                ABORTED = "aborted"

            status: Status = Status.COMPLETED

            @staticmethod
            def from_dict(data):
                return Sample(**{**data, "status": Sample.Status(data["status"])})
        """,
    "skyrl/train/generators/base.py": """
        import dataclasses

        @dataclasses.dataclass
        class TrajectoryID:
            instance_id: str
            repetition_id: int
        """,
    "torchtitan/experiments/rl/types.py": """
        import dataclasses

        @dataclasses.dataclass(frozen=True, slots=True)
        class RolloutTurnID:
            group_id: int
            rollout_id: int
            turn_id: int

        @dataclasses.dataclass(kw_only=True, slots=True)
        class TrainingSample:
            min_policy_version: int
            max_policy_version: int
            rollout_id: RolloutTurnID
            token_ids: list
            loss_mask: list
            logprobs: list
            advantage: list
        """,
    "verl/experimental/agent_loop/agent_loop.py": """
        from typing import Any
        from pydantic import BaseModel

        class AgentLoopMetrics(BaseModel, extra="forbid"):
            generate_sequences: float = 0.0
            tool_calls: float = 0.0
            compute_score: float = 0.0
            num_preempted: int = -1

        class AgentLoopOutput(BaseModel, extra="forbid"):
            prompt_ids: list[int]
            response_ids: list[int]
            response_mask: list[int]
            response_logprobs: list[float] | None = None
            routed_experts: Any | None = None
            multi_modal_data: dict[str, Any] | None = None
            reward_score: float | None = None
            num_turns: int = 0
            metrics: AgentLoopMetrics
            extra_fields: dict[str, Any] = {}
            mm_processor_kwargs: dict[str, Any] | None = None
        """,
}
"""The published fields and their types, without what their modules import (torch and more)."""


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages of the trainers' names, importable for one test."""
    for path, text in TRAINERS.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text(dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    names = {path.partition("/")[0] for path in TRAINERS}
    for module in [one for one in sys.modules if one.partition(".")[0] in names]:
        del sys.modules[module]


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
def test_torchtitan_gets_its_training_samples(found: EpisodeSegments) -> None:
    """Every field of `TrainingSample` is given, and no other."""
    (sample,) = torchtitan.training_samples(found, group_id=3, advantage=0.5)

    assert (sample.rollout_id.group_id, sample.rollout_id.rollout_id) == (3, 4)
    assert sample.advantage == [0.0, 0.5, 0.5]


@pytest.mark.usefixtures("trainers")
def test_verl_gets_its_outputs(found: EpisodeSegments) -> None:
    """Every field is one that `AgentLoopOutput` has, with a type that it accepts."""
    (output,) = verl.agent_loop_outputs(found)

    assert (type(output).__name__, output.reward_score) == ("AgentLoopOutput", 1.0)


def test_without_the_trainers_there_are_plain_fields(found: EpisodeSegments) -> None:
    """Nothing has to be installed to look at what a trainer would get."""
    rows: list[Any] = [
        *slime.samples(found),
        *torchtitan.training_samples(found, group_id=0, advantage=1.0),
        *verl.agent_loop_outputs(found),
        skyrl.generator_output([found]),
    ]

    assert [type(row) for row in rows] == [dict] * 4


@pytest.mark.usefixtures("trainers")
def test_a_trainer_that_changed_is_an_error() -> None:
    """If a trainer is installed without the class, that is an error and not a dict."""
    with pytest.raises(ImportError, match="no longer has Episode"):
        installed.find("torchtitan.experiments.rl.types", "Episode")
