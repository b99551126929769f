"""Engines on Ray nodes, one each. A node that an act kills is replaced, and so is its engine."""

import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.serving.ray_cluster import ENVIRONMENT
from tests.checkout_paths import ROOT
from tests.serving.ray_nodes import RayNodes
from tests.stack.running_stack import Stack

ENGINES = 2
TRUE_TIME = {"LD_PRELOAD": ""}
"""Ray's processes fail if their clock jumps, so they are not given the faked one."""
STARTED_WITHIN_S = 240.0


@dataclass
class RayEngines:
    nodes: RayNodes
    running: "list[subprocess.Popen[bytes]]"

    def kill(self, number: int) -> None:
        """With its engine, at once, as a machine that loses power; another node joins."""
        self.nodes.kill(self.running.pop(number))

    def join(self) -> None:
        self.running.append(self.nodes.add(**TRUE_TIME))


@asynccontextmanager
async def on_ray(stack: Stack, url: str, folder: Path) -> AsyncIterator[RayEngines]:
    """Two nodes whose engines carry each call to `url`; the gateways know them by the roster."""
    folder.mkdir()
    nodes = await asyncio.to_thread(functools.partial(RayNodes, folder, **TRUE_TIME))
    try:
        engines = RayEngines(nodes, [])
        for _ in range(ENGINES):
            await asyncio.to_thread(engines.join)
        await _up(stack, url, nodes.address)
        yield engines
    finally:
        await asyncio.to_thread(nodes.stop)


async def _up(stack: Stack, url: str, address: str) -> None:
    relay = f"{sys.executable} -m tests.chaos.random_faults.engine_relay --engine {url}"
    relay += " --host {host} --port {port} --generation {generation}"
    words = ["engines", "up", "--json", "--ray-address", address, "--listen", "127.0.0.1"]
    words += ["--model", "relay", "--replicas", str(ENGINES), "--cpus-per-replica", "0.1"]
    words += ["--engine-command", relay, "--env", f"PYTHONPATH={ROOT}:{ROOT / 'src'}"]
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.cli.main", *words),
        cwd=ROOT,
        env=stack.environment(stack.plan.gateway()) | ENVIRONMENT | TRUE_TIME,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(STARTED_WITHIN_S):
        told, failed = await up.communicate()
    assert up.returncode == 0, (told + failed).decode()
    states = [one["state"] for one in json.loads(told)["replicas"]]
    assert states == ["ready"] * ENGINES, told.decode()
