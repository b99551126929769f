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

from perdure.client import search_attribute_keys as attributes
from perdure.client import temporal_names
from perdure.errors import Boundary, ConfigurationError
from perdure.rollouts.activity_messages import HOST_LOST, STORE_UNAVAILABLE
from perdure.types import SLUG, Changeable, EpisodeRef, Failure
from perdure.types.validation_errors import faults

Model = TypeVar("Model", bound=BaseModel)
Request = TypeVar("Request", bound=Changeable)
Result = TypeVar("Result")

MESSAGE_LIMIT = 500
CHECK_OWN_ID_PATCH_ID = "checks-its-own-id"
INVALID = "input:InvalidRequest"
"""`PerdureFailure` of a refused input."""


def parse(model: type[Model], raw: Any) -> Model:
    """The request as `model`. If it is invalid, the workflow fails at once, naming every wrong
    field.

    The input arrives as plain JSON, because an input that the converter cannot decode would fail
    the workflow *task* forever instead of the workflow.
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
    """The request with these fields changed. An invalid field refuses the update by name."""
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
    """Refuse another workflow id than the request's own. Under another id the request could run
    twice at once, and `perdure` would not list it."""
    own = workflow.info().workflow_id
    if own != expected and workflow.patched(CHECK_OWN_ID_PATCH_ID):
        raise _refused(
            f"this request belongs to the workflow id {expected}, not {own}: "
            f"start it with --workflow-id {expected}"
        )


def _refused(why: str, raw: dict[str, Any] | None = None) -> ApplicationError:
    """The error that ends the workflow. Sets search attributes, so that lists by run show it."""
    run_id = _run_named(raw or {})
    if run_id and not attributes.are_set(workflow.info().typed_search_attributes):
        workflow.upsert_search_attributes([attributes.RUN.value_set(run_id)])
    workflow.upsert_search_attributes([attributes.FAILURE.value_set(INVALID)])
    return ApplicationError(why, type="InvalidRequest", non_retryable=True)


def _run_named(raw: dict[str, Any]) -> str:
    """The run id in the input or in the workflow id (`rollout/RUN/...`); empty if in neither."""
    template = raw.get("rollout")
    inside = template.get("run_id") if isinstance(template, dict) else None
    kind, _, rest = workflow.info().workflow_id.partition("/")
    by_id = rest.split("/")[0] if kind in ("run", "group", "rollout") else ""
    for one in (raw.get("run_id"), inside, by_id):
        if isinstance(one, str) and re.fullmatch(SLUG, one):
            return one
    return ""


def failure_of(error: ActivityError) -> Failure:
    """The cause of a failed activity, with the boundary that it crossed."""
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
    """The error that ends a workflow with its activity's message, not with "Activity task
    failed"."""
    failure = failure_of(error)
    return ApplicationError(failure.message, type=failure.type, non_retryable=True)


def invalid_result(activity: str, expected: str, why: ValidationError) -> ActivityError:
    """The error of an activity that a user completed by hand with an invalid result."""
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
    message = f"{activity} was completed with an invalid {expected}: {place} {first['msg']}"
    error.__cause__ = ApplicationError(
        message, Boundary.WORKER.value, type="InvalidResult", non_retryable=True
    )
    return error


def without_verdict(episode: EpisodeRef) -> ApplicationError:
    """The error that ends a rollout without a verdict. It carries the episode."""
    failure = episode.failure
    why = f"{failure.boundary.value}: {failure.message}" if failure else "no verdict"
    found = episode.model_dump(mode="json", exclude_defaults=True)
    return ApplicationError(why, found, type=temporal_names.WITHOUT_VERDICT, non_retryable=True)


def episode_of(error: BaseException | None) -> EpisodeRef | None:
    """The episode that a `without_verdict` error carries."""
    if (
        isinstance(error, ApplicationError)
        and error.type == temporal_names.WITHOUT_VERDICT
        and error.details
    ):
        return EpisodeRef.model_validate(error.details[0])
    return None


def is_schedule_to_start_timeout(error: ActivityError) -> bool:
    """Whether no worker took the activity in time, so that a try of it never ran."""
    cause = error.cause
    return isinstance(cause, TimeoutError) and cause.type is TimeoutType.SCHEDULE_TO_START


def is_heartbeat_timeout(error: ActivityError) -> bool:
    """Whether the activity's worker died."""
    cause = error.cause
    return isinstance(cause, TimeoutError) and cause.type is TimeoutType.HEARTBEAT


def is_host_lost(error: ActivityError) -> bool:
    """Whether the sandbox's host is lost, so that it receives no work."""
    return isinstance(error.cause, ApplicationError) and HOST_LOST in error.cause.details


def _timed_out(error: ActivityError, cause: TimeoutError) -> Failure:
    if is_schedule_to_start_timeout(error):
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
        message=f"{error.activity_type} timed out ({kind}){detail}"[:MESSAGE_LIMIT],
    )


def is_cancelled() -> bool:
    """Whether this workflow has been cancelled."""
    return workflow.cancellation_reason() is not None


def stop_if_cancelled() -> None:
    """Raise CancelledError if this workflow has been cancelled.

    Call it after each activity: an activity that is cancelled but succeeds consumes the
    cancellation, and the workflow would continue.
    """
    if is_cancelled():
        raise asyncio.CancelledError("the workflow was cancelled")


async def to_the_end(cleaning: Coroutine[Any, Any, Result]) -> Result:
    """Run `cleaning` to its end, even if the workflow is cancelled, and return its result."""
    work = asyncio.create_task(cleaning)
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(work)
    return work.result()


def is_evicted_from_cache() -> bool:
    """In a `finally`: whether this worker is evicting the workflow, which continues elsewhere.

    If so, do not `await`: it would run outside of the workflow, or not at all.
    """
    return isinstance(sys.exception(), GeneratorExit)


def type_of(error: ActivityError) -> str | None:
    return error.cause.type if isinstance(error.cause, ApplicationError) else None


def is_store_outage(error: ActivityError) -> bool:
    """Whether a store outage made the activity fail, so that the same work is dispatched again."""
    cause = error.cause
    if isinstance(cause, TimeoutError):
        if cause.type is TimeoutType.SCHEDULE_TO_START:
            return False  # no worker of the host polled, which the store did not cause
        cause = cause.cause
    return isinstance(cause, ApplicationError) and cause.type == STORE_UNAVAILABLE
