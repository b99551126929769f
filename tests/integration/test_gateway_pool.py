"""Several gateway processes on one port: one is killed in the middle, and no agent notices.

`tests/chaos/test_gateway_pool.py` does the same with many sessions, hosts and stores.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.testing.scripted_engine import ScriptedEngine
from tests.gateway_pool import Crowd, Pool, play, scripts

SESSIONS, TURNS = 6, 3


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(scripts(TURNS), latency_s=0.02) as engine:
        yield engine


async def test_a_killed_process_costs_no_turn(tmp_path: Path, engine: ScriptedEngine) -> None:
    """After kill -9 of one of two, every session has its turns, each answered once and repeated."""
    async with Pool([tmp_path / "h"] * 2, engine.url) as pool:

        async def disturb(crowd: Crowd) -> None:
            await crowd.until(SESSIONS)
            await pool.kill(0)

        crowd, streams = await play(pool, engine, SESSIONS, disturb)

    assert crowd.surprises == []
    assert [len(stream) for stream in streams.values()] == [TURNS] * SESSIONS
    assert engine.stats().calls <= SESSIONS * (TURNS + 1)
