"""Timeouts, retry policies and task queues of all activities.

Time limits preemptible work, not a count of tries, because a spot notice, a heartbeat timeout and a
502 each use one try. The SDK's oversized-payload error is never retried: a retry would repeat a
finished agent run forever.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any, TypedDict

from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

from perdure.client import temporal_names
from perdure.rollouts.activity_messages import LONGEST_WAIT_S, Term
from perdure.rollouts.capture_stage import LONGEST_S as CAPTURE_S
from perdure.types import RolloutRequest

OVERSIZED = ["PayloadsTooLarge", "PayloadSizeError"]

RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=60),
    non_retryable_error_types=OVERSIZED,
)

BOOT_TRIES = 150
"""About two hours of failed boots, not counting the wait for a seat before each."""
EXPIRY_S = 1.0
"""Seconds after its `expires_at` at which a rollout that waits for a seat ends."""

HOST_UNREACHABLE_AFTER = timedelta(hours=1)
"""Last resort if no worker of the sandbox's host polls. The host's workflow usually notices
sooner."""


WATCH_PATIENCE = 85 / 30
"""The heartbeat timeout of an agent's watch, in multiples of `heartbeat_timeout_s`. By default 85 s, so
that the agents of a lost host move within 90 s. The host reports a dead worker sooner."""
STOP_CALLS_S = 60.0
"""Seconds for all tries. If all fail, the agent stops only after its watcher's next heartbeat."""


class ActivityOptions(TypedDict, total=False):
    task_queue: str
    activity_id: str
    start_to_close_timeout: timedelta
    schedule_to_close_timeout: timedelta
    schedule_to_start_timeout: timedelta
    heartbeat_timeout: timedelta
    retry_policy: RetryPolicy
    cancellation_type: ActivityCancellationType
    summary: str


def _options(
    queue: str, *, each: float, total: float | None = None, beat: float
) -> ActivityOptions:
    """`beat`: seconds without a heartbeat after which Temporal gives the work to another worker.

    `each`: seconds for one try. `total`: seconds for all tries, including their time in the queue.
    """
    options = ActivityOptions(
        task_queue=queue,
        start_to_close_timeout=timedelta(seconds=each),
        heartbeat_timeout=timedelta(seconds=beat),
        retry_policy=RETRY,
        # The cleanup must not start while the activity is still running.
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )
    if total is not None:
        options["schedule_to_close_timeout"] = timedelta(seconds=total)
    return options


def boot(request: RolloutRequest, now: float) -> ActivityOptions:
    """A boot waits in its queue until a host has a free seat, however long that takes.

    A try may be long, because the first use of an instance builds its environment. Time in the
    queue counts only toward `expires_at`, so a maximum number of tries limits the retries.
    """
    options = _options(temporal_names.BOOT_QUEUE, each=1800, beat=request.heartbeat_timeout_s)
    options["retry_policy"] = replace(RETRY, maximum_attempts=BOOT_TRIES)
    if request.expires_at is not None:
        left = max(0.0, request.expires_at - now)
        options["schedule_to_start_timeout"] = timedelta(seconds=left + EXPIRY_S)
    return options


def _on(queue: str, options: ActivityOptions) -> ActivityOptions:
    """Use the queue of one host. Work waits there only for a worker, never for a slot."""
    options["task_queue"] = queue
    options["schedule_to_start_timeout"] = HOST_UNREACHABLE_AFTER
    return options


def run_agent(request: RolloutRequest, host: str | None) -> ActivityOptions:
    budget = request.agent_budget_s
    options = _options(
        temporal_names.AGENT_QUEUE,
        each=budget + LONGEST_WAIT_S + 300,
        total=3 * budget + LONGEST_WAIT_S + 1800,
        beat=request.heartbeat_timeout_s * WATCH_PATIENCE,
    )
    return options if host is None else _on(temporal_names.host_queue(host), options)


def stop_calls(request: RolloutRequest) -> ActivityOptions:
    beat = request.heartbeat_timeout_s
    return _options(temporal_names.IO_QUEUE, each=STOP_CALLS_S, total=STOP_CALLS_S, beat=beat)


def capture(request: RolloutRequest, host: str | None, tests_s: float) -> ActivityOptions:
    """`total` includes half an hour of retries on a host where controls fail. `tests_s`: seconds for
    tests in the agent's own sandbox."""
    each = CAPTURE_S + 300 + tests_s
    beat = request.heartbeat_timeout_s
    options = _options(temporal_names.IO_QUEUE, each=each, total=each + 1800, beat=beat)
    return options if host is None else _on(temporal_names.upkeep_queue(host), options)


def grade(request: RolloutRequest, timeout_s: float) -> ActivityOptions:
    """`timeout_s`: seconds for one run of the tests."""
    runs = max(1, 3 * request.twin_pairs)
    limit = 2 * runs * timeout_s  # runs may follow each other, and each may need a control
    beat = request.heartbeat_timeout_s
    return _options(
        temporal_names.GRADE_QUEUE, each=limit + 1200, total=3 * limit + 7200, beat=beat
    )


def emit(request: RolloutRequest) -> ActivityOptions:
    beat = request.heartbeat_timeout_s
    return _options(temporal_names.IO_QUEUE, each=600, total=None, beat=beat)


UNBOOTED_S = 20.0
"""Seconds. A boot often fails because its provider is unavailable, and then leaves nothing
behind."""


def destroy(request: RolloutRequest, host: str | None, *, booted: bool) -> ActivityOptions:
    """Limited in time, because the provider's TTL and the reaper end a sandbox that is left."""
    total = 900 if booted else UNBOOTED_S
    options = _options(
        temporal_names.IO_QUEUE, each=120, total=total, beat=request.heartbeat_timeout_s
    )
    if host is not None:
        options["task_queue"] = temporal_names.upkeep_queue(host)
        options["schedule_to_start_timeout"] = timedelta(minutes=2)
    return options


OFFERED = 3 / 8
"""Fraction of `silent_s` in which a silent host is asked again, because the server may have been
down."""
LOST_FOR = timedelta(hours=1)
"""How long other workers answer activities that arrive for a lost host."""


def serve_term(term: Term) -> ActivityOptions:
    """One try, because the workflow decides what its end means."""
    options = _options(
        temporal_names.life_queue(term.host), each=24 * 3600, beat=term.silent_s * (1 - OFFERED)
    )
    options["schedule_to_start_timeout"] = timedelta(seconds=term.silent_s * OFFERED)
    options["retry_policy"] = RetryPolicy(maximum_attempts=1)
    return options


def begin_anew(term: Term) -> ActivityOptions:
    options = _options(temporal_names.life_queue(term.host), each=300, beat=300)
    options["schedule_to_start_timeout"] = LOST_FOR
    return options


def stand_in() -> ActivityOptions:
    return _options(temporal_names.LOST_HOSTS_QUEUE, each=2 * LOST_FOR.total_seconds(), beat=30)


def bookkeeping() -> ActivityOptions:
    """Without a total limit, so that it outlasts a store outage: rollouts in flight depend on
    it."""
    return _options(temporal_names.IO_QUEUE, each=600, total=None, beat=60)


def choose_twins() -> ActivityOptions:
    """Some twenty to seventy runs of the row's tests, two at a time."""
    return _options(temporal_names.GRADE_QUEUE, each=6 * 3600, total=24 * 3600, beat=60)


def look() -> ActivityOptions:
    """Short, because without an answer the account's workflow continues and asks again later."""
    return _options(temporal_names.IO_QUEUE, each=30, total=30, beat=30)


def sweep(host: str | None) -> ActivityOptions:
    options = _options(temporal_names.IO_QUEUE, each=300, total=300, beat=60)
    if host is not None:
        options["task_queue"] = temporal_names.upkeep_queue(host)
    return options


def described(
    options: ActivityOptions, summary: str, activity_id: str | None = None
) -> dict[str, Any]:
    """The same options with the summary that the Web UI shows next to the activity."""
    described: dict[str, Any] = {**options, "summary": summary}
    if activity_id is not None:
        described["activity_id"] = activity_id
    return described
