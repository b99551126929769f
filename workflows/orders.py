"""Orders an activity, and orders it again where that costs no finished work."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from temporalio import workflow
from temporalio.exceptions import ActivityError

from perdure.rollouts.messages import WORKER_EVICTED
from workflows.failures import invalid_result, stop_if_cancelled, store_was_away, type_of

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
    """Run an activity. It is ordered again if its worker is told to stop, as at every deploy, and if
    its time ran out while the store was away.

    A person may complete an activity by hand. If what they give is no `result`, the activity has failed;
    cleaning is ordered again.
    `cleaning`: also for a cancelled workflow. `evicted` hears of each stop, and may raise its error.
    """
    while True:
        try:
            # Decoded as plain JSON: the SDK would fail the workflow task for ever if it were no `result`.
            raw = await workflow.execute_activity(activity, argument, **options)
        except ActivityError as error:
            was_evicted = type_of(error) == WORKER_EVICTED
            if not was_evicted and not store_was_away(error):
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
