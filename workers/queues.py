"""Which activities each queue serves and with how many slots; one Worker per queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import (
    PollerBehaviorAutoscaling,
    Worker,
    WorkerDeploymentConfig,
    WorkerTuner,
)

from activities.calibration import Calibrations
from activities.leftovers import Leftovers
from activities.runs import Runs
from activities.stages import Stages
from activities.stand_in import StandIn
from perdure.client import names
from perdure.rollouts.services import Services
from workers.host import seats

# A spot notice gives 30 s or more; activities hand over at once, so this is only the last bound.
GRACE = timedelta(seconds=10)


WATCHES = 10_000
"""Slots for watching the agents of this host. Its seats are the limit, and each has an agent, so that
no agent that runs here ever waits to be watched."""


LOST_HOSTS = 1_000
"""Lost hosts that a worker answers for. Each costs a few open requests to the server."""


@dataclass(frozen=True)
class Queue:
    """One task queue: what runs there and how many at once."""

    name: str
    activities: Sequence[Callable[..., Any]]
    slots: int | WorkerTuner
    of_host: bool = False
    """Only one host polls it, with workers of any build (docs/decisions/0021-builds.md)."""


def queues(role: str, services: Services) -> list[Queue]:
    """The queues that a worker of `role` polls; an agent worker also polls its own host's."""
    settings = services.settings
    if role == "boot":
        places = seats.tuner(services.seats, services.term, settings.slots.boot)
        return [Queue(names.BOOT_QUEUE, [Stages(services).boot], places)]
    if role == "grade":
        return [
            Queue(
                names.GRADE_QUEUE,
                [Stages(services).grade, Calibrations(services).twins],
                settings.slots.grade,
            )
        ]
    if role == "agent":
        watch: list[Callable[..., Any]] = [Stages(services).run_agent]
        return [
            Queue(names.AGENT_QUEUE, watch, settings.slots.agent),
            Queue(names.host_queue(services.host), watch, WATCHES, of_host=True),
            Queue(
                names.upkeep_queue(services.host),
                _upkeep(services),
                settings.slots.io,
                of_host=True,
            ),
        ]
    runs, calibrations = Runs(services), Calibrations(services)
    io: list[Callable[..., Any]] = [
        *_upkeep(services),
        Stages(services).emit,
        Leftovers(services).closed_holders,
        runs.prepare,
        runs.page,
        runs.finish,
        runs.record,
        calibrations.prepare,
        calibrations.load,
        calibrations.conclude,
        calibrations.report,
    ]
    return [
        Queue(names.IO_QUEUE, io, settings.slots.io),
        Queue(names.LOST_HOSTS_QUEUE, [StandIn(services).stand_in], LOST_HOSTS),
    ]


def _upkeep(services: Services) -> list[Callable[..., Any]]:
    """Short work on sandboxes, which never waits behind agents."""
    return [
        Stages(services).capture,
        Stages(services).destroy,
        Leftovers(services).sweep,
    ]


def activity_worker(
    client: Client, queue: Queue, build: WorkerDeploymentConfig | None = None
) -> Worker:
    tuner, most = (None, queue.slots) if isinstance(queue.slots, int) else (queue.slots, None)
    return Worker(
        client,
        task_queue=queue.name,
        activities=queue.activities,
        deployment_config=None if queue.of_host else build,
        max_concurrent_activities=most,
        tuner=tuner,
        graceful_shutdown_timeout=GRACE,
        # Unsent heartbeats die with a SIGKILL: send them soon.
        max_heartbeat_throttle_interval=timedelta(seconds=5),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(minimum=1, initial=2, maximum=16),
    )
