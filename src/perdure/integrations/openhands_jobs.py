"""A job of the OpenHands server: its request, its progress and its result.

Field names are those of document 003 and its repository. A job is one rollout, whose run has the job's
name: Temporal and the store hold its state, so a restarted server finds it again.
"""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import WorkflowExecutionDescription

from perdure.client.request_comparison import differences, outcome_fields, refuse
from perdure.data_source_handlers import handler_of
from perdure.episodes.demonstrations.demonstration_messages import conversations
from perdure.episodes.episode import Episode
from perdure.episodes.trajectory_segments import MAIN
from perdure.errors import Boundary, ConfigurationError
from perdure.instances.rows.row_fields import Row
from perdure.integrations.trainer_hooks import check_sampling_names, sampling_of
from perdure.types import (
    AgentEnd,
    Frozen,
    Instance,
    Outcome,
    RolloutRequest,
    Turn,
    slugify,
)

Stage = Literal["init", "run", "eval"]
DEFAULT_SOURCE = "swebench"
MAX_ITERATIONS = 2
"""Document 003's default."""
ITERATIONS = {
    "mini_swe_agent": "step_limit",
    "claude_code": "max_turns",
    "qwen_code": "max_turns",
    "gemini_cli": "max_turns",
    "openhands": "max_steps",
}
"""Maps an agent to its option that limits iterations."""
STAGES: dict[str, Stage] = {
    "boot_sandbox": "init",
    "run_agent": "run",
    "capture_diff": "run",
    "destroy_sandbox": "run",
    "grade_in_fresh_sandbox": "eval",
    "emit_episode": "eval",
}
LONGEST_NAME = 96


@dataclass
class JobDetails:
    """A job's details, filled in over time. Unknown ones are None."""

    job_id: str
    instance: Any
    """The instance as the caller gave it."""
    max_iterations: int
    llm_config: dict[str, Any]
    """The sampling parameters without `max_iterations`."""
    start_time: float
    """Unix seconds."""
    event: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Set when the job is complete."""
    runtime: str | None = None
    """The folder of the rollout's files while the agent runs; None once the evaluation begins."""
    metadata: Mapping[str, Any] | None = None
    config: RolloutRequest | None = None
    run_results: dict[str, Any] | None = None
    start_run_time: float | None = None
    eval_results: dict[str, Any] | None = None
    start_eval_time: float | None = None
    error: str = ""
    failed_stage: str | None = None


class JobRecord(Frozen):
    """The record in the store: after a restart a job id still means the same job."""

    job_id: str
    request: RolloutRequest
    trajectory_id: str | int | None = None
    max_iterations: int
    started_at: float


def job_run(server: str, job_id: str) -> str:
    """The run id of a job: `openhands.my-job`. If the job id is no slug, a digest keeps it unique.

    Raises: ConfigurationError for an empty id.
    """
    if not job_id:
        raise ConfigurationError("job_id: must not be empty")
    slug = slugify(job_id)[:LONGEST_NAME]
    if slug != job_id:
        slug = f"{slug}-{hashlib.sha256(job_id.encode()).hexdigest()[:12]}"
    return f"{server}.{slug}"


# --- the request -----------------------------------------------------------------------------


def row_of(instance: Any) -> Mapping[str, Any]:
    """The fields of a row: a mapping, or an object that has `to_dict` (a pandas Series).

    Raises: ConfigurationError.
    """
    if isinstance(instance, Mapping):
        return instance
    if hasattr(instance, "to_dict"):
        return cast(Mapping[str, Any], instance.to_dict())
    raise ConfigurationError(
        "instance: must be a row (a dict or a pandas Series) or `<dataset>/<instance_id>`, "
        f"is {type(instance).__name__}"
    )


def read_instance(row: Mapping[str, Any], dataset: str) -> Instance:
    """The instance of a row, checked by the handler that its `data_source` names.

    Raises: ConfigurationError for an unknown data source; InstanceError, which names the field.
    """
    source = str(row.get("data_source") or DEFAULT_SOURCE)
    handler = handler_of(source)
    fields = {name: value for name, value in row.items() if name != "trajectory_id"}
    instance = handler.to_instance(Row(1, {**fields, "data_source": source}), dataset)
    handler.validate(instance)
    return instance


def split_sampling(parameters: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Split off `max_iterations` (or `max_iteration`); return it and a copy of the rest."""
    rest = dict(parameters)
    found = [rest.pop(name, None) for name in ("max_iterations", "max_iteration")]
    known = next((one for one in found if one is not None), None)
    return (None if known is None else int(known)), rest


def rollout_of(
    fields: Mapping[str, Any],
    *,
    run_id: str,
    instance: str,
    iterations: int | None,
    llm_config: Mapping[str, Any],
) -> RolloutRequest:
    """The request of a job's rollout. `fields`: the server's fields for all its jobs.

    Raises: ConfigurationError for an unknown sampling parameter, and for an iteration limit if the agent
    has none.
    """
    agent = str(fields.get("agent") or RolloutRequest.model_fields["agent"].default)
    option = ITERATIONS.get(agent)
    if option is None and iterations is not None:
        raise ConfigurationError(f"max_iterations: agent {agent} has no such limit; leave it out")
    options = dict(fields.get("agent_options") or {})
    if option is not None:
        options.setdefault(option, MAX_ITERATIONS if iterations is None else iterations)
    check_sampling_names(llm_config)
    sampling = {**(fields.get("sampling") or {}), **sampling_of(llm_config)}
    return RolloutRequest.model_validate(
        {
            **fields,
            "run_id": run_id,
            "instance": instance,
            "agent_options": options,
            "sampling": sampling,
        }
    )


def check_same(known: JobRecord, asked: JobRecord) -> None:
    """Raises: IdentityDiffers if the job id belongs to another job."""
    sides = ({"instance": j.request.instance, **outcome_fields(j.request)} for j in (known, asked))
    refuse(f"job {asked.job_id}", differences(*sides), "give another job_id")


# --- the progress ----------------------------------------------------------------------------


def place_of(described: WorkflowExecutionDescription) -> tuple[Stage, bool]:
    """The stage of an open job, and whether a worker runs it (False: it is queued)."""
    known = [
        (STAGES[one.activity_type.name], one.state)
        for one in described.raw_description.pending_activities
        if one.activity_type.name in STAGES
    ]
    if not known:
        return "init", False
    stage, state = known[0]
    return stage, state != PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED


# --- the result ------------------------------------------------------------------------------


def complete(
    details: JobDetails, episode: Episode, patch: bytes | None, turns: Sequence[Turn]
) -> None:
    """Fill in the results of the stages."""
    seconds = episode.stage_seconds
    grading = seconds.get("grade", 0.0)
    details.runtime = None
    details.metadata = {"agent": episode.agent, "data_source": episode.provenance.data_source}
    details.run_results = {
        "git_patch": None if patch is None else patch.decode(errors="replace"),
        "messages": _messages(turns),
        "metrics": _metrics(episode),
        "finish": episode.agent_end is AgentEnd.FINISHED,
        "success": episode.failure is None and episode.agent_end is not AgentEnd.CRASHED,
    }
    details.start_run_time = episode.finished_at - grading - seconds.get("agent", 0.0)
    if episode.grade is not None:
        details.start_eval_time = episode.finished_at - grading
        details.eval_results = {
            **episode.grade.model_dump(mode="json", exclude_defaults=True),
            "resolved": episode.outcome is Outcome.RESOLVED,
            "reward": episode.reward,
        }
    if episode.grade is None:
        details.failed_stage = _failed_stage(episode)
        details.error = episode.failure.message if episode.failure else episode.status.value


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The last conversation of the main chain."""
    if not all(turn.new_messages and turn.answer for turn in turns):
        return []
    found = [one for one in conversations(turns) if one.chain == MAIN]
    return found[-1].messages() if found else []


def _metrics(episode: Episode) -> dict[str, Any]:
    return {
        "turns": episode.turns,
        "prompt_tokens": episode.prompt_tokens,
        "completion_tokens": episode.sampled_tokens,
        "engine_seconds": episode.engine_seconds,
        "agent_end": episode.agent_end.value if episode.agent_end else None,
    }


def _failed_stage(episode: Episode) -> str:
    if episode.failure is None:
        return episode.status.value
    if episode.failure.boundary is Boundary.GRADER or episode.patch is not None:
        return "eval"
    return "run" if "agent" in episode.stage_seconds else "init"


def result_of(
    details: JobDetails, record: JobRecord, episode: Episode | None, uri: str
) -> dict[str, Any]:
    """The result of `process`. Without a verdict, `resolved` is False and `reward` is None.

    Example:
        {"job_id": "a", "instance_id": "click-1", "resolved": True, "reward": 1.0, "critical_error": None,
         "git_patch": "diff --git ...", "messages": [...], "report": {...}, "timing": {"run": 71.2, ...}, ...}
    """
    run = details.run_results or {}
    report = details.eval_results or {}
    return {
        "job_id": details.job_id,
        "instance_id": record.request.instance_id,
        "trajectory_id": record.trajectory_id,
        "critical_error": details.failed_stage,
        "error": details.error,
        "resolved": bool(report.get("resolved")),
        "reward": report.get("reward"),
        "report": report,
        "success": bool(run.get("success")),
        "finish": bool(run.get("finish")),
        "git_patch": run.get("git_patch"),
        "messages": run.get("messages", []),
        "metrics": run.get("metrics", {}),
        "timing": _timing(episode),
        "episode": uri,
    }


def _timing(episode: Episode | None) -> dict[str, Any]:
    """Seconds of the three stages; `others` is the time between them."""
    if episode is None:
        return {}
    known = episode.stage_seconds
    stages = {
        "init": known.get("boot", 0.0),
        "run": known.get("agent", 0.0),
        "eval": known.get("grade", 0.0),
    }
    others = max(0.0, episode.seconds - sum(stages.values()))
    return {**stages, "others": round(others, 3), "timeout": episode.agent_end is AgentEnd.LIMIT}


def parse_record(data: bytes) -> JobRecord:
    return JobRecord.model_validate(json.loads(data))
