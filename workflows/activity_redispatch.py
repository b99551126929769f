"""Runs an activity, and dispatches it again if that loses no finished work."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError

from perdure.rollouts.activity_messages import WORKER_EVICTED
from workflows.workflow_failures import invalid_result, is_store_outage, stop_if_cancelled, type_of

Result = TypeVar("Result")


async def ordered(
    activity: str,
    argument: Any,
    result: type[Result],
    options: dict[str, Any],
    *,
    cleaning: bool = False,
    evicted: Callable[[ActivityError], None] | None = None,
) -> Result:
    """Run an activity. Dispatch it again if its worker shuts down, as at every deploy, or if it
    fails because the store was unavailable.

    If a user completes the activity by hand with something other than a `result`, it counts as
    failed. `cleaning`: dispatch it again then too, and also if the workflow is cancelled. `evicted`
    is called at each shutdown and may raise its error.
    """
    while True:
        try:
            # Plain JSON: the SDK would fail the workflow task forever if it could not decode a
            # `result`.
            raw = await workflow.execute_activity(activity, argument, **options)
        except ActivityError as error:
            was_evicted = type_of(error) == WORKER_EVICTED
            if not was_evicted and not is_store_outage(error):
                raise
            if not cleaning:
                stop_if_cancelled()
            if was_evicted and evicted is not None:
                evicted(error)
            continue
        try:
            return TypeAdapter(result).validate_python(raw)
        except ValidationError as error:
            invalid = invalid_result(activity, result.__name__, error)
        if not cleaning:
            raise invalid
