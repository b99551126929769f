"""Made rollouts for tests of reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.episodes.episode import ModelUsage
from perdure.errors import Boundary
from perdure.reports.rollout_facts import RolloutFacts, RunFacts
from perdure.types import Failure, RolloutStatus

LOST = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="sandbox p-1a died")


def rollout(
    instance: str, sample: int = 0, outcome: str | None = "resolved", **fields: Any
) -> RolloutFacts:
    """A graded rollout; without an outcome, a failed one."""
    reward = None if outcome is None else float(outcome == "resolved")
    values: dict[str, Any] = {
        "instance_id": instance,
        "instance": f"toy/{instance}",
        "sample_index": sample,
        "agent": "mini_swe_agent",
        "agent_version": "2.0",
        "perdure_version": "0.1.0",
        "models": ("m",),
        "asked_models": (),
        "usage": (
            ModelUsage(model="m", prompt_tokens=1000, cached_tokens=400, sampled_tokens=100),
        ),
        "discarded": (),
        "earlier_outcomes": (),
        "status": RolloutStatus.GRADED if outcome else RolloutStatus.FAILED,
        "outcome": outcome,
        "reward": reward,
        "agent_end": "finished",
        "failure": None if outcome else LOST,
        "turns": 2,
        "prompt_tokens": 1000,
        "cached_tokens": 400,
        "sampled_tokens": 100,
        "turn_tokens": ((400, 60), (600, 40)),
        "version_min": None,
        "version_max": None,
        "started_at": 100.0,
        "finished_at": 160.0,
        "seconds": 60.0,
        "stage_seconds": {"boot": 2.0, "agent": 40.0, "grade": 10.0},
        "engine_seconds": 10.0,
        "waiting_seconds": 0.0,
        "attempts": 1,
        "sandboxes": 2,
        "sandboxes_lost": 0,
        "flaky": False,
        "calibration": None,
        "patch_sha256": "",
        "official": outcome,
        "unverified": None,
        "exposed": False,
        "signals": (),
        "withheld": "",
    }
    return RolloutFacts(**{**values, **fields})


def run_of(run_id: str, outcomes: Mapping[str, Sequence[str | None]], **fields: Any) -> RunFacts:
    """A run with the given outcomes of each instance's samples."""
    rollouts = [
        rollout(instance, sample, outcome, **fields)
        for instance, endings in outcomes.items()
        for sample, outcome in enumerate(endings)
    ]
    return RunFacts(run_id, tuple(rollouts))
