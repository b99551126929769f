"""The schedule of sweeps that a worker creates at its start, on a real server."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, CreateScheduleInput, Interceptor, OutboundInterceptor
from temporalio.service import RPCError, RPCStatusCode

from perdure.client.temporal_client import DATA_CONVERTER
from tests.stack.wait_until import until
from workers import worker_process

HOST = "host-1"


class StartingUp(Interceptor):
    """A server that answers, but accepts a schedule only at the third request."""

    def __init__(self) -> None:
        self.asked = 0

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _StartingUp(next, self)


class _StartingUp(OutboundInterceptor):
    def __init__(self, next: OutboundInterceptor, server: StartingUp) -> None:
        super().__init__(next)
        self.server = server

    async def create_schedule(self, input: CreateScheduleInput) -> Any:
        self.server.asked += 1
        if self.server.asked < 3:
            raise RPCError("shard status unknown", RPCStatusCode.UNAVAILABLE, b"")
        return await super().create_schedule(input)


def _meeting(client: Client, server: StartingUp) -> Client:
    return Client(
        client.service_client,
        namespace=client.namespace,
        data_converter=DATA_CONVERTER,
        interceptors=[server],
    )


async def test_a_server_that_is_still_starting_is_waited_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that starts before its server is ready waits instead of exiting."""
    monkeypatch.setattr(worker_process, "ASK_AGAIN_S", 0.05)
    server = StartingUp()
    early = _meeting(client, server)

    await worker_process._ensure_reaper(early, HOST, asyncio.Event())

    found = await client.get_schedule_handle(f"perdure-reaper/{HOST}").describe()
    (interval,) = found.schedule.spec.intervals
    assert (server.asked, interval.every) == (3, worker_process.REAP_EVERY)


async def test_a_worker_whose_schedule_exists_continues(client: Client) -> None:
    """An existing schedule, of another worker or from before a restart, is not changed."""
    await worker_process._ensure_reaper(client, HOST, asyncio.Event())

    async with asyncio.timeout(60):
        await worker_process._ensure_reaper(client, HOST, asyncio.Event())


async def test_a_worker_that_is_told_to_stop_waits_no_longer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM, a worker that waits for its server exits."""
    monkeypatch.setattr(worker_process, "ASK_AGAIN_S", 3600.0)
    server, stop = StartingUp(), asyncio.Event()
    early = _meeting(client, server)
    waiting = asyncio.create_task(worker_process._ensure_reaper(early, HOST, stop))
    await until(lambda: server.asked, "the server is asked")
    stop.set()

    async with asyncio.timeout(60):
        await waiting


async def test_a_deleted_schedule_is_made_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker creates a deleted schedule again, without a restart."""
    monkeypatch.setattr(worker_process, "REAP_EVERY", timedelta(seconds=1))
    await worker_process._ensure_reaper(client, HOST, asyncio.Event())
    await client.get_schedule_handle(f"perdure-reaper/{HOST}").delete()
    keeping = asyncio.create_task(worker_process._keep_reaper(client, HOST))

    async def is_there() -> bool:
        try:
            await client.get_schedule_handle(f"perdure-reaper/{HOST}").describe()
        except RPCError:
            return False
        return True

    await until(is_there, "the schedule is there again")
    keeping.cancel()
