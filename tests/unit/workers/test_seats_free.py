"""The free seats that a host reports, by which hosts are scaled."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.rollouts.admission.host_seats import Seats
from perdure.telemetry import metrics
from workers.host import host_housekeeping

MOST = 4


async def test_a_seat_kept_for_the_next_boot_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that polls for boots has reserved their seats, even if none arrives."""
    seats, told = Seats(tmp_path / "seats", MOST), asyncio.Queue[tuple[int, int]]()
    seats.take("p-1-agent-1")
    reserved = seats.reserve()
    monkeypatch.setattr(metrics, "seats", lambda *counts: told.put_nowait(counts))
    services = SimpleNamespace(
        settings=SimpleNamespace(metrics=SimpleNamespace(port=1)), seats=seats, home=tmp_path
    )
    counting = asyncio.create_task(host_housekeeping.count_sandboxes(cast(Any, services)))
    try:
        async with asyncio.timeout(60):
            assert await told.get() == (MOST, 1)
    finally:
        counting.cancel()
    assert reserved is not None
