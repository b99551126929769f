"""When an agent called its model, read from the trajectory that mini-swe-agent itself writes.

The same file on every side, so no side is measured by its own clock.
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
    """Seconds of each model call as the agent saw it, from its second call on. mini-swe-agent notes when
    it has the output of a command and when it has the next answer. Nothing marks the start of the first
    call, which also contains the import of its client."""

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
    """Of a batch of several times `agents` rollouts, `agents` at once.

    The first `agents` rollouts are the burst; those after it, up to the last `agents`, the steady state.
    """

    burst_s: float
    """From the start of the batch until as many agents as run at once have ended."""
    steady: float
    """Rollouts a minute."""
    steady_from: float
    steady_to: float


def rates(timelines: Sequence[Timeline], agents: int, began: float) -> Rates:
    """Raises: ValueError for fewer than three times `agents` rollouts."""
    ends = sorted(one.ended for one in timelines)
    first, last = agents - 1, len(ends) - agents - 1
    if last <= first:
        raise ValueError(f"{len(ends)} rollouts of {agents} at once have no steady state")
    minutes = (ends[last] - ends[first]) / 60
    return Rates(ends[first] - began, (last - first) / minutes, ends[first], ends[last])


def added_latency(timelines: Iterable[Timeline], latency_s: float) -> tuple[float, float]:
    """p50 and p95 of what a model call took beyond the model's own latency, in milliseconds."""
    added = sorted(call - latency_s for one in timelines for call in one.calls)
    return _quantile(added, 0.50) * 1000, _quantile(added, 0.95) * 1000


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def _timestamp(message: dict[str, Any]) -> float:
    """0: it has none."""
    return float((message.get("extra") or {}).get("timestamp") or 0)
