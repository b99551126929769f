"""The parts of `perdure demo --break`. `tests/integration/test_demo_break.py` runs the whole."""

import asyncio
import errno
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from perdure.cli.demo import engine_proxy, left_behind, small_disk
from perdure.cli.demo.engine_proxy import SAMPLES, EngineProxy
from perdure.engines.clients.vllm_control import PROBE_SESSION
from perdure.errors import MissingDependency
from tests.stack.wait_until import until

SESSION = "p-1-agent-1"


class Engine:
    """Answers model calls once `released` is set."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def answer(self, _: web.Request) -> web.Response:
        await self.released.wait()
        return web.Response(text="sampled")


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def proxy(engine: Engine) -> AsyncIterator[EngineProxy]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with engine_proxy.serving(f"http://127.0.0.1:{runner.addresses[0][1]}") as proxy:
        yield proxy
    await runner.cleanup()


async def call(proxy: EngineProxy, session: str = SESSION) -> tuple[int, str]:
    headers = {"x-session-id": session}
    async with (
        aiohttp.ClientSession() as client,
        client.post(proxy.url + SAMPLES, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


async def test_a_call_waits_until_its_agent_may_have_another_turn(
    proxy: EngineProxy, engine: Engine
) -> None:
    """All attempts of a rollout share their turns. Probes always pass, and do not count."""
    engine.released.set()
    proxy.allow(1)
    assert await call(proxy) == (200, "sampled")
    second = asyncio.create_task(call(proxy, "p-1-agent-2"))
    await until(lambda: proxy.waiting() == {"p-1-agent"}, "the call waits")

    assert await call(proxy, PROBE_SESSION) == (200, "sampled")
    proxy.allow(2)

    assert await second == (200, "sampled")
    assert (proxy.answers(), len(proxy.calls)) == ({"p-1-agent": 2}, 2)


async def test_a_refused_call_is_not_bought(proxy: EngineProxy, engine: Engine) -> None:
    """The proxy answers itself, also a probe, and the engine gets nothing."""
    engine.released.set()
    proxy.allow(1)
    proxy.refuse(401)

    assert (await call(proxy))[0] == (await call(proxy, PROBE_SESSION))[0] == 401
    assert (proxy.refused, proxy.calls) == (["p-1-agent"], [])

    proxy.refuse(0)

    assert await call(proxy) == (200, "sampled")


async def test_a_caller_that_hangs_up_leaves_a_call_that_was_bought(
    proxy: EngineProxy, engine: Engine
) -> None:
    """The killed gateway's call counts, and has no answer. A call that waits was never bought."""
    proxy.allow(1)
    cut = asyncio.create_task(call(proxy))
    await until(lambda: len(proxy.at_engine()) == 1, "the engine has the call")
    cut.cancel()
    await until(lambda: not proxy.at_engine(), "the call has ended")
    proxy.allow(0)
    waits = asyncio.create_task(call(proxy))
    await until(lambda: bool(proxy.waiting()), "the call waits")
    waits.cancel()
    await until(lambda: not proxy.waiting(), "the call has ended")

    assert (len(proxy.calls), dict(proxy.answers())) == (1, {})
    assert proxy.in_flight() == {"p-1-agent"}


async def test_a_small_disk_can_be_filled_and_leaves_nothing(tmp_path: Path) -> None:
    """A write fails until there is room again. It is no mount of this process, and is gone at the end."""
    folder = tmp_path / "disk"
    try:
        async with small_disk.mounted(folder) as disk:
            disk.fill()
            with pytest.raises(OSError, match="No space") as full:
                (disk.path / "record").write_bytes(b"x")
            disk.make_room()
            (disk.path / "record").write_bytes(b"x")
            assert not list(folder.iterdir())
    except MissingDependency as reason:
        pytest.skip(str(reason))

    assert full.value.errno == errno.ENOSPC
    assert not folder.exists()
    assert not disk.path.exists()


async def test_a_user_who_may_not_mount_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is one line, and no folder stays."""
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    with pytest.raises(MissingDependency, match=r"^unshare: Operation not permitted$"):
        async with small_disk.mounted(tmp_path / "disk"):
            pass

    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("kind", ["processes", "sandboxes", "folders"])
def test_what_was_left_is_named(tmp_path: Path, kind: str) -> None:
    """A process of a sandbox and a sandbox's folder, also while the stack runs; a temporary folder."""
    home, stack = tmp_path / "home", kind == "folders"
    before = left_behind.traces(home, (), stack=stack)
    if kind == "processes":
        left = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            env={"PERDURE_BOX": f"{home}/sandboxes/bubblewrap/p-1-agent-1"},
        )
    else:
        name = {"sandboxes": "sandboxes/bubblewrap/p-1-agent-1", "folders": "scratch/x"}[kind]
        (home / name).mkdir(parents=True)

    found = left_behind.traces(home, (), stack=stack) - before
    if kind == "processes":
        left.communicate()

    assert {name for name, things in vars(found).items() if things} == {kind}
    assert len(found.lines()) == 1


def test_podmans_own_process_is_not_the_demos(tmp_path: Path) -> None:
    """Rootless Podman keeps one for each user. It has the environment of the command that started it."""
    with subprocess.Popen(
        ["catatonit", "-P"],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        env={"PERDURE_HOME": str(tmp_path)},
    ) as pause:
        found = left_behind.traces(tmp_path, (), stack=True)
        pause.communicate()

    assert not found
