"""Which activities each queue serves, and with how many slots. One Worker per queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import (
    Interceptor,
    PollerBehaviorAutoscaling,
    Worker,
    WorkerDeploymentConfig,
    WorkerTuner,
)

from activities.activity_decorator import GRACE
from activities.calibration_activities import Calibrations
from activities.lost_host_activities import StandIn
from activities.rollout_activities import Stages
from activities.run_activities import Runs
from activities.sweep_activities import SweepActivities
from perdure.client import temporal_names
from perdure.rollouts.stage_services import Services
from workers.host import boot_slots

WATCHES = 10_000
"""Slots for watching agents of this host. The seats limit the agents, so the slots must never do
so: an agent that runs here must not wait to be watched."""

LOST_HOSTS = 1_000
"""Lost hosts that one worker can answer for. Each costs a few open requests to the server."""


@dataclass(frozen=True)
class Queue:
    """One task queue: its activities, and how many of them run at once."""

    name: str
    activities: Sequence[Callable[..., Any]]
    slots: int | WorkerTuner
    of_host: bool = False
    """Only one host polls the queue, with workers of any build (docs/decisions/0021-builds.md)."""


def queues(role: str, services: Services) -> list[Queue]:
    """The queues that a worker of `role` polls. An agent worker also polls its own host's
    queues."""
    settings = services.settings
    if role == "boot":
        places = boot_slots.tuner(services.seats, services.term, settings.slots.boot)
        return [Queue(temporal_names.BOOT_QUEUE, [Stages(services).boot], places)]
    if role == "grade":
        return [
            Queue(
                temporal_names.GRADE_QUEUE,
                [Stages(services).grade, Calibrations(services).twins],
                settings.slots.grade,
            )
        ]
    if role == "agent":
        watch: list[Callable[..., Any]] = [Stages(services).run_agent]
        return [
            Queue(temporal_names.AGENT_QUEUE, watch, settings.slots.agent),
            Queue(temporal_names.host_queue(services.host), watch, WATCHES, of_host=True),
            Queue(
                temporal_names.upkeep_queue(services.host),
                _upkeep(services),
                settings.slots.io,
                of_host=True,
            ),
        ]
    runs, calibrations = Runs(services), Calibrations(services)
    io: list[Callable[..., Any]] = [
        *_upkeep(services),
        Stages(services).emit,
        Stages(services).stop_calls,
        SweepActivities(services).closed_holders,
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
        Queue(temporal_names.IO_QUEUE, io, settings.slots.io),
        Queue(temporal_names.LOST_HOSTS_QUEUE, [StandIn(services).stand_in], LOST_HOSTS),
    ]


def _upkeep(services: Services) -> list[Callable[..., Any]]:
    """Short activities on sandboxes, which never queue behind agents."""
    return [
        Stages(services).capture,
        Stages(services).destroy,
        SweepActivities(services).sweep,
    ]


def activity_worker(
    client: Client,
    queue: Queue,
    build: WorkerDeploymentConfig | None = None,
    interceptors: Sequence[Interceptor] = (),
) -> Worker:
    tuner, most = (None, queue.slots) if isinstance(queue.slots, int) else (queue.slots, None)
    return Worker(
        client,
        task_queue=queue.name,
        activities=queue.activities,
        interceptors=interceptors,
        deployment_config=None if queue.of_host else build,
        max_concurrent_activities=most,
        tuner=tuner,
        graceful_shutdown_timeout=GRACE,
        # A SIGKILL loses throttled heartbeats, so send them soon.
        max_heartbeat_throttle_interval=timedelta(seconds=5),
        activity_task_poller_behavior=PollerBehaviorAutoscaling(minimum=1, initial=2, maximum=16),
    )
