"""kill -9 of anything at a random moment, 250 times: nothing is left after the reaper's period.

Each test is one life of at least twenty-five kills. Meanwhile rollouts start and end; after one to
four kills what is dead is started again. At the end some workflows are terminated, the others finish, and
the reaper sweeps once. Then the kernel is asked what there is.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from perdure.sandboxes.host import procfs
from perdure.sandboxes.host.procfs import below
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness
from tests import counting_agent, held_ports
from tests.checkout_paths import ROOT
from tests.leaks.traces import Traces
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

KILLS = 25
MOST_OPEN = 6
LONGEST_S = 1.5
"""Between the start of rollouts and a kill."""
TO_THE_END_S = 400.0
"""Only what hangs takes this long, also on a machine that does other things."""

VICTIMS = {
    "worker": 5, "fork server": 3, "keeper": 4, "holder": 3, "temporal": 2, "gateway": 1, "service": 4,
    "worker and keepers": 3, "everything": 2,
}  # fmt: skip
"""How often each is chosen, beside the others. `service`: the E2B double, where there is one."""


@dataclass
class Service:
    """The double as people start it: killed, and started again on its folder and port."""

    state: Path
    port: int
    popen: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    async def start(self) -> None:
        argv = [sys.executable, "-m", "tests.doubles.e2b_server", "--state", str(self.state)]
        self.popen = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *argv, "--port", str(self.port)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        await part_readiness.wait_for_http(f"{self.url}/__control/rules")

    def kill(self) -> None:
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()

    async def sweep(self) -> None:
        """What a service does on its own hosts: a list removes what a killed process left."""
        await BubblewrapProvider(Settings(home=self.state / "guests")).list()


@dataclass
class Life:
    stack: Stack
    dice: random.Random
    traces: Traces
    service: Service | None = None
    killed: Counter[str] = field(default_factory=Counter)
    started: int = 0

    async def start_some(self, life: str) -> None:
        running = [r for r in self.stack.requests if not await self.stack.is_over(r)]
        for _ in range(min(2, MOST_OPEN - len(running))):
            self.started += 1
            await self.stack.start(
                f"{life}-{self.started}",
                sandbox="e2b" if self.service else "bubblewrap",
                agent=counting_agent.NAME,
                agent_options={
                    "mark": self.stack.mark, "after_s": round(self.dice.uniform(0, 2), 2),
                },
                heartbeat_timeout_s=2,
                max_attempts=10,
            )  # fmt: skip

    async def strike(self) -> None:
        """SIGKILL; of what it hits only our own children are waited for."""
        self.traces.see()
        chosen = self.dice.choices([*VICTIMS], [*VICTIMS.values()])[0]
        pids = self.victims(chosen)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.stack.processes:
            if process.pid in pids:
                await process.ended()
        if self.service and self.service.popen and self.service.popen.pid in pids:
            self.service.popen.wait()
        self.killed[chosen] += 1

    def victims(self, chosen: str) -> Sequence[int]:
        workers = [worker.pid for worker in self.stack.workers]
        fork_servers = [pid for worker in workers for pid in _fork_servers(worker)]
        boxes = [SandboxFolder(path) for path in self.traces.boxes()]
        keepers = [box.keeper.pid for box in boxes if box.keeper]
        holders = [box.holder.pid for box in boxes if box.holder]
        temporal = [p.pid for p in self.stack.processes if p.alive and p.name == "temporal"]
        gateways = [p.pid for p in self.stack.processes if p.alive and p.name == "gateway"]
        services = [self.service.popen.pid] if self.service and self.service.popen else []
        everything = [*services, *temporal, *gateways, *workers, *fork_servers, *keepers, *holders]
        return {
            "worker": workers,
            "fork server": fork_servers,
            "keeper": self._one_of(keepers),
            "holder": self._one_of(holders),
            "temporal": temporal,
            "gateway": gateways,
            "service": services or workers,
            "worker and keepers": [*workers, *keepers],
            "everything": everything,
        }[chosen]

    def _one_of(self, pids: Sequence[int]) -> Sequence[int]:
        return self.dice.sample(pids, 1) if pids else ()

    async def recover(self) -> None:
        if self.service is not None and not self.service.alive:
            await self.service.start()
        await self.stack.recover()

    def meets_a_sandbox(self) -> bool:
        self.traces.see()
        return bool(self.traces.groups and self.traces.networks)

    async def meets_a_sandbox_or_is_idle(self) -> bool:
        return self.meets_a_sandbox() or all(
            [await self.stack.is_over(request) for request in self.stack.requests]
        )

    async def end(self) -> None:
        """Terminates some of them; the others run to their end."""
        open_ones = [r for r in self.stack.requests if not await self.stack.is_over(r)]
        for request in self.dice.sample(open_ones, len(open_ones) // 2):
            await self.stack.handle(request).terminate()
        for request in open_ones:
            over = partial(self.stack.is_over, request)
            await until(over, f"{request.workflow_id} is over", TO_THE_END_S)
        self.traces.see()
        await self.stack.sweep(grace_s=0)
        self.traces.age()
        await self.stack.sweep(grace_s=0)
        if self.service is not None:
            await self.service.sweep()

    async def runs(self, seed: str) -> None:
        while self.killed.total() < KILLS:
            await self.recover()
            await self.start_some(seed)
            if not self.killed:  # on a busy host all kills could come before the first boot
                await until(self.meets_a_sandbox_or_is_idle, "a sandbox has booted", TO_THE_END_S)
                if not self.meets_a_sandbox():  # the rollouts were over before we looked
                    continue
            for _ in range(self.dice.randint(1, 4)):
                await asyncio.sleep(self.dice.uniform(0, LONGEST_S))
                await self.strike()
        await self.recover()
        await self.end()


@asynccontextmanager
async def life(home: Path, seed: int, service: Service | None = None) -> AsyncIterator[Life]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(home / "stack") as stack:
        found = Life(stack, random.Random(seed), Traces(home), service)
        yield found
        print(f"seed {seed}: {found.started} rollouts, killed {dict(found.killed)}")


@contextmanager
def e2b(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with held_ports.held(1) as (port,):
        service = Service(home / "service", port)
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
            monkeypatch.setenv(name, service.url)
        monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
        try:
            yield service
        finally:
            service.kill()


@pytest.mark.parametrize("seed", range(1, 9))
async def test_bubblewrap_leaves_nothing(tmp_path: Path, seed: int) -> None:
    """200 kills: no sandbox, process, control group, mount or network namespace stays."""
    async with life(tmp_path, seed) as found:
        await found.runs(f"life-{seed}")
        await until(
            lambda: not found.traces.left(found.stack.mark),
            f"seed {seed}: {found.traces.left(found.stack.mark)}",
            30,
        )


@pytest.mark.parametrize("seed", [101, 102])
async def test_e2b_leaves_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 kills, the service among the victims: it has no sandbox left, nor has this host."""
    pytest.importorskip("e2b")
    with e2b(tmp_path, monkeypatch) as service:
        await service.start()
        async with life(tmp_path, seed, service) as found:
            await found.runs(f"life-{seed}")
            listed = await E2BProvider(Settings(home=found.stack.home)).list()
            await until(
                lambda: not found.traces.left(found.stack.mark),
                f"seed {seed}: {found.traces.left(found.stack.mark)}",
                30,
            )

            assert listed == []


def _fork_servers(worker: int) -> list[int]:
    return [pid for pid in below(worker) if procfs.read(f"/proc/{pid}/comm") == b"perdure-fork\n"]
