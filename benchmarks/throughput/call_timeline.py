"""The times of an agent's model calls, read from the trajectory that mini-swe-agent itself writes.

Every side has the same file, so no side is measured by its own clock.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Timeline:
    """One rollout. `ended`: when its last model call was answered, in seconds since the epoch."""

    ended: float
    calls: tuple[float, ...]
    """Seconds of each model call from the agent's view, from its second call on. mini-swe-agent records when
    it has the output of a command and when it has the next answer. It does not record the start of the first
    call, which also includes the import of its client."""

    @classmethod
    def read(cls, path: Path) -> Self:
        messages = json.loads(path.read_bytes())["messages"]
        timed = [(one["role"], moment) for one in messages if (moment := _timestamp(one))]
        calls = tuple(
            answered - sent
            for (before, sent), (role, answered) in itertools.pairwise(timed)
            if before == "tool" and role == "assistant"
        )
        return cls(max(moment for role, moment in timed if role == "assistant"), calls)


@dataclass(frozen=True)
class Rates:
    """Figures of a batch with several times `agents` rollouts, `agents` at once.

    The first `agents` rollouts are the burst. The steady state is the rest without the last `agents`.
    """

    burst_s: float
    """Seconds from the start of the batch until `agents` rollouts have ended."""
    steady: float
    """Rollouts a minute."""
    steady_from: float
    steady_to: float


def rates(timelines: Sequence[Timeline], agents: int, began: float) -> Rates:
    """Raises: ValueError if there are fewer than three times `agents` rollouts."""
    ends = sorted(one.ended for one in timelines)
    first, last = agents - 1, len(ends) - agents - 1
    if last <= first:
        raise ValueError(f"{len(ends)} rollouts of {agents} at once have no steady state")
    minutes = (ends[last] - ends[first]) / 60
    return Rates(ends[first] - began, (last - first) / minutes, ends[first], ends[last])


def added_latency(timelines: Iterable[Timeline], latency_s: float) -> tuple[float, float]:
    """p50 and p95 of a model call's time beyond the model's own latency, in milliseconds."""
    added = sorted(call - latency_s for one in timelines for call in one.calls)
    return _quantile(added, 0.50) * 1000, _quantile(added, 0.95) * 1000


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def _timestamp(message: dict[str, Any]) -> float:
    """The message's time; 0 if it has none."""
    return float((message.get("extra") or {}).get("timestamp") or 0)
