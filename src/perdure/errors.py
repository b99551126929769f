"""Every failure Perdure raises, typed by what to do next.

PerdureError
├── RetryHere            the call failed, nothing happened, or repeating it is safe: try again here
│   ├── ControlPlaneError    a provider answered 5xx, or a transient 401; `retry_after` in seconds
│   │   └── RateLimited          429: too many creates at a time, or too many sandboxes at once
│   ├── StoreUnavailable     the store could not be reached, or refused for now
│   └── GatewayUnavailable   the gateway or every engine behind it could not be reached
│       └── CallsRefused         every engine answers and none has served yet: often a wrong setting
├── OutcomeUnknown       the request may have been carried out: look by identity, then repeat
├── SandboxLost          this sandbox is gone or condemned: boot a new attempt
│   ├── DiskFull             what ran in it has filled its own disk
│   └── AttemptDamaged       what it recorded or stored does not read back: a new attempt replays the rest
├── GiveUp               this rollout cannot succeed as specified: finish it with a status
│   ├── InstanceError        the row, its environment or its tests are defective (data)
│   ├── AgentError           the agent could not be installed or launched
│   └── PolicyTooStale       every engine serves newer weights than its group allows
├── ActionNeeded         a person must act: stop the run
│   ├── ConfigurationError   a setting, flag or request field is wrong; the message names it and the fix
│   │   └── IdentityDiffers      the id belongs to a run, group or rollout that was asked to be another
│   └── MissingDependency    a program or package is absent; the message says how to install it
├── NoResult                 the run, group or rollout that was waited for ended without a result
│   └── Cancelled                a user cancelled it
├── NotFound             no such key, sandbox, instance or run
└── PreconditionFailed   another writer changed the object before a conditional write

A command that exits non-zero is a value (`ExecStatus`), never an exception. An infrastructure
failure is never reward 0: it is raised as one of these and ends as `reward: null`. A lost grading
sandbox is a verdict only where the tests are proven to be the cause (docs/decisions/0026).
"""

from enum import StrEnum
from typing import Literal


class Boundary(StrEnum):
    """Where a failure crossed into the rollout; recorded once, in the episode."""

    REQUEST = "request"
    INSTANCE = "instance"
    SANDBOX = "sandbox"
    AGENT = "agent"
    GATEWAY = "gateway"
    ENGINE = "engine"
    GRADER = "grader"
    STORE = "store"
    WORKER = "worker"


class PerdureError(Exception):
    """Base of all failures that Perdure raises on purpose."""

    boundary: Boundary = Boundary.WORKER

    def __init__(self, message: str, *, boundary: Boundary | None = None) -> None:
        super().__init__(message)
        if boundary is not None:
            self.boundary = boundary


class RetryHere(PerdureError):
    """Nothing happened, or repeating is safe.

    `retry_after`: seconds the other side asked us to wait, or None.
    """

    def __init__(
        self, message: str, *, retry_after: float | None = None, boundary: Boundary | None = None
    ) -> None:
        super().__init__(message, boundary=boundary)
        self.retry_after = retry_after


class ControlPlaneError(RetryHere):
    boundary = Boundary.SANDBOX


class RateLimited(ControlPlaneError):
    """429. `limit`: `rate` ends after a while; `concurrency` ends once one of our sandboxes is killed."""

    def __init__(
        self,
        message: str,
        *,
        limit: Literal["rate", "concurrency"] = "rate",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self.limit = limit


class StoreUnavailable(RetryHere):
    """`fix`: what to correct if the store has never worked; empty: it only was busy."""

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


class OutcomeUnknown(PerdureError):
    """The request may have committed; resolve by identity before repeating it."""


class SandboxLost(PerdureError):
    """Final for this sandbox; the workflow boots a new attempt and keeps the old one's files."""

    boundary = Boundary.SANDBOX


class DiskFull(SandboxLost):
    """The sandbox's own disk is full, and only what ran in it can have filled it."""


class AttemptDamaged(SandboxLost):
    """What this attempt recorded or stored is damaged or gone. The message names the object."""

    boundary = Boundary.STORE


class GiveUp(PerdureError):
    """The rollout cannot succeed as specified."""


class InstanceError(GiveUp):
    boundary = Boundary.INSTANCE


class AgentError(GiveUp):
    boundary = Boundary.AGENT


class PolicyTooStale(GiveUp):
    boundary = Boundary.ENGINE


class ActionNeeded(PerdureError):
    """A person must act; retrying would fail the same way."""

    boundary = Boundary.REQUEST


class ConfigurationError(ActionNeeded):
    pass


class IdentityDiffers(ConfigurationError):
    """The id belongs to a run, group or rollout that was asked to be another. The message has what
    differs, old and new."""

    boundary = Boundary.REQUEST


class MissingDependency(ActionNeeded):
    pass


class NoResult(PerdureError):
    """The message says why; Temporal's own error is the `__cause__`."""


class Cancelled(NoResult):
    pass


class NotFound(PerdureError):
    pass


class PreconditionFailed(PerdureError):
    boundary = Boundary.STORE
