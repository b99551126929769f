"""Checks a workflow's input, and finds the cause and boundary of a failed activity."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

from perdure.client import names
from perdure.client import search_attributes as attributes
from perdure.errors import Boundary, ConfigurationError
from perdure.rollouts.messages import HOST_LOST, STORE_UNAVAILABLE
from perdure.types import SLUG, Changeable, EpisodeRef, Failure
from perdure.types.faults import faults

Model = TypeVar("Model", bound=BaseModel)
Request = TypeVar("Request", bound=Changeable)
Result = TypeVar("Result")

MESSAGE_LIMIT = 500
CHECKS_OWN_ID = "checks-its-own-id"
INVALID = "input:InvalidRequest"
"""`PerdureFailure` of a refused input."""


def parse(model: type[Model], raw: Any) -> Model:
    """The request as `model`; otherwise the workflow fails at once, naming every wrong field.

    The input is decoded as plain JSON first, because an input that the converter cannot decode
    would fail the workflow *task* for ever instead of the workflow.
    """
    if isinstance(raw, model):
        return raw
    if not isinstance(raw, dict):
        fields = ", ".join(model.model_fields)
        raise _refused(
            f"{model.__name__}: the input must be one JSON object with the fields {fields}"
        )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _refused(f"{model.__name__}: {faults(error, model)}", raw) from None


def changed(before: Request, fields: Any) -> Request:
    """The request with these fields changed; otherwise the update is refused, naming the field."""
    if not isinstance(fields, dict):
        names_ = ", ".join(before.CHANGEABLE)
        raise refused(f"change takes an object with fields of {names_}, not {fields!r}")
    try:
        return before.changed(fields)
    except ConfigurationError as error:
        raise refused(str(error)) from None


def refused(why: str) -> ApplicationError:
    return ApplicationError(why, type="InvalidRequest", non_retryable=True)


def check_own_id(expected: str) -> None:
    """Everything of a request is found by this workflow id: under another one it would be played beside
    itself, and `perdure` would not list it."""
    own = workflow.info().workflow_id
    if own != expected and workflow.patched(CHECKS_OWN_ID):
        raise _refused(
            f"this request belongs to the workflow id {expected}, not {own}: "
            f"start it with --workflow-id {expected}"
        )


def _refused(why: str, raw: dict[str, Any] | None = None) -> ApplicationError:
    """The error that ends the workflow, which is listed under its run, as far as that is known."""
    run_id = _run_named(raw or {})
    if run_id and not attributes.are_set(workflow.info().typed_search_attributes):
        workflow.upsert_search_attributes([attributes.RUN.value_set(run_id)])
    workflow.upsert_search_attributes([attributes.FAILURE.value_set(INVALID)])
    return ApplicationError(why, type="InvalidRequest", non_retryable=True)


def _run_named(raw: dict[str, Any]) -> str:
    """The run id in an input, or in the id of its workflow (`rollout/RUN/...`); empty: neither."""
    template = raw.get("rollout")
    inside = template.get("run_id") if isinstance(template, dict) else None
    kind, _, rest = workflow.info().workflow_id.partition("/")
    by_id = rest.split("/")[0] if kind in ("run", "group", "rollout") else ""
    for one in (raw.get("run_id"), inside, by_id):
        if isinstance(one, str) and re.fullmatch(SLUG, one):
            return one
    return ""


def failure_of(error: ActivityError) -> Failure:
    """The cause of a failed activity, with the boundary it crossed."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        boundary = next((d for d in cause.details if isinstance(d, str)), Boundary.WORKER.value)
        return Failure(
            boundary=Boundary(boundary) if boundary in set(Boundary) else Boundary.WORKER,
            type=cause.type or "UnexpectedError",
            message=cause.message[:MESSAGE_LIMIT],
        )
    if isinstance(cause, TimeoutError):
        return _timed_out(error, cause)
    return Failure(
        boundary=Boundary.WORKER, type="UnexpectedError", message=str(cause)[:MESSAGE_LIMIT]
    )


def as_sentence(error: ActivityError) -> ApplicationError:
    """The error that ends a workflow with what its activity said, not with "Activity task failed"."""
    failure = failure_of(error)
    return ApplicationError(failure.message, type=failure.type, non_retryable=True)


def invalid_result(activity: str, expected: str, why: ValidationError) -> ActivityError:
    """The error of an activity that was completed by hand with something else."""
    error = ActivityError(
        "the result is invalid",
        scheduled_event_id=0,
        started_event_id=0,
        identity="",
        activity_type=activity,
        activity_id="",
        retry_state=None,
    )
    first = why.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = (
        f"{activity} was completed with something that is no {expected}: {place} {first['msg']}"
    )
    error.__cause__ = ApplicationError(
        message, Boundary.WORKER.value, type="InvalidResult", non_retryable=True
    )
    return error


def without_verdict(episode: EpisodeRef) -> ApplicationError:
    """The error that ends a rollout without a verdict; it carries the episode."""
    failure = episode.failure
    why = f"{failure.boundary.value}: {failure.message}" if failure else "no verdict"
    found = episode.model_dump(mode="json", exclude_defaults=True)
    return ApplicationError(why, found, type=names.WITHOUT_VERDICT, non_retryable=True)


def episode_of(error: BaseException | None) -> EpisodeRef | None:
    """What `without_verdict` carries."""
    if (
        isinstance(error, ApplicationError)
        and error.type == names.WITHOUT_VERDICT
        and error.details
    ):
        return EpisodeRef.model_validate(error.details[0])
    return None


def waited_too_long(error: ActivityError) -> bool:
    """No worker took it in time: its first try, or its next one, never ran."""
    cause = error.cause
    return isinstance(cause, TimeoutError) and cause.type is TimeoutType.SCHEDULE_TO_START


def is_host_lost(error: ActivityError) -> bool:
    """The sandbox's host is lost, so it receives no work."""
    return isinstance(error.cause, ApplicationError) and HOST_LOST in error.cause.details


def _timed_out(error: ActivityError, cause: TimeoutError) -> Failure:
    if waited_too_long(error):
        return Failure(
            boundary=Boundary.SANDBOX,
            type="SandboxLost",
            message=f"no worker of the sandbox's host answered ({error.activity_type})",
        )
    last = cause.cause
    detail = f": {last.message}" if isinstance(last, ApplicationError) else ""
    kind = cause.type.name.lower() if cause.type else "timeout"
    return Failure(
        boundary=Boundary.WORKER,
        type="ActivityTimeout",
        message=f"{error.activity_type} ran out of time ({kind}){detail}"[:MESSAGE_LIMIT],
    )


def stop_if_cancelled() -> None:
    """Raise CancelledError when this workflow has been told to stop.

    Call it after each activity: if an activity is told to stop and succeeds, the cancellation is
    used up, and the workflow would continue.
    """
    if workflow.cancellation_reason() is not None:
        raise asyncio.CancelledError("the workflow was cancelled")


async def to_the_end(cleaning: Coroutine[Any, Any, Result]) -> Result:
    """The result, even if the workflow is cancelled meanwhile: this work is never cancelled."""
    work = asyncio.create_task(cleaning)
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(work)
    return work.result()


def was_dropped() -> bool:
    """In a `finally`: this worker is dropping the workflow, which continues on another worker.

    Do not `await` then: it would run outside of the workflow, or not at all.
    """
    return isinstance(sys.exception(), GeneratorExit)


def type_of(error: ActivityError) -> str | None:
    return error.cause.type if isinstance(error.cause, ApplicationError) else None


def store_was_away(error: ActivityError) -> bool:
    """The activity's tries or time ran out while the store refused, so the same work is ordered again."""
    cause = error.cause
    if isinstance(cause, TimeoutError):
        if cause.type is TimeoutType.SCHEDULE_TO_START:
            return False  # no worker of its host answers, whatever the store does
        cause = cause.cause
    return isinstance(cause, ApplicationError) and cause.type == STORE_UNAVAILABLE
