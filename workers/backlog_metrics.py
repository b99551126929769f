"""Updates the gauges of the backlogs in Temporal's queues, if this worker serves metrics."""

import asyncio

import structlog
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client.bottlenecks import backlogs
from perdure.settings.settings_tree import Settings
from perdure.telemetry import metrics

COUNT_EVERY_S = 15.0

log = structlog.get_logger("perdure.worker")


async def report_backlogs(client: Client, settings: Settings) -> None:
    while settings.metrics.port:
        try:
            for one in await backlogs(client):
                metrics.backlog(one.stage, one.count, one.age_s)
        except RPCError as error:
            log.warning("cannot read the backlogs", reason=str(error))
        await asyncio.sleep(COUNT_EVERY_S)
