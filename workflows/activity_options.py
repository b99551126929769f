"""Time-outs, retries and queues of every activity, in one place.

Preemptible work is bounded by time, never by a count of tries: a spot notice, a heartbeat time-out
and a 502 each use one. The SDK's oversized-payload
error is never retried: it would repeat a finished agent run for ever.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any, TypedDict

from temporalio.common import RetryPolicy
from temporalio.workflow import ActivityCancellationType

from perdure.client import names
from perdure.rollouts.capture import LONGEST_S as CAPTURE_S
from perdure.rollouts.messages import LONGEST_WAIT_S, Term
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
"""A rollout that waits for a seat ends this long after its `expires_at`."""

HOST_UNREACHABLE_AFTER = timedelta(hours=1)
"""The last resort if no worker of the sandbox's host polls. Usually the host's workflow notices it sooner."""


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
    """`beat`: after this many seconds without a heartbeat, Temporal gives the work to another worker.

    `each` and `total`: seconds for one try, and for all of them with their time in the queue.
    """
    options = ActivityOptions(
        task_queue=queue,
        start_to_close_timeout=timedelta(seconds=each),
        heartbeat_timeout=timedelta(seconds=beat),
        retry_policy=RETRY,
        # The clean-up must not start while the activity is still at work.
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )
    if total is not None:
        options["schedule_to_close_timeout"] = timedelta(seconds=total)
    return options


def boot(request: RolloutRequest, now: float) -> ActivityOptions:
    """A boot waits in its queue until a host has a free seat, however long that takes.

    One try is long, because the first use of an instance builds its environment. Time in the queue
    counts toward nothing but `expires_at`, so the tries are bounded by their number.
    """
    options = _options(names.BOOT_QUEUE, each=1800, beat=request.heartbeat_timeout_s)
    options["retry_policy"] = replace(RETRY, maximum_attempts=BOOT_TRIES)
    if request.expires_at is not None:
        left = max(0.0, request.expires_at - now)
        options["schedule_to_start_timeout"] = timedelta(seconds=left + EXPIRY_S)
    return options


def _on(queue: str, options: ActivityOptions) -> ActivityOptions:
    """The queue of one host. Nothing waits there for a slot, only for a worker."""
    options["task_queue"] = queue
    options["schedule_to_start_timeout"] = HOST_UNREACHABLE_AFTER
    return options


def run_agent(request: RolloutRequest, host: str | None) -> ActivityOptions:
    budget = request.agent_budget_s
    options = _options(
        names.AGENT_QUEUE,
        each=budget + LONGEST_WAIT_S + 300,
        total=3 * budget + LONGEST_WAIT_S + 1800,
        beat=request.heartbeat_timeout_s,
    )
    return options if host is None else _on(names.host_queue(host), options)


def capture(request: RolloutRequest, host: str | None) -> ActivityOptions:
    """`total` leaves half an hour for a host on which controls fail."""
    each = CAPTURE_S + 300
    beat = request.heartbeat_timeout_s
    options = _options(names.IO_QUEUE, each=each, total=each + 1800, beat=beat)
    return options if host is None else _on(names.upkeep_queue(host), options)


def grade(request: RolloutRequest, timeout_s: float) -> ActivityOptions:
    """`timeout_s`: seconds for one run of the tests."""
    runs = 2 * request.twin_pairs + 2  # the last two, or the only one, may each need a control
    limit = runs * timeout_s
    beat = request.heartbeat_timeout_s
    return _options(names.GRADE_QUEUE, each=limit + 1200, total=3 * limit + 7200, beat=beat)


def emit(request: RolloutRequest) -> ActivityOptions:
    beat = request.heartbeat_timeout_s
    return _options(names.IO_QUEUE, each=600, total=None, beat=beat)


UNBOOTED_S = 20.0
"""A boot that did not end well often met a provider that is away, and then nothing is there to destroy."""


def destroy(request: RolloutRequest, host: str | None, *, booted: bool) -> ActivityOptions:
    """Bounded: where it fails, the provider's TTL and the reaper end the sandbox."""
    total = 900 if booted else UNBOOTED_S
    options = _options(names.IO_QUEUE, each=120, total=total, beat=request.heartbeat_timeout_s)
    if host is not None:
        options["task_queue"] = names.upkeep_queue(host)
        options["schedule_to_start_timeout"] = timedelta(minutes=2)
    return options


OFFERED = 3 / 8
"""For this share of the silence the host is asked once more, because the server may have been away."""
LOST_FOR = timedelta(hours=1)
"""How long other workers answer work that arrives for a lost host."""


def serve_term(term: Term) -> ActivityOptions:
    """One try each: the workflow decides what its end means."""
    options = _options(
        names.life_queue(term.host), each=24 * 3600, beat=term.silent_s * (1 - OFFERED)
    )
    options["schedule_to_start_timeout"] = timedelta(seconds=term.silent_s * OFFERED)
    options["retry_policy"] = RetryPolicy(maximum_attempts=1)
    return options


def begin_anew(term: Term) -> ActivityOptions:
    options = _options(names.life_queue(term.host), each=300, beat=300)
    options["schedule_to_start_timeout"] = LOST_FOR
    return options


def stand_in() -> ActivityOptions:
    return _options(names.LOST_HOSTS_QUEUE, each=2 * LOST_FOR.total_seconds(), beat=30)


def bookkeeping() -> ActivityOptions:
    """As long as the store is away: rollouts in flight depend on it."""
    return _options(names.IO_QUEUE, each=600, total=None, beat=60)


def choose_twins() -> ActivityOptions:
    """Some twenty runs of the row's tests, one after the other."""
    return _options(names.GRADE_QUEUE, each=6 * 3600, total=24 * 3600, beat=60)


def look() -> ActivityOptions:
    """Short: if no answer comes, the account's workflow continues and asks again later."""
    return _options(names.IO_QUEUE, each=30, total=30, beat=30)


def sweep(host: str | None) -> ActivityOptions:
    options = _options(names.IO_QUEUE, each=300, total=300, beat=60)
    if host is not None:
        options["task_queue"] = names.upkeep_queue(host)
    return options


def described(
    options: ActivityOptions, summary: str, activity_id: str | None = None
) -> dict[str, Any]:
    """The same options with the line that the Web UI shows beside the activity."""
    described: dict[str, Any] = {**options, "summary": summary}
    if activity_id is not None:
        described["activity_id"] = activity_id
    return described
