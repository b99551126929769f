"""Gateways of a pool are killed and frozen under 32 live sessions, on one host and on several."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import boto3
import pytest

from perdure.testing.scripted_engine import ScriptedEngine
from tests import gateway_pool
from tests.gateway_pool import Crowd, Pool, Stream, differences, play, scripts
from tests.s3_server import S3Server

SESSIONS, TURNS = 32, 4
FEW = 8
"""Sessions on the S3 double, which answers one request at a time."""


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(scripts(TURNS), latency_s=0.05) as engine:
        yield engine


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "dummy")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "dummy")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = S3Server()
    client = boto3.client("s3", endpoint_url=server.url)
    client.create_bucket(Bucket="results")
    client.close()
    yield server
    server.close()


async def _undisturbed(folder: Path, sessions: int) -> dict[str, Stream]:
    async with ScriptedEngine(scripts(TURNS)) as engine, Pool([folder], engine.url) as pool:
        _, streams = await play(pool, engine, sessions)
        return streams


async def test_two_of_three_are_killed(tmp_path: Path, engine: ScriptedEngine) -> None:
    """kill -9 of one, then another: no turn lost, none answered twice, token streams unchanged."""
    async with Pool([tmp_path / "h"] * 3, engine.url) as pool:

        async def disturb(crowd: Crowd) -> None:
            await crowd.until(SESSIONS)
            await pool.kill(0)
            await crowd.until(SESSIONS * 2)
            await pool.kill(1)

        crowd, streams = await play(pool, engine, SESSIONS, disturb)

    assert crowd.surprises == []
    assert crowd.retries > 0
    assert engine.stats().calls <= SESSIONS * (TURNS + 2)
    assert differences(streams, await _undisturbed(tmp_path / "still", SESSIONS)) == []


async def test_a_frozen_process_comes_back(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, others continue, SIGCONT: the stale process loses its turns, and token streams stay equal."""
    # Not sooner: on a busy host, a process that only is slow would be given up too.
    monkeypatch.setattr(gateway_pool, "GIVE_UP_S", 15.0)
    async with Pool([tmp_path / "h"] * 3, engine.url) as pool:

        async def disturb(crowd: Crowd) -> None:
            await crowd.until(SESSIONS)
            pool.signal(0, signal.SIGSTOP)
            await crowd.until(SESSIONS * 3)
            pool.signal(0, signal.SIGCONT)

        crowd, streams = await play(pool, engine, SESSIONS, disturb)

    assert [text for text in crowd.surprises if "another answer" in text] == []
    assert engine.stats().calls <= SESSIONS * (TURNS + 1)
    assert differences(streams, await _undisturbed(tmp_path / "still", SESSIONS)) == []


@pytest.mark.parametrize("where", ["folder", "s3"])
async def test_hosts_that_share_only_the_store(
    tmp_path: Path, engine: ScriptedEngine, s3: S3Server, where: str
) -> None:
    """A host's death loses no answered turn: the store has each before its answer."""
    sessions = SESSIONS if where == "folder" else FEW
    store = {"store": str(tmp_path / "store")}
    if where == "s3":
        store = {"store": "s3://results/pool", "s3_endpoint_url": s3.url}
    homes = [tmp_path / f"host-{number}" for number in range(3)]
    async with Pool(homes, engine.url, **store) as pool:

        async def disturb(crowd: Crowd) -> None:
            await crowd.until(sessions)
            await pool.kill(0)

        crowd, streams = await play(pool, engine, sessions, disturb)

    assert crowd.surprises == []
    assert engine.stats().calls <= sessions * (TURNS + 1)
    assert differences(streams, await _undisturbed(tmp_path / "still", sessions)) == []
