"""What to do about a stuck rollout. The rollout continues by itself once the cause is gone."""

from perdure import errors
from perdure.client import temporal_names
from perdure.rollouts.activity_messages import WORKER_EVICTED

AFTER_ERRORS: dict[type[errors.PerdureError], str] = {
    errors.RateLimited: "lower the rate by `perdure resize RUN N`, or raise the account's limit",
    errors.ControlPlaneError: "check the provider's status page, your quota, and your key",
    errors.StoreUnavailable: "check PERDURE_STORE, its keys, and its disk",
    errors.CallsRefused: "correct the setting in the error, then run `perdure down` and `up`",
    errors.GatewayUnavailable: "see what is down with `perdure status` and `perdure engines list`",
    errors.OutcomeUnknown: "restart or repair the service that the error names",
    errors.RetryHere: "correct what the error names, on the worker's host",
}
"""By the closest class of the error, because its type says what to do next."""
AFTER_OTHERS = {
    WORKER_EVICTED: "see the logs of the workers: they end again and again",
    "TimeoutError": "see the logs of the workers: one died, hangs, or lost its connection",
    "UnexpectedError": "report a bug with the stack trace in the worker's log",
}
LOGGED = "see the worker's log, and `perdure show` with the rollout"

STARTS = {
    temporal_names.WORKFLOWS_QUEUE: "start workers of the role workflows",
    temporal_names.BOOT_QUEUE: "start workers of the roles boot and agent",
    temporal_names.AGENT_QUEUE: "start workers of the role agent",
    temporal_names.GRADE_QUEUE: "start more workers of the role grade",
    temporal_names.IO_QUEUE: "start more workers of the role io",
}

CODE_FAILS = "start workers of the build that began the run, or run `perdure cancel`"
NO_ENGINE = "`perdure engines list` says why no engine answers"
NO_PERMIT = "raise the limits of the provider's account, or end its other sandboxes"
PARKED = (
    "it continues at that time; `perdure accounts open` after a top-up, `perdure cancel` ends it"
)
SLOW = "nothing has failed: `perdure show` says what it does, `perdure cancel` ends it"


def of_error(name: str) -> str:
    """`name`: the type of the error, as Temporal keeps it."""
    kind = getattr(errors, name, None)
    for known in kind.__mro__ if isinstance(kind, type) else ():
        if known in AFTER_ERRORS:
            return AFTER_ERRORS[known]
    return AFTER_OTHERS.get(name, LOGGED)


def of_queue(queue: str) -> str:
    """`queue`: the task queue from which no worker takes work."""
    _, _, host = queue.partition("@")
    return (
        f"start the workers of {host} again, with its home" if host else STARTS.get(queue, LOGGED)
    )
