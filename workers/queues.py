"""Which activities each queue serves and with how many slots; one Worker per queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import PollerBehaviorAutoscaling, Worker

from activities.account_holders import ClosedHolders, EndReady
from activities.boot_sandbox import BootSandbox
from activities.capture_diff import CaptureDiff
from activities.destroy_sandbox import DestroySandbox
from activities.emit_episode import EmitEpisode
from activities.grade import GradeInFreshSandbox
from activities.run_agent import RunAgent
from activities.runs import Runs
from activities.sweep_sandboxes import SweepSandboxes
from perdure.client import names
from perdure.rollouts.services import Services

# A spot notice gives 30 s or more; activities hand over at once, so this is only the last bound.
GRACE = timedelta(seconds=10)


@dataclass(frozen=True)
class Queue:
    """One task queue: what runs there and how many at once."""

    name: str
    activities: Sequence[Callable[..., Any]]
    slots: int


def queues(role: str, services: Services) -> list[Queue]:
    """The queues that a worker of `role` polls; an agent worker also polls its own host's."""
    settings = services.settings
    if role == "boot":
        return [Queue(names.BOOT_QUEUE, [BootSandbox(services).boot], settings.slots.boot)]
    if role == "grade":
        return [
            Queue(names.GRADE_QUEUE, [GradeInFreshSandbox(services).grade], settings.slots.grade)
        ]
    if role == "agent":
        here: list[Callable[..., Any]] = [
            RunAgent(services).run,
            CaptureDiff(services).capture,
            DestroySandbox(services).destroy,
            SweepSandboxes(services).sweep,
        ]
        return [
            Queue(names.AGENT_QUEUE, here, settings.slots.agent),
            Queue(names.host_queue(services.host), here, settings.slots.agent),
        ]
    runs = Runs(services)
    io: list[Callable[..., Any]] = [
        EmitEpisode(services).emit,
        DestroySandbox(services).destroy,
        SweepSandboxes(services).sweep,
        ClosedHolders().closed,
        EndReady(services).end,
        runs.prepare,
        runs.page,
        runs.finish,
    ]
    return [Queue(names.IO_QUEUE, io, settings.slots.io)]


def activity_worker(client: Client, queue: Queue) -> Worker:
    return Worker(
        client,
        task_queue=queue.name,
        activities=queue.activities,
        max_concurrent_activities=queue.slots,
        graceful_shutdown_timeout=GRACE,
        # Unsent heartbeats die with a SIGKILL: send them soon.
        max_heartbeat_throttle_interval=timedelta(seconds=5),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(minimum=1, initial=2, maximum=16),
    )
