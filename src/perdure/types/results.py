"""Results of rollouts, groups and runs."""

import re
from enum import StrEnum
from typing import Literal

from pydantic import Field

from perdure.errors import Boundary
from perdure.types.base import Frozen


class RolloutStatus(StrEnum):
    """How a rollout ended. Only GRADED carries a reward, unless the request withholds it."""

    GRADED = "graded"
    TRUNCATED = "truncated"
    """The run's deadline or `stop_at` stopped it. Its patch is kept, and graded for information if
    there was time. The run continues it when it is started again."""
    UNGRADED = "ungraded"
    """Its patch is captured, and its request leaves grading to `perdure grade RUN`."""
    ADOPTED = "adopted"
    """`perdure adopt` keeps the verdict that another program gave. It has no reward here."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class AgentEnd(StrEnum):
    """How the agent ended, as its own class decides (never by the exit code alone)."""

    FINISHED = "finished"
    GAVE_UP = "gave_up"
    LIMIT = "limit"
    """The agent reached its own turn, cost or context limit, a cap of the request, or its wall-clock
    budget."""
    CRASHED = "crashed"
    """The agent's process failed. Its patch is graded if its model calls were answered."""
    NEVER_CALLED_MODEL = "never_called_model"


class Outcome(StrEnum):
    """The verdict on a patch. An infrastructure error is raised and never stored as a grade."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    APPLY_FAILED = "apply_failed"
    EMPTY_PATCH = "empty_patch"
    TIMEOUT = "timeout"
    TAMPERED = "tampered"
    UNPARSABLE = "unparsable"
    """Parsing the output of the tests or of the agent exceeds the host's limits."""
    CAPTURE_FAILED = "capture_failed"
    """No diff could be taken of the tree that the agent left."""
    SANDBOX_DESTROYED = "sandbox_destroyed"
    """The tests ended every sandbox they ran in, and the row's own fix ended none."""


class TestStatus(StrEnum):
    __test__ = False  # a noun of grading, not a pytest class

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAIL = "XFAIL"
    XPASS = "XPASS"
    MISSING = "MISSING"


RewardForm = Literal["binary", "f2p_fraction", "p2p_fraction", "partial"]


class Rewards(Frozen):
    """All forms of one grade's reward. `binary` is 1 for `resolved`; the others are dense.

    `partial` = (f2p passed + p2p passed) / (f2p total + p2p total). An empty F2P list counts as 0,
    an empty P2P list as 1. If the grader gives one number, `partial` is that. All are 0 if the outcome has no trusted test results: unparsable,
    apply_failed, capture_failed, sandbox_destroyed and empty_patch. If it is tampered, all are the
    request's `tampered_reward`.
    """

    binary: float
    f2p_fraction: float = 0.0
    p2p_fraction: float = 0.0
    partial: float = 0.0


class Verification(Frozen):
    """The twins' verdict on a patch that the row's own protocol calls resolved.

    `verified`: every FAIL_TO_PASS test passed and its twin failed. `weak`: the same, but a twin is
    one that a reader could recognize. `exposed`: a twin passed too, so the results were forged.
    `unverified`: a test has no twin, or a run ended early. `reason` says which.
    """

    state: Literal["verified", "weak", "exposed", "unverified"]
    reason: str = ""
    twins: dict[str, TestStatus] = Field(default_factory=dict)
    """FAIL_TO_PASS id -> the status of its twin, for twins that ran."""
    runs: int = 1


class RefusedHost(Frozen):
    """A host that a sandbox asked its proxy for and did not reach."""

    host: str
    port: int
    reason: str
    count: int


class NetworkRecord(Frozen):
    """`network-<phase>-<n>.json`: what the proxy of one sandbox refused.

    Example: {"refused": [{"host": "evil.example", "port": 443, "reason": "not listed", "count": 2}]}
    """

    refused: tuple[RefusedHost, ...] = ()
    more: int = 0
    """Requests beyond the first 100 hosts and reasons."""


class CalibrationState(StrEnum):
    """What calibration found about a row in one kind of sandbox."""

    PROVED = "proved"
    """In every run, the gold patch resolves the row and the unpatched base does not."""
    QUARANTINED = "quarantined"
    """A reward of this row would be meaningless. Runs of its dataset leave it out."""


class TokenCounts(Frozen):
    """Tokens of calls of one model."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` that a hosted API read from its cache."""
    sampled_tokens: int = 0

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.sampled_tokens


class ModelScore(Frozen):
    """What the request's reward model answered about a patch, and what it cost.

    Example:
        ModelScore(model="judge", rewards={"judge": 0.75, "judge.minimal": 0.75}, reward=0.75,
                   answer='{"scores": {"minimal": 0.75}}', prompt_tokens=2100, sampled_tokens=80)
    """

    model: str
    """The judge's model, or the URL of the reward model."""
    asked_model: str = ""
    """The judge's model as the request names it."""
    rewards: dict[str, float]
    """Its score and the parts of that, under the names that they have in `Grade.named_rewards`."""
    reward: float
    """Its score, 0 to 1."""
    answer: str = ""
    """The text of the last answer, cut."""
    calls: int = 1
    """A judge whose answer is not readable is asked again. Tokens count all calls."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` that a hosted API read from its cache."""
    sampled_tokens: int = 0
    seconds: float = 0.0


class TurnGrade(Frozen):
    """The verdict on the diff after one turn of the agent.

    Example: TurnGrade(turn=1, outcome="unresolved", reward=0.5, patch_sha256="3f1c...")
    """

    turn: int
    """1 is the turn that answers the task."""
    outcome: Outcome
    reward: float | None
    """The share of the turn's own tests that pass. If the turn names none, the reward by all tests.
    None, never 0, if no diff could be taken, or if it is withheld."""
    reason: str = ""
    patch_sha256: str = ""


class Grade(Frozen):
    """The verdict on a patch, with everything needed to audit it."""

    outcome: Outcome
    official: Outcome | None = None
    """The verdict of the row's own protocol, regardless of twins. None if the grade lacks it."""
    verification: Verification | None = None
    """None if the official verdict is not `resolved`, so that there is nothing to verify."""
    reason: str = ""
    rewards: Rewards
    reward_form: RewardForm = "binary"
    """Which of `rewards` is the reward: the form that the request names, otherwise `partial` if the
    grader gives one number, and `binary` if it runs tests."""
    named_rewards: dict[str, float] = Field(default_factory=dict)
    """The verifier's or the handler's own rewards by name, of any range, if it gave more than one
    number. `reward` decides the outcome; without it, their mean does. Those of the request's reward
    model are added."""
    model_score: ModelScore | None = None
    """What the request's reward model answered; None if it was not asked."""
    turn_grades: tuple[TurnGrade, ...] = ()
    """One grade per turn if `user.grade_turns` is set. `named_rewards` has `turn-1`, ..."""
    fail_to_pass: dict[str, TestStatus] = Field(default_factory=dict)
    pass_to_pass: dict[str, TestStatus] = Field(default_factory=dict)
    exit_code: int | None = None
    seconds: float = 0.0
    dropped_paths: tuple[str, ...] = ()
    """All paths of the patch that a rule dropped before grading."""
    flagged_paths: tuple[str, ...] = ()
    """Paths that were applied and deserve a review: configuration, compiled files, folders that the
    reference fix does not touch."""
    signals: tuple[str, ...] = ()
    """Words in the patch's added lines that a signal rule names, as `path: word (rule)`, and files
    outside the fix. They change no verdict."""
    patch_sha256: str = ""
    grader: str = ""
    grader_version: int = 1
    log_key: str | None = None
    calibration: CalibrationState | None = None
    """What calibration had found about the row, in the kind of sandbox that graded it. None if the
    row was not calibrated there, or has changed since."""
    withheld: str = ""
    """Why the request withholds the reward; empty if it does not."""

    @property
    def reward(self) -> float | None:
        """None, never 0, if it is withheld."""
        if self.withheld:
            return None
        reward: float = getattr(self.rewards, self.reward_form)
        return reward


class PatchRef(Frozen):
    """A captured diff in the store. Its bytes are exactly those that git wrote."""

    key: str
    sha256: str
    size: int
    empty: bool
    files: int = 0
    ignored_files: int = 0
    too_large: bool = False
    dropped: tuple[str, ...] = ()
    """Paths that the diff leaves out, as `reason: path`: FIFOs, `.git` folders, files over the
    cap."""
    refused: str = ""
    """Why no diff could be taken; empty if there is one, or if nothing changed."""
    unapplied: str = ""
    """Why a prediction does not apply to the base tree. Its bytes are then those of its file."""
    artifacts_sha256: str = ""
    """Digest of `artifacts.tar` in the same folder; empty if the agent left no artifacts."""
    artifacts_size: int = 0
    """Bytes of that file."""
    artifacts_refused: str = ""
    """Why the artifacts were not kept."""


class Adopted(Frozen):
    """Work of another program that a rollout keeps: a verdict, or a patch that Perdure grades.

    Example:
        {"origin": "Harbor 0.26.0", "file": "fix-1__a8K2x/result.json", "agent": "claude-code",
         "model": "anthropic/claude-opus-5", "score": "reward", "reward": 1.0}
    """

    origin: str
    """The program that wrote the file, with the version of its package that read it."""
    file: str
    """Its path in the folder that was adopted."""
    agent: str = ""
    model: str = ""
    score: str = ""
    """The name of `reward` in the file; empty if there is none."""
    reward: float | None = None
    """That program's own reward. None: it gave no verdict, so Perdure grades the patch."""
    patch_sha256: str = ""
    """Digest of the patch; empty if the file has none."""

    @property
    def resolved(self) -> bool:
        return self.reward is not None and self.reward >= 1


VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+|(?:/[\w.@+-]+)+|'[^']*'|\"[^\"]*\"|`[^`]*`")
"""Parts of a message that vary between rollouts: numbers, digests, paths, quoted names."""
SENTENCE = 240
"""Characters at the start of a message that are compared."""


class Failure(Frozen):
    """Why a rollout has no reward: the boundary, the type to act on, and one sentence for users."""

    boundary: Boundary
    type: str
    message: str

    @property
    def likeness(self) -> tuple[str, str, str]:
        """A key that is equal for failures that differ only in rollout-specific parts."""
        line = " ".join(self.message.split())
        return self.boundary.value, self.type, VARIES.sub("_", line[:SENTENCE])


class EpisodeRef(Frozen):
    """What a workflow returns for a rollout, in under 500 bytes. The store has the rest."""

    uri: str
    instance_id: str
    sample_index: int
    agent: str
    status: RolloutStatus
    outcome: Outcome | None = None
    official: Outcome | None = None
    """The verdict of the row's own protocol, if it differs from `outcome`."""
    reward: float | None = None
    withheld: str = ""
    """Why a graded rollout has no reward; empty if it has one."""
    attempts: int = 0
    seconds: float = 0.0
    grade_s: float = 0.0
    """Seconds of its grading."""
    agent_end: AgentEnd | None = None
    turns: int = 0
    model: str = ""
    """The model that answered; empty if none was called."""
    tokens: int = 0
    """Sampled tokens."""
    trained_tokens: int = 0
    """The sampled tokens that a trainer trains on, if the rollout is trainable."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` that a hosted API read from its cache."""
    other_tokens: dict[str, TokenCounts] = Field(default_factory=dict)
    """Tokens of its judge and its simulated user, by the model that was asked."""
    trainable: bool = False
    failure: Failure | None = None
    policy_version_min: int | None = None
    policy_version_max: int | None = None

    @property
    def ending(self) -> str:
        """The outcome, or the status if there is no outcome."""
        return self.outcome.value if self.outcome else self.status.value


EndedBy = Literal["budget", "deadline", "stop_at"]
"""What ended a run before all its rollouts. The same request continues a run that its deadline
ended."""


class RunStatus(Frozen):
    """The progress of a run.

    `state`: starting, running, paused, attention or finishing, as reported by its workflow; done,
    cancelled, failed or terminated if the workflow is closed. Any other value is a sentence about a
    run whose workflow does not answer.
    """

    run_id: str
    state: str
    total: int = 0
    """Planned rollouts."""
    started: int = 0
    done: int = 0
    running: int = 0
    concurrency: int = 0
    attention: str = ""
    """Why the run has paused itself, or failed."""
    by_status: dict[str, int] = Field(default_factory=dict)
    by_outcome: dict[str, int] = Field(default_factory=dict)
    tokens: int = 0
    """Prompt and sampled tokens of the rollouts that have ended, with those of judges and users."""
    dollars: float = 0.0
    """Cost of these tokens, if the run's budget has a price."""
    grade_seconds: float = 0.0
    """Seconds of all gradings."""
    stopped: str = ""
    """Why the run starts no more rollouts, in words; empty if it does."""
    stopped_by: EndedBy | None = None
    ends_at: float | None = None
    """Unix seconds of its deadline."""


class RunSummary(Frozen):
    """What RunWorkflow returns: totals. The manifest lists the episodes."""

    run_id: str
    uri: str
    rollouts: int
    """Planned rollouts: the sum of `by_status`."""
    graded: int = 0
    resolved: int = 0
    mean_reward: float | None = None
    by_status: dict[str, int] = Field(default_factory=dict)
    by_outcome: dict[str, int] = Field(default_factory=dict)
    stopped: str = ""
    """Why the run ended before all its rollouts, in words; empty if it did not."""
    stopped_by: EndedBy | None = None


class GroupResult(Frozen):
    """The result of a group: its episodes in order of samples, including failed ones."""

    group_id: str
    graded: int
    quorum_met: bool
    episodes: tuple[EpisodeRef, ...]
