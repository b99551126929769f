"""Orders an activity, and orders it again where that costs no finished work."""

from collections.abc import Callable
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError

from perdure.rollouts.messages import WORKER_EVICTED
from workflows.failures import stop_if_cancelled, store_was_away, type_of

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

    `cleaning`: also for a cancelled workflow. `evicted` hears of each stop, and may raise its error.
    """
    while True:
        try:
            done: Result = await workflow.execute_activity(
                activity, argument, result_type=result, **options
            )
            return done
        except ActivityError as error:
            was_evicted = type_of(error) == WORKER_EVICTED
            if not was_evicted and not store_was_away(error):
                raise
            if not cleaning:
                stop_if_cancelled()
            if was_evicted and evicted is not None:
                evicted(error)
