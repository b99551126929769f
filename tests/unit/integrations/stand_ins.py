"""The published classes of trainers, without what their modules import (torch and more)."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

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
            rollout_routed_experts: object = None
            rollout_top_p_token_ids: object = None
            rollout_top_p_token_offsets: object = None
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

            def to_dict(self):
                return {**self.__dict__, "status": self.status.value}
        """,
    "slime/rollout/sample_hooks.py": """
        _current_rollout_id = 3
        """,
    "slime/utils/http_utils.py": """
        asked = []
        answer = {}

        async def post(url, payload, max_retries=60, headers=None):
            asked.append((url, payload, headers))
            return answer
        """,
    "slime/rollout/sglang_rollout.py": """
        class SingletonMeta(type):
            _instances = {}

            def __call__(cls):
                return cls._instances.setdefault(cls, super().__call__())

        class GenerateState(metaclass=SingletonMeta):
            aborted = False
        """,
    "skyrl/train/generators/base.py": """
        import dataclasses
        import typing

        class GeneratorInterface:
            pass

        class GeneratorOutput(typing.TypedDict):
            rollout_expert_indices: list[list[list[list[int]]]] | None

        @dataclasses.dataclass
        class TrajectoryID:
            instance_id: str
            repetition_id: int
        """,
    "verl/experimental/agent_loop/agent_loop.py": """
        from typing import Any
        from pydantic import BaseModel

        registered = {}

        class AgentLoopBase:
            def __init__(self, trainer_config, server_manager, **kwargs):
                self.config = trainer_config.config
                self.rollout_config = self.config.actor_rollout_ref.rollout
                self.server_manager = server_manager

        def register(name):
            return lambda found: registered.setdefault(name, found)

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
    "torchtitan/config.py": """
        import dataclasses

        class Configurable:
            @dataclasses.dataclass(kw_only=True, slots=True)
            class Config:
                pass

            def __init__(self, config):
                pass
        """,
    "torchtitan/experiments/rl/environment.py": """
        from torchtitan.config import Configurable

        class MessageEnv(Configurable):
            pass
        """,
    "torchtitan/experiments/rl/observability/metrics.py": """
        class Metric:
            pass
        """,
    "torchtitan/experiments/rl/rollout/rollouter.py": """
        from torchtitan.config import Configurable

        class Rollouter(Configurable):
            pass
        """,
    "torchtitan/experiments/rl/rollout/types.py": """
        import dataclasses
        import enum
        from collections.abc import Callable

        GenerateFn = Callable

        class RolloutStatus(enum.Enum):
            COMPLETED = "completed"

        class Rollout:
            pass

        class RolloutGroup:
            pass

        @dataclasses.dataclass(kw_only=True, slots=True)
        class RolloutTurn:
            pass
        """,
    "torchtitan/experiments/rl/rubrics.py": """
        import dataclasses
        from torchtitan.config import Configurable

        class RewardFn(Configurable):
            pass

        class Rubric(Configurable):
            @dataclasses.dataclass(kw_only=True, slots=True)
            class Config(Configurable.Config):
                reward_fns: list
        """,
    "torchtitan/experiments/rl/types.py": """
        class RolloutTurnID:
            pass
        """,
}


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages of the trainers' names, importable inside the context."""
    _write(folder, TRAINERS)
    monkeypatch.syspath_prepend(folder)
    yield
    names = {path.partition("/")[0] for path in TRAINERS}
    ours = ("perdure.integrations.verl_agent_loop", "perdure.integrations.torchtitan")
    for module in list(sys.modules):
        if module.partition(".")[0] in names or module.startswith(ours):
            del sys.modules[module]


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
