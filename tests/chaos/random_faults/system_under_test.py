"""What the acts break: two hosts at work, a store behind a proxy, a clock, two builds; and a record."""

import asyncio
import contextlib
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from temporalio.service import RPCError

from perdure.stack import stack_ports
from perdure.types import RolloutRequest
from tests.chaos.random_faults import ray_engines
from tests.chaos.random_faults.ray_engines import RayEngines
from tests.s3_proxy import S3Proxy
from tests.s3_server import with_bucket
from tests.stack import shifted_clock, worker_builds
from tests.stack.running_stack import DEATH_S, STARTED, Stack, running
from tests.stack.second_host import Line, beside, serves
from tests.stack.shifted_clock import Clock
from tests.stack.stack_process import Process
from tests.stack.wait_until import until

SILENT_S = 36.0
"""In place of 72 s: a host that is silent for longer is lost."""
SHORT_S, LONG_S = 1.0, 6.0
"""How long a part is away: the longest is twice the heartbeat, and far from a host's silence."""
STAGE_WITHIN_S = 10.0
DISK = "size=600m"
FIRST_BUILD = "v1"
TURNS = 4


@dataclass(frozen=True)
class Cut:
    """A time in which turns in flight were cut, and are asked for again. By the monotonic clock."""

    begun: float
    ended: float
    rollout: str
    """Workflow id; empty: turns of all."""


@dataclass
class Record:
    """What the acts did to the rollouts, from which the oracle takes what each may cost."""

    cuts: list[Cut] = field(default_factory=list)
    sandboxes_taken: Counter[str] = field(default_factory=Counter)
    """Workflow id -> how many of its sandboxes an act took."""
    agents_killed: set[str] = field(default_factory=set)
    """Workflow ids."""
    killed_in: Counter[str] = field(default_factory=Counter)
    """Stage -> rollouts, of all seeds, that were in it when a process that served them was killed."""


@dataclass(frozen=True)
class Work:
    """A rollout (its workflow id), its stage, and the worker process that runs the stage."""

    rollout: str
    stage: str
    worker: int


@dataclass
class World:
    first: Stack
    proxy: S3Proxy
    disk: Path | None
    """The small disk under the first home; None where none may be mounted."""
    clock: Clock | None
    """None where libfaketime is missing."""
    ray: RayEngines | None
    """The nodes of the engines; None without `--ray`, where gateways know the engine by its URL."""
    parts: AsyncExitStack
    folder: Path
    dice: random.Random = field(default_factory=random.Random)
    record: Record = field(default_factory=Record)
    build: str = FIRST_BUILD
    """The current one."""
    machines: int = 0
    second: Stack = field(init=False)
    line: Line = field(init=False)
    """Between the second host and Temporal."""

    @property
    def hosts(self) -> tuple[Stack, Stack]:
        return self.first, self.second

    def any_host(self) -> Stack:
        return self.dice.choice(self.hosts)

    def pause_s(self) -> float:
        return self.dice.uniform(SHORT_S, LONG_S)

    async def begin(self, dice: random.Random) -> None:
        """Everything is up, and nothing is remembered."""
        self.dice, self.record = dice, Record(killed_in=self.record.killed_in)
        self.first.engine.forget()
        self.first.requests.clear()
        for host in self.hosts:
            await host.recover()

    async def add_machine(self) -> None:
        """A new second host, with one worker of the current build."""
        self.machines += 1
        home = self.folder / f"machine-{self.machines}"
        self.second, self.line = await self.parts.enter_async_context(beside(self.first, home))
        self.second.requests, self.second.builds = self.first.requests, (self.build,)
        await self.second.recover()
        await until(lambda: serves(self.second), "the new host serves")

    async def at_work(self) -> list[Work]:
        """All stages that run at this moment, as far as the server knows."""
        query = "ExecutionStatus = 'Running' AND WorkflowType = 'RolloutWorkflow'"
        try:
            open_ids = {w.id async for w in self.first.client.list_workflows(query)}
        except RPCError:  # the server is away
            return []
        found = []
        for request in self.first.requests:
            pending = await self.first.pending(request) if request.workflow_id in open_ids else None
            if pending is not None and pending.state == STARTED:
                worker = int(pending.last_worker_identity.partition("@")[0])
                found.append(Work(request.workflow_id, pending.activity_type.name, worker))
        return found

    async def host_at(self, stage: str) -> Stack:
        """A host that runs this stage now; any host, if none comes to it for some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STAGE_WITHIN_S):
                while True:
                    found = {work.worker for work in await self.at_work() if work.stage == stage}
                    for host in self.hosts:
                        if found & {worker.pid for worker in host.workers}:
                            return host
        return self.any_host()

    async def count_killed(self, workers: Sequence[Process]) -> set[str]:
        """Count what these workers did when they were killed; the workflow ids of these rollouts."""
        killed = {worker.pid for worker in workers}
        struck = [work for work in await self.at_work() if work.worker in killed]
        self.record.killed_in.update(work.stage for work in struck)
        return {work.rollout for work in struck}

    def rollout_of(self, identity: str) -> str:
        """The workflow id whose sandbox this is; empty: none of ours."""
        digest = "-".join(identity.split("-")[:2])
        ids = (r.workflow_id for r in self.first.requests if self._digest(r) == digest)
        return next(ids, "")

    def _digest(self, request: RolloutRequest) -> str:
        return "-".join(self.first.identity(request, "agent").split("-")[:2])

    @contextmanager
    def turns_are_cut(self, rollout: str = "") -> Iterator[None]:
        """Within, a turn in flight may be cut, of this rollout or of all."""
        begun = time.monotonic()
        yield
        self.record.cuts.append(Cut(begun, time.monotonic(), rollout))


@asynccontextmanager
async def opened(
    folder: Path, patch: pytest.MonkeyPatch, *, ray: bool = False
) -> AsyncIterator[World]:
    """Two hosts of build v1, which is current; with `ray` their engines run on Ray nodes. Nothing
    remains afterwards."""
    patch.setenv("PERDURE_HOST__SILENT_S", str(SILENT_S))
    faked = None if shifted_clock.MISSING else Clock(folder, patch)
    async with AsyncExitStack() as parts:
        disk = parts.enter_context(_small_disk(folder / "disk"))
        server = parts.enter_context(with_bucket("chaos"))
        proxy = S3Proxy(server.url)
        parts.callback(proxy.close)
        first = await parts.enter_async_context(
            running(
                (disk or folder) / "home",
                workers=0,
                store="s3://chaos",
                s3_url=proxy.url,
                turns=TURNS,
                wired=True,
                named=not ray,
                beat_s=DEATH_S,
            )
        )
        parts.callback(proxy.heal)
        engines = await parts.enter_async_context(_on_ray(first, folder)) if ray else None
        first.builds = (FIRST_BUILD,)
        await first.recover()
        await worker_builds.make_current(first, FIRST_BUILD)
        world = World(first, proxy, disk, faked, engines, parts, folder)
        await world.add_machine()
        yield world


def _on_ray(stack: Stack, folder: Path) -> AbstractAsyncContextManager[RayEngines]:
    assert stack.wire is not None
    return ray_engines.on_ray(
        stack, f"http://{stack_ports.LOOPBACK}:{stack.wire.port}", folder / "ray"
    )


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", DISK, "perdure-chaos", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
