"""A worker's background tasks for its host continue after an unforeseen error."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, cast

import pytest
from temporalio.client import Client

from perdure.rollouts.stage_services import Services
from workers import worker_process
from workers.host import host_housekeeping


async def test_an_unforeseen_error_ends_no_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round follows, and a task that returns is not repeated."""
    monkeypatch.setattr(worker_process, "ASK_AGAIN_S", 0.0)
    rounds = []

    async def sweeps() -> None:
        rounds.append("begun")
        if len(rounds) < 3:
            raise ValueError("a sandbox's folder with half of a file")

    await worker_process.restart_until_done(sweeps)

    assert len(rounds) == 3


class RefusesOnce:
    """A provider whose host cannot start a process at the first check."""

    name = "bubblewrap"
    host_bound = True
    asked = 0

    def check(self) -> Sequence[str]:
        self.asked += 1
        return ["fork: resource temporarily unavailable"] if self.asked == 1 else []


class WithProvider:
    provider = RefusesOnce()

    def providers_used(self) -> list[RefusesOnce]:
        return [self.provider]


async def test_a_provider_that_a_busy_host_refuses_once_is_swept_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its orphans would stay until the worker ends."""
    swept: list[list[RefusesOnce]] = []
    enough = asyncio.Event()

    async def sweep(_: Any, fate: Any, grace_s: float, providers: list[RefusesOnce]) -> None:
        swept.append(providers)
        if len(swept) == 3:
            enough.set()

    monkeypatch.setattr(host_housekeeping, "SWEEP_EVERY_S", 0.0)
    monkeypatch.setattr(host_housekeeping, "sweep", sweep)
    services = WithProvider()
    sweeping = asyncio.create_task(
        host_housekeeping.sweep_often(cast(Client, None), cast(Services, services))
    )
    async with asyncio.timeout(60):
        await enough.wait()
    sweeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sweeping

    one = services.provider
    assert (swept[:3], one.asked) == ([[], [one], [one]], 2)
