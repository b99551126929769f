"""The measurements of a run, written after each step. Tables and pictures come from `figures.json`."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.learn.training_plan import Plan
from perdure.episodes.episode import Episode, EpisodeSegments


@dataclass
class Step:
    """One step. Times are in seconds: `*_s` on the trainer's clock; `engine`, `environment` and `waiting`
    are sums over the step's rollouts."""

    step: int
    reward: float = 0.0
    graded: int = 0
    ungraded: int = 0
    groups_with_signal: int = 0
    turns: int = 0
    segments: int = 0
    sampled_tokens: int = 0
    oldest_version: int = -1
    newest_version: int = -1
    engine: float = 0.0
    environment: float = 0.0
    """Boot, commands, capture and grading."""
    waiting: float = 0.0
    """Time in queues between the stages."""
    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    sdk_cpu_s: float = 0.0
    load: float = 0.0
    grpo: dict[str, Any] = field(default_factory=dict)

    def add_episodes(
        self, episodes: Sequence[Episode], groups: Sequence[Sequence[EpisodeSegments]]
    ) -> None:
        rewards = [one.reward for one in episodes if one.reward is not None]
        self.graded, self.ungraded = len(rewards), len(episodes) - len(rewards)
        self.reward = sum(rewards) / len(rewards) if rewards else 0.0
        self.groups_with_signal = sum(len(_rewards(group)) > 1 for group in groups)
        self.turns = sum(one.turns for one in episodes)
        self.segments = sum(len(one.segments) for one in episodes)
        self.sampled_tokens = sum(one.sampled_tokens for one in episodes)
        self.oldest_version = min((one.policy_version_min or 0 for one in episodes), default=-1)
        self.newest_version = max((one.policy_version_max or 0 for one in episodes), default=-1)
        self.engine = sum(one.engine_seconds for one in episodes)
        staged = sum(sum(one.stage_seconds.values()) for one in episodes)
        self.environment = staged - self.engine
        self.waiting = sum(one.seconds for one in episodes) - staged
        self.load = os.getloadavg()[0]

    @contextmanager
    def training(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.train_s = time.monotonic() - began

    @contextmanager
    def publishing(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.publish_s = time.monotonic() - began


def _rewards(group: Sequence[EpisodeSegments]) -> set[float]:
    return {one.episode.reward for one in group if one.episode.reward is not None}


class Figures:
    """All steps of a plan. A restarted trainer continues the file."""

    def __init__(self, plan: Plan, told: dict[str, Any]) -> None:
        self._plan = plan
        self._told = told
        self._began = time.time() - told["seconds"]

    @classmethod
    def read(cls, plan: Plan) -> "Figures":
        """Read the figures of an earlier process of this plan. The number of steps may have been raised since."""
        kept = plan.model_dump(
            mode="json", exclude={"folder", "base", "canary_rows", "training", "held_out"}
        )
        sizes = {"training": len(plan.training), "held_out": len(plan.held_out)}
        told: dict[str, Any] = {"seconds": 0.0, "steps": [], "evaluations": [], "resumed_at": []}
        if plan.figures.exists():
            told = json.loads(plan.figures.read_text())
        return cls(plan, told | {"plan": kept | sizes, "finished": False})

    def is_evaluated(self, step: int) -> bool:
        return any(one["step"] == step for one in self._told["evaluations"])

    def add(self, step: Step) -> None:
        self._told["steps"] = [one for one in self._told["steps"] if one["step"] < step.step]
        self._told["steps"].append(asdict(step))
        self._write()

    def published(self, step: Step) -> None:
        """Write a step again when its publishing time is known, and print it."""
        self.add(step)
        print(
            f"step {step.step}: reward {step.reward:.2f}, {step.graded} rollouts, "
            f"{step.wait_s:.0f} s rollouts, {step.train_s:.1f} s training, "
            f"{step.publish_s:.1f} s publishing, gap {step.grpo.get('gap_max', 0):.5f}",
            flush=True,
        )

    def add_evaluation(self, step: int, rewards: Sequence[float | None]) -> None:
        """Record rewards after `step` steps. None: a rollout without a verdict."""
        graded = [reward for reward in rewards if reward is not None]
        mean = sum(graded) / len(graded) if graded else 0.0
        counts = {"graded": len(graded), "ungraded": len(rewards) - len(graded)}
        self._told["evaluations"].append({"step": step, "held_out": mean, **counts})
        self._write()
        print(f"after {step} steps: held out {mean:.2f}", flush=True)

    def hopeless(self, steps: int) -> bool:
        last = self._told["steps"][-steps:]
        return len(last) == steps and all(one["reward"] == 0 for one in last)

    def resumed(self, step: int) -> None:
        self._told["resumed_at"].append(step)
        self._write()

    def finish(self) -> None:
        self._told["finished"] = True
        self._write()

    def _write(self) -> None:
        self._told["seconds"] = round(time.time() - self._began, 1)
        draft = self._plan.figures.with_suffix(".draft")
        draft.write_text(json.dumps(self._told, indent=1))
        os.replace(draft, self._plan.figures)
