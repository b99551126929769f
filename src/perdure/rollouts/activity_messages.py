"""Arguments and results of the activities and signals: references and verdicts, never blobs."""

from typing import ClassVar

from pydantic import Field

from perdure.types import (
    AgentEnd,
    CalibrationRequest,
    EndedBy,
    EpisodeRef,
    Failure,
    Frozen,
    InstanceRef,
    Outcome,
    RolloutRequest,
    RolloutStatus,
    RunRequest,
)

WORKER_EVICTED = "WorkerEvicted"
"""The worker was told to stop. The workflow dispatches the same work again, in the same attempt."""
STORE_UNAVAILABLE = "StoreUnavailable"
"""The store is unavailable. An activity that times out during the outage is dispatched again."""
SANDBOX_LOST = "SandboxLost"
"""Boot a new attempt."""
CALL_UNANSWERED = "CallUnanswered"
"""The gateway could not answer a model call of the agent. A new attempt replays the recorded turns
and continues once the engines are back. Such attempts are limited by time, not counted."""
HOST_LOST = "host lost"
"""Detail of a SandboxLost: the sandbox's host cannot be reached."""
IDENTITY_DIFFERS = "IdentityDiffers"
"""The store has this rollout with another identity, so this workflow ran nothing."""
TRUNCATED = "Truncated"
"""Failure type of a rollout that ended with the run's time. The run continues it when it is started
again."""
ACTION_NEEDED = frozenset({"ConfigurationError", IDENTITY_DIFFERS, "MissingDependency"})
"""Failures that only a user can fix: the run pauses instead of failing every rollout."""


class Attempt(Frozen):
    """One attempt of one rollout. The stages derive everything else from it."""

    request: RolloutRequest
    attempt: int
    workflow_run_id: str = ""
    """Distinguishes the grading of a reset workflow from the one before the reset."""
    permit: str = ""
    """The step for which a metered account granted a sandbox."""
    stop: bool = False
    """The run's budget is used up, or its time is over: the agent stage only stops its agent."""


class Truncation(Frozen):
    """The end of a run's time, as a signal to its shards, groups and rollouts: stop all agents now.

    Gradings may continue until `ends_at`."""

    by: EndedBy
    cause: str
    """Example: `the run's deadline`."""
    ends_at: float
    """Unix seconds."""


class Booted(Frozen):
    """A sandbox runs, or the rollout needs none. `host`: only workers of this host can reach it; if
    None, any worker can."""

    host: str | None = None
    attempt: int = 0
    """The attempt that the sandbox belongs to. It is later than the requested one if that is used
    up."""
    uri: str = ""
    """Where a user finds this rollout's evidence."""
    done: EpisodeRef | None = None
    """The episode, if the rollout was graded before."""
    expired: bool = False
    waits_for: str = ""
    """The step that waits for a permit of the account. No sandbox exists yet."""
    resets_at: float = 0.0
    """Unix seconds at which the quota of the model's or the sandboxes' account resets. No sandbox exists
    until then; 0 if the accounts are open."""
    reason: str = ""
    """Why the account grants nothing, and until when."""
    tests_s: float = 0.0
    """Seconds that tests in the agent's own sandbox may take; 0 if none run there."""


LONGEST_WAIT_S = 6 * 3600.0
"""Seconds that an agent may wait for engines and its user in addition to its budget."""


class AgentRun(Frozen):
    end: AgentEnd
    turns: int = 0
    turns_sha256: str = ""
    """Digest of `turns.parquet` as the gateway wrote it."""
    tokens: int = 0
    seconds: float = 0.0
    detail: str = ""
    unanswered: str = ""
    """Why the last call of a chain got no answer, or the user gave none. Otherwise empty."""
    mcp_failed: str = ""
    """Why an MCP server could not answer the agent."""
    model: str = ""
    """For a patch imported as a prediction: the model that its file names."""
    refused: str = ""
    """Why the engine refused the agent's calls, and the fix; empty if it answered one."""
    stopped: bool = False
    """Whether the run's budget, deadline or `stop_at`, or a cancellation, stopped the agent. If the
    rollout continues later, another attempt replays its turns."""
    watched_again: bool = False
    """Whether the agent was running when the last try of `run_agent` began, for example because the
    worker of an earlier try died."""

    @property
    def broke(self) -> str:
        """Why there is no verdict; empty if the agent's work is graded.

        No end is a verdict if the gateway or an MCP server could not answer a call, or a sidecar's MCP
        server has ended. If its calls were answered and these servers still run, the agent is
        responsible for every other end, a crash included: otherwise a policy could discard an episode
        that it does not like.
        """
        if self.refused:
            return f"the first model call was refused: {self.refused}"
        if self.mcp_failed:
            return f"an MCP server failed: {self.mcp_failed}"
        if self.unanswered:
            return f"the agent ended after an unanswered model call: {self.unanswered}"
        if self.end is AgentEnd.NEVER_CALLED_MODEL:
            return "the agent ended without a model call"
        if self.end is AgentEnd.CRASHED and not self.turns:
            return "the agent crashed before its first model call"
        return ""


class Captured(Frozen):
    size: int
    files: int
    empty: bool
    too_large: bool = False
    waits_for: str = ""
    """The step that waits for the grading sandbox's permit."""
    grade_timeout_s: float = 1800.0
    """Seconds for all test runs: one on the patch and one on each graded turn's diff."""


class GradedPatch(Frozen):
    outcome: Outcome | None
    """None: the grading waits without a sandbox until `resets_at`. `reason` says why."""
    reward: float | None
    seconds: float = 0.0
    reason: str = ""
    failing: tuple[str, ...] = ()
    """The first tests that should pass and do not. `failing_count` counts all of them."""
    failing_count: int = 0
    stored_as: str = ""
    """Name of the stored grade. A workflow's history keeps it across a reset."""
    resets_at: float = 0.0
    """Unix seconds at which the quota of the sandboxes' account resets; 0 if there is a grade."""

    @property
    def verdict(self) -> str:
        return self.outcome.value if self.outcome is not None else "parked"


class Ending(Frozen):
    """Everything the episode needs that is not in the store yet."""

    request: RolloutRequest
    workflow_run_id: str
    status: RolloutStatus
    attempts: int
    evictions: int = 0
    failure: Failure | None = None
    started_at: float
    """Unix seconds at which the workflow started."""
    grade: str = ""
    """Name of the stored grade, from the workflow's history."""
    stopped_in: str = ""
    """For a truncated rollout: the stage in which it was stopped."""
    bare: bool = False
    """Leave out the evidence of the stages, because an episode with it could not be made."""

    def without_evidence(self, failure: Failure) -> "Ending":
        status = RolloutStatus.FAILED if self.status is RolloutStatus.GRADED else self.status
        return self.model_copy(update={"status": status, "failure": failure, "bare": True})


class PreparedRun(Frozen):
    total: int
    uri: str = ""


class PageRequest(Frozen):
    run_id: str
    start: int
    stop: int
    round: int = 0
    """0: a page of the run's list. Otherwise a page of the rollouts that this round reruns."""
    listed: bool = False
    """The run's list names rollouts, not instances."""


class RolloutAgain(Frozen):
    """A rollout of a list: one that is rerun, or one of a run that is `listed`."""

    instance: InstanceRef
    sample_index: int
    round: int
    """The round of its request: unchanged if the rollout continues, later if it was graded before,
    0 at the run's first start."""


class Page(Frozen):
    instances: tuple[InstanceRef, ...]
    again: tuple[RolloutAgain, ...] = ()


class Term(Frozen):
    """A host's term: the period in which its sandboxes are valid."""

    host: str
    number: int = 0
    silent_s: float
    """The host loses its term after this many seconds without a heartbeat."""


class HostState(Frozen):
    """What a HostWorkflow knows of its host."""

    number: int
    lost: bool


class SweepRequest(Frozen):
    grace_s: float = 600.0


class ShardRequest(Frozen):
    run: RunRequest
    start: int
    stop: int
    concurrency: int
    paused: bool = False


class CalibrationPart(Frozen):
    """Rows [start, stop) of a calibration's list."""

    calibration: CalibrationRequest
    start: int
    stop: int


class CalibrationRow(Frozen):
    """One row to calibrate, and the key in the names of its rollouts."""

    RUN: ClassVar[str] = "calibration-"
    """Prefix of the run ids of calibrations. Their gradings use no earlier calibration."""

    instance: InstanceRef
    key: str
    """Changes with the row and with how its rollouts run, so that no old grade is reused."""
    state: str = ""
    """State of the record that the row already has; empty if none can be reused."""

    def rollout(self, request: CalibrationRequest, agent: str, number: int) -> RolloutRequest:
        fields = {
            "run_id": f"{self.RUN}{self.key}-{agent}",
            "instance": self.instance,
            "sample_index": number,
            "agent": agent,
            "grade_empty_patch": True,
            "twin_pairs": 0,
        }
        return RolloutRequest.model_validate({**request.rollout, **fields})


class CalibrationPage(Frozen):
    rows: tuple[CalibrationRow, ...]
    total: int = 0
    """Rows of all pages."""


class RowToConclude(Frozen):
    calibration: CalibrationRequest
    row: CalibrationRow


class Conclusion(Frozen):
    """What a calibration proves about a row. `state` is empty if a rollout failed."""

    state: str = ""
    reason: str = ""
    may_have_twins: bool = False
    """The row is proved, and its protocol has test lists and test sources."""


class RowTwins(Frozen):
    """Counts of FAIL_TO_PASS tests."""

    tests: int = 0
    """Tests with twins."""
    without: int = 0


class CalibrationSummary(Frozen):
    """What CalibrationWorkflow returns. The report in the store has every row."""

    dataset: str
    uri: str
    rows: int
    proved: int = 0
    quarantined: int = 0
    undecided: int = 0
    """Rows whose rollouts failed for other reasons. The same command tries them again."""
    dropped_tests: int = 0
    with_twins: int = 0
    """Rows whose FAIL_TO_PASS tests all have twins."""
    under_other_fixes: int = 0
    """Of those, rows whose twins all failed under at least two other correct fixes too."""
    ceiling: float | None = None
    """Share of the runs of the gold patch that resolve their row by its own test lists. No model
    can score higher. None, here and below, if no row is decided."""
    floor: float | None = None
    """The same share without a patch: the reward of an agent that changes nothing."""
    base_passes: float | None = None
    """Share of the rows with PASS_TO_PASS lists whose base passes all of these tests in every
    run."""
    why_quarantined: dict[str, str] = Field(default_factory=dict)
    """Row -> reason. Only the first ones, here and below."""
    why_undecided: dict[str, str] = Field(default_factory=dict)
    why_without_twins: dict[str, str] = Field(default_factory=dict)
    """Row -> why one of its FAIL_TO_PASS tests has no twin. Its rewards are `unverified`."""
    attention: str = ""
    """The failure that stopped the calibration early and that only a user can fix."""
