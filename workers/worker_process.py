"""A worker process: connects, polls its queues, and hands its work over at SIGTERM."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvloop
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
)
from temporalio.service import RPCError
from temporalio.worker import Interceptor, Worker

from perdure import home_folder, limited_process, tracing
from perdure.client import temporal_names
from perdure.client.temporal_client import connect
from perdure.errors import PerdureError
from perdure.gateway.http.listening_sockets import check_path
from perdure.home_folder import host_of
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import host_life
from perdure.telemetry import configure_logging, temporal_runtime
from workers import backlog_metrics
from workers.deployment_version import build_of, warn_if_not_current
from workers.health_endpoints import answering, wait_until_polling
from workers.host import worker_deaths

ROLES = ("workflows", "boot", "agent", "grade", "io")
"""The roles of a worker process."""
ALL = "all"

REAP_EVERY = timedelta(minutes=10)
ASK_AGAIN_S = 1.0
Keeping = Coroutine[Any, Any, None]

log = structlog.get_logger("perdure.worker")


async def serve(settings: Settings, roles: Sequence[str], health: Path | None = None) -> None:
    """Poll until SIGTERM or SIGINT, then hand the work over and return.

    `health`: path of a unix socket for the health endpoints.
    """
    tracing.configure(settings, "worker")
    client = await connect(settings=settings, runtime=temporal_runtime(settings))
    host = host_of(settings)
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if "agent" in roles:
        await _ensure_reaper(client, host, stop)
    seen = asyncio.Event()
    async with answering(health, seen.is_set), contextlib.AsyncExitStack() as stack:
        if {"boot", "agent"} & set(roles):
            check_path(
                settings.gateway_socket
            )  # if the path is too long for a socket, fail now: the host would grant no seat
        stack.enter_context(host_life.hold_role_locks(settings, roles))
        keeping_tokens = stack.enter_context(worker_deaths.kept_tokens(settings))
        workers = _workers(client, settings, roles, keeping_tokens)
        for worker in workers:
            await stack.enter_async_context(worker)
        log.info("the worker polls its queues", roles=list(roles), host=host, pid=os.getpid())
        if settings.deployment.build_id:
            await warn_if_not_current(client, settings.deployment)
        keeping = asyncio.create_task(_keep_house(client, settings, roles, seen))
        await stop.wait()
        keeping.cancel()
        log.info("handing the work over to other workers")
        await asyncio.gather(*(worker.shutdown() for worker in workers))


def _workers(
    client: Client, settings: Settings, roles: Sequence[str], interceptor: Interceptor
) -> list[Worker]:
    """Imports only what the roles need. A workflow worker loads no sandbox, grader or store."""
    workers = []
    build = build_of(settings.deployment)
    if "workflows" in roles:
        from workers.workflow_worker import workflow_worker

        viewer_url = settings.temporal.viewer_url
        workers.append(workflow_worker(client, build=build, viewer_url=viewer_url))
    others = [role for role in roles if role != "workflows"]
    if others:
        from perdure.rollouts.stage_services import Services
        from workers.task_queue_slots import activity_worker, queues

        services = Services(settings)
        for role in others:
            workers += [
                activity_worker(client, queue, build, [interceptor])
                for queue in queues(role, services)
            ]
    return workers


async def _keep_house(
    client: Client, settings: Settings, roles: Sequence[str], seen: asyncio.Event
) -> None:
    """Run the worker's background tasks, which depend on its roles. Sets `seen` once the server has
    seen it poll."""

    async def become_ready() -> None:
        await wait_until_polling(client, roles)
        seen.set()

    keeping: list[Callable[[], Keeping]] = [become_ready]
    if "workflows" in roles:
        keeping.append(partial(backlog_metrics.report_backlogs, client, settings))
    if {"boot", "agent"} & set(roles):
        keeping.append(partial(host_life.keep_alive, settings))
    if "agent" in roles:
        keeping.append(partial(_keep_reaper, client, host_of(settings)))
        keeping += _housekeeping(client, settings)
    await asyncio.gather(*map(restart_until_done, keeping))


def _housekeeping(client: Client, settings: Settings) -> "list[partial[Keeping]]":
    from perdure.rollouts.stage_services import Services
    from workers.host import host_housekeeping

    services = Services(settings)
    return [
        partial(host_housekeeping.sweep_often, client, services),
        partial(host_housekeeping.count_sandboxes, services),
    ]


async def restart_until_done(keeping: Callable[[], Keeping]) -> None:
    """Run a background task until it returns. An unforeseen error is logged and ends one round
    only, so that it does not end all sweeps of this worker."""
    while True:
        try:
            return await keeping()
        except Exception:
            log.exception("a background task failed; restarting it")
        await asyncio.sleep(ASK_AGAIN_S)


async def _ensure_reaper(client: Client, host: str, stop: asyncio.Event) -> None:
    """Create one schedule per host, because only its own workers can see its local sandboxes.

    If the server has just started and accepts no schedules yet, wait for it until `stop` is set.
    """
    from perdure.client.sdk import PASSING

    schedule = Schedule(
        action=ScheduleActionStartWorkflow(
            temporal_names.REAPER,
            host,
            id=f"reaper/{host}",
            task_queue=temporal_names.WORKFLOWS_QUEUE,
        ),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=REAP_EVERY)]),
        # The default window would catch up on a whole year of missed sweeps.
        policy=SchedulePolicy(
            overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(minutes=10)
        ),
    )
    while not stop.is_set():
        try:
            await client.create_schedule(f"perdure-reaper/{host}", schedule)
            return
        except ScheduleAlreadyRunningError:
            return
        except RPCError as error:
            if error.status not in PASSING:
                raise
            log.warning("the server accepts no schedules yet; retrying", reason=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASK_AGAIN_S):
                await stop.wait()


async def _keep_reaper(client: Client, host: str) -> None:
    """Create the schedule again if a user has deleted it."""
    while True:
        await asyncio.sleep(REAP_EVERY.total_seconds())
        await _ensure_reaper(client, host, asyncio.Event())


def main() -> None:
    """`python -m workers`. Exit code 1 and one line if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument(
        "roles", nargs="*", choices=[*ROLES, ALL], default=ALL, help="default: all of them"
    )
    parser.add_argument("--health", type=Path, help="path of a unix socket for health checks")
    options = parser.parse_args()
    chosen = ROLES if ALL in options.roles else options.roles
    code = 0
    try:
        settings = load_settings()
        home_folder.keep_private(settings)
        configure_logging(f"worker-{chosen[0] if len(chosen) == 1 else ALL}")
        uvloop.run(serve(settings, chosen, options.health))
    except PerdureError as error:
        log.error("cannot start", reason=str(error))
        code = 1
    tracing.flush()
    limited_process.end_all()
    # The SDK's native threads can crash the interpreter during its teardown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
