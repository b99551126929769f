"""Several gateway processes on one port: one is killed in the middle, and no agent notices.

`tests/chaos/test_gateway_pool.py` does the same with many sessions, hosts and stores.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from perdure.testing.scripted_engine import ScriptedEngine
from tests.gateway_pool import Crowd, Pool, play, scripts

SESSIONS, TURNS = 6, 3


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(scripts(TURNS), latency_s=0.02) as engine:
        yield engine


@pytest.mark.longer
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


@pytest.mark.longer
@pytest.mark.temporal
async def test_the_supervisor_keeps_the_address(tmp_path: Path) -> None:
    """`perdure up` with two processes: both are killed, and a caller waits instead of failing."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "TEMPORAL_"))
    }
    environment |= {"PERDURE_HOME": str(tmp_path / "h"), "PERDURE_GATEWAY__PROCESSES": "2"}

    def perdure(*arguments: str) -> bytes:
        command = [sys.executable, "-m", "perdure.cli.main", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True).stdout

    state = json.loads(await asyncio.to_thread(perdure, "up", "--json"))
    try:
        pids = [state["children"][name]["pid"] for name in ("gateway", "gateway-2")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            answer = await client.get(f"{state['gateway_url']}/healthz")
    finally:
        await asyncio.to_thread(perdure, "down")

    assert answer.status_code == 200
