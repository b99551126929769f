"""Arguments and results of the activities and signals: references and verdicts, never blobs."""

from typing import ClassVar

from pydantic import Field

from perdure.types import (
    AgentEnd,
    CalibrationRequest,
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
"""The worker was told to stop. The workflow dispatches the same work again and counts no
attempt."""
STORE_UNAVAILABLE = "StoreUnavailable"
"""The store is away: work whose time runs out meanwhile is ordered again."""
SANDBOX_LOST = "SandboxLost"
"""Boot a new attempt."""
CALL_UNANSWERED = "CallUnanswered"
"""The gateway could not answer a model call of the agent. A new attempt replays what is recorded, and goes
on once the engines are back; such attempts are bounded by time and not counted."""
HOST_LOST = "host lost"
"""Detail of a SandboxLost: nothing that is sent to the sandbox's host will arrive."""
IDENTITY_DIFFERS = "IdentityDiffers"
"""The store has this rollout as another one, so this workflow played nothing."""
ACTION_NEEDED = frozenset({"ConfigurationError", IDENTITY_DIFFERS, "MissingDependency"})
"""Failures that only a person can cure: the run pauses instead of failing every rollout."""


class Attempt(Frozen):
    """One attempt of one rollout: everything else is derived from it."""

    request: RolloutRequest
    attempt: int
    workflow_run_id: str = ""
    """Tells a reset workflow's grading from the one before it."""
    permit: str = ""
    """The step for which a sandbox of a metered account was granted."""
    spent: bool = False
    """The run's budget is used up: the agent stage only ends its agent."""


class Booted(Frozen):
    """A sandbox runs, or the rollout needs none. `host`: only workers of this host reach it; None =
    any worker."""

    host: str | None = None
    attempt: int = 0
    """The attempt it belongs to: later than the requested one, if that one is used up."""
    uri: str = ""
    """Where this rollout's evidence is, for people."""
    done: EpisodeRef | None = None
    """The episode of a rollout that was graded before."""
    expired: bool = False
    waits_for: str = ""
    """The step whose permit the account will grant; no sandbox exists yet."""


LONGEST_WAIT_S = 6 * 3600.0
"""Seconds that an agent's calls may wait for an engine beside its budget."""


class AgentRun(Frozen):
    end: AgentEnd
    turns: int = 0
    turns_sha256: str = ""
    """Of `turns.parquet`, as the gateway wrote it."""
    tokens: int = 0
    seconds: float = 0.0
    detail: str = ""
    unanswered: str = ""
    """Why the last call of a chain got no answer. Empty if every chain's last call was answered."""
    model: str = ""
    """Which is said to have made a patch that was given."""
    refused: str = ""
    """Why the engine answered none of its calls, and the fix; empty if it answered one."""

    @property
    def broke(self) -> str:
        """Why there is no verdict; empty: what it left is graded.

        A call that the gateway could not answer is never the policy's doing, so no end after one is a
        verdict. Every other end of an agent whose calls were answered is its own doing, however it
        looks: otherwise a policy could discard an episode that it does not like.
        """
        if self.refused:
            return f"the first model call was refused: {self.refused}"
        if self.unanswered:
            return f"the agent ended after a model call without an answer: {self.unanswered}"
        if self.end is AgentEnd.NEVER_CALLED_MODEL:
            return "the agent ended without one model call"
        if self.end is AgentEnd.CRASHED and not self.turns:
            return "the agent crashed before its first model call"
        return ""


class Captured(Frozen):
    size: int
    files: int
    empty: bool
    too_large: bool = False
    waits_for: str = ""
    """The step whose permit the grading sandbox needs first."""
    grade_timeout_s: float = 1800.0
    """Seconds for one run of the tests."""


class GradedPatch(Frozen):
    outcome: Outcome
    reward: float
    seconds: float = 0.0
    reason: str = ""
    failing: tuple[str, ...] = ()
    """The first tests that should pass and do not; `failing_count` counts all of them."""
    failing_count: int = 0
    stored_as: str = ""
    """Name of the stored grade, which a reset workflow keeps in its history."""


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
    """Name of the stored grade that the workflow's history has."""
    bare: bool = False
    """Without what the stages left: an episode could not be made of that."""

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
    """0: a page of the run's instances; else of the rollouts that this round plays again."""


class RolloutAgain(Frozen):
    """A rollout that is played again."""

    instance: InstanceRef
    sample_index: int
    round: int
    """Of its request: the same as before where it continues, a later one where it was graded."""


class Page(Frozen):
    instances: tuple[InstanceRef, ...]
    again: tuple[RolloutAgain, ...] = ()


class RunSummary(Frozen):
    """What RunWorkflow returns: totals; the episodes are listed in the manifest."""

    run_id: str
    uri: str
    rollouts: int
    """Those that were planned: the sum of `by_status`."""
    graded: int = 0
    resolved: int = 0
    mean_reward: float | None = None
    by_status: dict[str, int] = Field(default_factory=dict)
    by_outcome: dict[str, int] = Field(default_factory=dict)
    stopped: str = ""
    """Why it started no more rollouts: its budget is used up."""


class Term(Frozen):
    """A host's term: the time in which its sandboxes count."""

    host: str
    number: int = 0
    silent_s: float
    """Without a sign of life for so long, the host loses its term."""


class HostState(Frozen):
    """What a HostWorkflow knows."""

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
    """One row that is calibrated, and the name of its rollouts."""

    RUN: ClassVar[str] = "calibration-"
    """Begins the run ids of calibrations, whose grades use no earlier calibration."""

    instance: InstanceRef
    key: str
    """Differs if the row or the way of its rollouts differs, so that no old grade is used for it."""
    state: str = ""
    """Of the record that the row already has."""

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
    """What is proved about a row. `state` empty: nothing, because a rollout failed."""

    state: str = ""
    reason: str = ""
    may_have_twins: bool = False
    """It is proved, and its protocol has lists and test sources."""


class RowTwins(Frozen):
    """Counts of FAIL_TO_PASS tests."""

    tests: int = 0
    """With twins."""
    without: int = 0


class CalibrationSummary(Frozen):
    """What CalibrationWorkflow returns; the report in the store has every row."""

    dataset: str
    uri: str
    rows: int
    proved: int = 0
    quarantined: int = 0
    undecided: int = 0
    """Rows whose rollouts failed for other reasons: the same command tries them again."""
    dropped_tests: int = 0
    with_twins: int = 0
    """Rows of which every FAIL_TO_PASS test has twins."""
    ceiling: float | None = None
    """Share of the runs of gold that resolve their row by its own lists: no model reaches more. None,
    here and below: no row is decided."""
    floor: float | None = None
    """The same of the base without a patch: what an agent that changes nothing is paid."""
    base_passes: float | None = None
    """Share of the rows with PASS_TO_PASS lists whose base passes all of them in every run."""
    why_quarantined: dict[str, str] = Field(default_factory=dict)
    """Row -> reason; the first ones, here and below."""
    why_undecided: dict[str, str] = Field(default_factory=dict)
    why_without_twins: dict[str, str] = Field(default_factory=dict)
    """Row -> why a FAIL_TO_PASS test of it has no twin: its rewards are `unverified`."""
    attention: str = ""
    """Why it stopped before the end: a failure that only a person can cure."""
