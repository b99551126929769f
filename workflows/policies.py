"""Time-outs, retries and queues of every activity, in one place.

Preemptible work is bounded by time, never by a count of attempts (a spot notice, a heartbeat
time-out and a 502 each consume one). Every policy names the SDK's oversized-payload error as final:
it would otherwise repeat a finished agent run for ever.
"""

from datetime import timedelta
from typing import Any, TypedDict

from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

from perdure.client import names
from perdure.types import RolloutRequest

OVERSIZED = ["PayloadsTooLarge", "PayloadSizeError"]

RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=60),
    non_retryable_error_types=OVERSIZED,
)

HOST_UNREACHABLE_AFTER = timedelta(minutes=10)
"""No worker of the sandbox's host polls for this long: the host is gone, and the sandbox with it."""


class Options(TypedDict, total=False):
    task_queue: str
    activity_id: str
    start_to_close_timeout: timedelta
    schedule_to_close_timeout: timedelta
    schedule_to_start_timeout: timedelta
    heartbeat_timeout: timedelta
    retry_policy: RetryPolicy
    cancellation_type: ActivityCancellationType
    summary: str


def _options(queue: str, *, each: float, total: float, beat: float) -> Options:
    """`beat`: a worker that is silent for so long is dead, and another one takes over."""
    return Options(
        task_queue=queue,
        start_to_close_timeout=timedelta(seconds=each),
        schedule_to_close_timeout=timedelta(seconds=total),
        heartbeat_timeout=timedelta(seconds=beat),
        retry_policy=RETRY,
        # The clean-up must not start while the activity is still at work.
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )


def boot(request: RolloutRequest) -> Options:
    """First use of an instance builds its environment, hence the long bound."""
    return _options(names.BOOT_QUEUE, each=1800, total=2 * 3600, beat=request.heartbeat_timeout_s)


def _on(host: str | None, options: Options) -> Options:
    if host is not None:
        options["task_queue"] = names.host_queue(host)
        options["schedule_to_start_timeout"] = HOST_UNREACHABLE_AFTER
    return options


def run_agent(request: RolloutRequest, host: str | None) -> Options:
    budget = request.agent_budget_s
    return _on(
        host,
        _options(
            names.AGENT_QUEUE,
            each=budget + 300,
            total=3 * budget + 1800,
            beat=request.heartbeat_timeout_s,
        ),
    )


def capture(request: RolloutRequest, host: str | None) -> Options:
    beat = request.heartbeat_timeout_s
    return _on(host, _options(names.AGENT_QUEUE, each=300, total=1800, beat=beat))


def grade(request: RolloutRequest) -> Options:
    limit = request.grade_timeout_s or 1800.0
    beat = request.heartbeat_timeout_s
    return _options(names.GRADE_QUEUE, each=limit + 1200, total=3 * limit + 7200, beat=beat)


def emit(request: RolloutRequest) -> Options:
    beat = request.heartbeat_timeout_s
    return _options(names.IO_QUEUE, each=120, total=24 * 3600, beat=beat)


def destroy(request: RolloutRequest, host: str | None) -> Options:
    """Bounded: when it cannot be done, the provider's TTL and the reaper do it."""
    options = _options(names.IO_QUEUE, each=120, total=900, beat=request.heartbeat_timeout_s)
    if host is not None:
        options["task_queue"] = names.host_queue(host)
        options["schedule_to_start_timeout"] = timedelta(minutes=2)
    return options


def bookkeeping() -> Options:
    return _options(names.IO_QUEUE, each=600, total=3600, beat=60)


def look() -> Options:
    """Whoever asked has more to do: without an answer it goes on, and asks again."""
    return _options(names.IO_QUEUE, each=30, total=30, beat=30)


def sweep(host: str | None) -> Options:
    options = _options(names.IO_QUEUE, each=300, total=300, beat=60)
    if host is not None:
        options["task_queue"] = names.host_queue(host)
    return options


def described(options: Options, summary: str, activity_id: str | None = None) -> dict[str, Any]:
    """The same options with the line that the Web UI shows beside the activity."""
    described: dict[str, Any] = {**options, "summary": summary}
    if activity_id is not None:
        described["activity_id"] = activity_id
    return described
