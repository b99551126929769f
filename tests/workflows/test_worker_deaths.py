"""A dead worker's activities continue at once: the host reports them to Temporal."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Interceptor, Worker

from perdure.settings.settings_tree import Settings
from tests.stack.wait_until import PATIENCE_S
from workers.host.worker_deaths import kept_tokens, report_deaths

HOURS = timedelta(hours=2)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


class Watch:
    """An activity that never ends by itself in its first try."""

    def __init__(self) -> None:
        self.tries: asyncio.Queue[int] = asyncio.Queue()

    @activity.defn(name="watch")
    async def watch(self) -> str:
        info = activity.info()
        await self.tries.put(info.attempt)
        if info.attempt == 1:
            await asyncio.Event().wait()
        return "watched"


@asynccontextmanager
async def _working(client: Client, keeping: Interceptor, watch: Watch) -> AsyncIterator[str]:
    queue = uuid4().hex
    async with Worker(
        client,
        task_queue=queue,
        activities=[watch.watch],
        interceptors=[keeping],
        graceful_shutdown_timeout=timedelta(0),
    ):
        yield queue


async def test_the_activities_of_a_dead_worker_are_tried_again(
    client: Client, settings: Settings
) -> None:
    """Those of a living one are left alone, although no heartbeat comes for hours."""
    watch = Watch()
    with kept_tokens(settings) as keeping:
        async with _working(client, keeping, watch) as queue, asyncio.timeout(PATIENCE_S):
            started = await client.start_activity(
                "watch",
                id=queue,
                task_queue=queue,
                start_to_close_timeout=HOURS,
                heartbeat_timeout=HOURS,
                result_type=str,
            )
            await watch.tries.get()
            of_living = await report_deaths(client, settings)
            left_by_the_dead(settings)
            of_dead = await report_deaths(client, settings)
            of_reported = await report_deaths(client, settings)
            watched = await started.result()

    assert (of_living, of_dead, of_reported) == (0, 1, 0)
    assert watched == "watched"
    assert not list((settings.home / "run" / "activities").iterdir())


async def test_a_death_is_reported_when_the_server_is_back(
    client: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an activity that has ended by then is forgotten."""
    dead = settings.home / "run" / "activities" / "1-dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "0123").write_bytes(b"the token of another server")
    with monkeypatch.context() as silent:
        silent.setattr("workers.host.worker_deaths.ANSWER", timedelta(microseconds=1))
        with pytest.raises(RPCError):
            await report_deaths(client, settings)
    kept = sorted(file.name for file in dead.iterdir())
    await report_deaths(client, settings)

    assert kept == ["0123", "lock"]
    assert not dead.exists()


def left_by_the_dead(settings: Settings) -> None:
    """What this process would leave behind if it died now: its folder, without its lock."""
    [living] = (settings.home / "run" / "activities").iterdir()
    shutil.copytree(living, living.with_name("1-dead"))
