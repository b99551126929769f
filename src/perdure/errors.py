"""All errors that Perdure raises. Their types say what to do next.

PerdureError
├── RetryHere            nothing happened, or repeating the call is safe: retry it here
│   ├── ControlPlaneError    a provider answered 5xx, or a transient 401; `retry_after` in seconds
│   │   └── RateLimited          429: too many creates at a time, or too many sandboxes at once
│   │       └── AccountExhausted     the account grants no sandbox before `resets_at`
│   ├── StoreUnavailable     the store could not be reached, or refused temporarily
│   └── GatewayUnavailable   the gateway or every engine behind it could not be reached
│       ├── CallsRefused         engines answer, and none has served yet: often a wrong setting
│       └── QuotaExhausted       a model account takes no calls before `resets_at`
├── OutcomeUnknown       the request may have been carried out: check by identity, then repeat
├── SandboxLost          the sandbox is gone or unusable: boot a new attempt
│   ├── DiskFull             code in the sandbox has filled the sandbox's disk
│   └── AttemptDamaged       data of the attempt is damaged: a new attempt replays the rest
├── GiveUp               the rollout cannot succeed as specified: finish it with a status
│   ├── InstanceError        the row, its environment or its tests are defective (data)
│   ├── AgentError           the agent could not be installed or launched
│   ├── PolicyTooStale       every engine serves newer weights than the group allows
│   └── TokenizerChanged     the rollout's model was added again with another tokenizer
├── ActionNeeded         a user must act: stop the run
│   ├── ConfigurationError   a setting, flag or field is wrong; the message names it and the fix
│   │   └── IdentityDiffers      the id belongs to something with another identity
│   └── MissingDependency    a program or package is absent; the message says how to install it
├── NoResult             the awaited run, group or rollout ended without a result
│   └── Cancelled            a user cancelled it
├── NotFound             there is no such key, sandbox, instance or run
└── PreconditionFailed   another writer changed the object before a conditional write

A command that exits non-zero is a value (`ExecStatus`), never an exception. An infrastructure
failure is never reward 0: it raises one of these errors and ends as `reward: null`. A lost grading
sandbox is a verdict only if the tests are proven to be the cause (docs/decisions/0026).
"""

from enum import StrEnum
from typing import Literal


class Boundary(StrEnum):
    """The component whose failure ended the rollout. The episode records it once."""

    REQUEST = "request"
    INSTANCE = "instance"
    SANDBOX = "sandbox"
    AGENT = "agent"
    GATEWAY = "gateway"
    ENGINE = "engine"
    TOOL = "tool"
    """An MCP server."""
    GRADER = "grader"
    STORE = "store"
    WORKER = "worker"
    RUN = "run"
    """Nothing failed: the run's deadline or `stop_at` ended the rollout."""


class PerdureError(Exception):
    """Base class of all errors that Perdure raises on purpose."""

    boundary: Boundary = Boundary.WORKER

    def __init__(self, message: str, *, boundary: Boundary | None = None) -> None:
        super().__init__(message)
        if boundary is not None:
            self.boundary = boundary


class RetryHere(PerdureError):
    """Nothing happened, or repeating the call is safe.

    `retry_after`: seconds to wait, if the other side named any.
    """

    def __init__(
        self, message: str, *, retry_after: float | None = None, boundary: Boundary | None = None
    ) -> None:
        super().__init__(message, boundary=boundary)
        self.retry_after = retry_after


class ControlPlaneError(RetryHere):
    boundary = Boundary.SANDBOX


class RateLimited(ControlPlaneError):
    """429. `limit`: `rate` passes after a while; `concurrency` passes when a sandbox is killed."""

    def __init__(
        self,
        message: str,
        *,
        limit: Literal["rate", "concurrency"] = "rate",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.limit = limit


class AccountExhausted(RateLimited):
    """A sandbox account grants nothing before `resets_at`, Unix seconds: its quota resets then, or it
    has no credits and is asked again then. A repeat before that has no chance."""

    def __init__(self, message: str, resets_at: float) -> None:
        super().__init__(message)
        self.resets_at = resets_at


class StoreUnavailable(RetryHere):
    """`fix`: what to correct if the store has never worked; empty if it is only busy."""

    boundary = Boundary.STORE

    def __init__(self, problem: str, *, fix: str = "") -> None:
        super().__init__(f"{problem}; if this lasts, {fix}" if fix else problem)
        self.problem = problem
        self.fix = fix


class GatewayUnavailable(RetryHere):
    boundary = Boundary.GATEWAY


class CallsRefused(GatewayUnavailable):
    """The engine refused calls from the start, so the message names the setting to check."""

    boundary = Boundary.ENGINE


class QuotaExhausted(GatewayUnavailable):
    """A model account takes no calls before `resets_at`, Unix seconds: its quota or a limit of the
    settings resets then, or it has no credit and is asked again then."""

    boundary = Boundary.ENGINE

    def __init__(self, message: str, resets_at: float) -> None:
        super().__init__(message)
        self.resets_at = resets_at


class OutcomeUnknown(PerdureError):
    """The request may have been carried out. Check by identity before repeating it."""


class SandboxLost(PerdureError):
    """The sandbox is gone for good. The workflow boots a new attempt and keeps the old one's
    files."""

    boundary = Boundary.SANDBOX


class DiskFull(SandboxLost):
    """The sandbox's own disk is full, and only code in the sandbox can have filled it."""


class AttemptDamaged(SandboxLost):
    """Recorded or stored data of this attempt is damaged or gone. The message names the object."""

    boundary = Boundary.STORE


class GiveUp(PerdureError):
    """The rollout cannot succeed as specified."""


class InstanceError(GiveUp):
    boundary = Boundary.INSTANCE


class AgentError(GiveUp):
    boundary = Boundary.AGENT


class PolicyTooStale(GiveUp):
    boundary = Boundary.ENGINE


class TokenizerChanged(GiveUp):
    """The model of an open session now has another tokenizer, so no engine can read its ids. A repeat of
    the call or a replay of its turns cannot help; a new attempt that replays nothing can."""

    boundary = Boundary.ENGINE


class ActionNeeded(PerdureError):
    """A user must act, because a retry would fail the same way."""

    boundary = Boundary.REQUEST


class ConfigurationError(ActionNeeded):
    pass


class IdentityDiffers(ConfigurationError):
    """The id belongs to a run, group or rollout with another identity. The message lists the
    differences, old and new."""

    boundary = Boundary.REQUEST


class MissingDependency(ActionNeeded):
    pass


class NoResult(PerdureError):
    """The message says why. Temporal's error is the `__cause__`."""


class Cancelled(NoResult):
    pass


class NotFound(PerdureError):
    pass


class PreconditionFailed(PerdureError):
    boundary = Boundary.STORE
