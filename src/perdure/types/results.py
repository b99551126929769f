"""What a rollout, a group and a run come to."""

import re
from enum import StrEnum
from typing import Literal

from pydantic import Field

from perdure.errors import Boundary
from perdure.types.base import Frozen


class RolloutStatus(StrEnum):
    """How a rollout ended. Only GRADED carries a reward."""

    GRADED = "graded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class AgentEnd(StrEnum):
    """How the agent's process ended, judged by the agent's own rules (never by exit code alone)."""

    FINISHED = "finished"
    GAVE_UP = "gave_up"
    LIMIT = "limit"
    """Its own turn, cost or context limit, or our wall-clock budget."""
    CRASHED = "crashed"
    """Its process failed. What it left is graded if its model calls were answered."""
    NEVER_CALLED_MODEL = "never_called_model"


class Outcome(StrEnum):
    """The verdict on a patch (DESIGN section 4). INFRA_ERROR is raised, never stored as a grade."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    APPLY_FAILED = "apply_failed"
    EMPTY_PATCH = "empty_patch"
    TIMEOUT = "timeout"
    TAMPERED = "tampered"
    UNPARSABLE = "unparsable"
    """What the tests or the agent wrote costs more than the host's limits to read."""
    CAPTURE_FAILED = "capture_failed"
    """No diff could be formed from the tree that the agent left."""
    SANDBOX_DESTROYED = "sandbox_destroyed"
    """The tests ended every sandbox in which they ran, and the row's own fix ended none."""


class TestStatus(StrEnum):
    __test__ = False  # a noun of grading, not a pytest class

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAIL = "XFAIL"
    XPASS = "XPASS"
    MISSING = "MISSING"


class Rewards(Frozen):
    """All rewards of one grade; `binary` is the default, the others for dense training.

    `partial` = (f2p passed + p2p passed) / (f2p total + p2p total); empty F2P counts 0,
    empty P2P counts 1. All are 0 where no test results are believed: tampered, unparsable,
    apply_failed, capture_failed, sandbox_destroyed and empty_patch.
    """

    binary: float
    f2p_fraction: float = 0.0
    p2p_fraction: float = 0.0
    partial: float = 0.0


class Verification(Frozen):
    """What twins say about a patch that the row's own protocol calls resolved.

    `verified`: every FAIL_TO_PASS test passed and its twin failed. `exposed`: a twin passed as well,
    so results were forged. `unverified`: a test has no twin, or a run ended early; `reason` says which.
    """

    state: Literal["verified", "exposed", "unverified"]
    reason: str = ""
    twins: dict[str, TestStatus] = Field(default_factory=dict)
    """FAIL_TO_PASS id -> the status of its twin, for each twin that ran."""
    runs: int = 1


class CalibrationState(StrEnum):
    """What calibration found about a row in one kind of sandbox."""

    PROVED = "proved"
    """Gold resolves the row and the unpatched base does not, in every run."""
    QUARANTINED = "quarantined"
    """A reward of this row would mean nothing; runs of its dataset leave it out."""


class Grade(Frozen):
    """The verdict on a patch, with everything needed to audit it."""

    outcome: Outcome
    official: Outcome | None = None
    """The verdict of the row's own protocol, whatever twins say. None: a grade without it."""
    verification: Verification | None = None
    """None where the official verdict is not `resolved`: there is nothing to verify."""
    reason: str = ""
    rewards: Rewards
    fail_to_pass: dict[str, TestStatus] = Field(default_factory=dict)
    pass_to_pass: dict[str, TestStatus] = Field(default_factory=dict)
    exit_code: int | None = None
    seconds: float = 0.0
    dropped_paths: tuple[str, ...] = ()
    """Paths of the patch that a rule left out before grading. Every one is listed."""
    flagged_paths: tuple[str, ...] = ()
    """Applied, but a person should look: configuration, compiled files, folders that
    the reference fix does not touch."""
    signals: tuple[str, ...] = ()
    """Added lines that name test machinery, as `path: word`: for an audit, they decide nothing."""
    patch_sha256: str = ""
    grader: str = ""
    grader_version: int = 1
    log_key: str | None = None
    calibration: CalibrationState | None = None
    """What calibration had found about the row, in the kind of sandbox that graded it. None: the row
    was not calibrated there, or has changed since."""

    @property
    def reward(self) -> float:
        return self.rewards.binary


class PatchRef(Frozen):
    """A captured diff in the store. Its bytes are exactly what git wrote."""

    key: str
    sha256: str
    size: int
    empty: bool
    files: int = 0
    ignored_files: int = 0
    too_large: bool = False
    dropped: tuple[str, ...] = ()
    """What no diff can hold, as `reason: path`: FIFOs, `.git` folders, files over the cap."""
    refused: str = ""
    """Why no diff could be formed; empty where there is one, or nothing changed."""


VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+|(?:/[\w.@+-]+)+|'[^']*'|\"[^\"]*\"|`[^`]*`")
"""Parts of a message that differ from rollout to rollout: numbers, digests, paths, quoted names."""
SENTENCE = 240
"""Characters of a message that tell failures apart."""


class Failure(Frozen):
    """Why a rollout has no reward: the boundary, the type to act on, one readable sentence."""

    boundary: Boundary
    type: str
    message: str

    @property
    def likeness(self) -> tuple[str, str, str]:
        """The same for failures that say the same of different rollouts."""
        line = " ".join(self.message.split())
        return self.boundary.value, self.type, VARIES.sub("_", line[:SENTENCE])


class EpisodeRef(Frozen):
    """What a workflow returns for a rollout: under 500 bytes; the rest is in the store."""

    uri: str
    instance_id: str
    sample_index: int
    agent: str
    status: RolloutStatus
    outcome: Outcome | None = None
    official: Outcome | None = None
    """The verdict of the row's own protocol, where it differs from `outcome`."""
    reward: float | None = None
    attempts: int = 0
    seconds: float = 0.0
    agent_end: AgentEnd | None = None
    turns: int = 0
    model: str = ""
    """That answered; empty: no model was called."""
    tokens: int = 0
    """Sampled tokens."""
    trained_tokens: int = 0
    """Those of a trainable rollout that a trainer trains."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`, those that a hosted API read from its cache."""
    trainable: bool = False
    failure: Failure | None = None
    policy_version_min: int | None = None
    policy_version_max: int | None = None

    @property
    def ending(self) -> str:
        """Its outcome, or its status without one."""
        return self.outcome.value if self.outcome else self.status.value


class RunStatus(Frozen):
    """How far a run is.

    `state`: starting, running, paused, attention or finishing, as its workflow says; done,
    cancelled, failed or terminated when that is closed. Others are sentences about a run whose workflow
    does not answer.
    """

    run_id: str
    state: str
    total: int = 0
    """Rollouts that are planned."""
    started: int = 0
    done: int = 0
    running: int = 0
    concurrency: int = 0
    attention: str = ""
    """Why the run has paused itself."""
    by_status: dict[str, int] = Field(default_factory=dict)
    by_outcome: dict[str, int] = Field(default_factory=dict)
    tokens: int = 0
    """Prompt and sampled tokens of the rollouts that have ended."""
    dollars: float = 0.0
    """What they cost, if the run's budget has a price."""
    stopped: str = ""
    """Why the run starts no more rollouts: its budget is used up."""


class GroupResult(Frozen):
    """What a group came to: its episodes by sample, failed ones included."""

    group_id: str
    graded: int
    quorum_met: bool
    episodes: tuple[EpisodeRef, ...]
