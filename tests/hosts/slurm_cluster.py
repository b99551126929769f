"""A stack without workers of its own, and `perdure workers up --slurm` on a cluster of this machine."""

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from perdure.types import RolloutRequest
from tests.checkout_paths import ROOT
from tests.hosts.slurm_daemons import PARTITION, SlurmDaemons
from tests.stack.host_requirements import cmdline, pids
from tests.stack.running_stack import Stack
from tests.stack.wait_until import until

PATIENCE_S = 400.0
FOREIGN = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_", "SLURM")


class SlurmCluster:
    def __init__(self, folder: Path, stack: Stack, slurm: SlurmDaemons) -> None:
        self.folder, self.stack, self.slurm = folder, stack, slurm

    async def workers(self, *words: str) -> tuple[int | None, str, str]:
        """Exit code, stdout and stderr of `perdure workers ...`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment = self.stack.environment(self.stack.plan.worker())
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perdure.cli.main", "workers", *words),
            cwd=ROOT,
            env={**kept, **environment, **self.slurm.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, aside = await child.communicate()
        return child.returncode, said.decode(), aside.decode()

    async def up(self, *words: str) -> dict[str, int]:
        """Seats of each node."""
        home = ("--home", str(self.folder / "home-{node}"))
        options = ("--partition", PARTITION, *home, *words)
        code, said, aside = await self.workers("up", "--slurm", "--json", *options)
        assert code == 0, said + aside
        found: dict[str, Any] = json.loads(said)
        return {one["node"]: one["seats"] for one in found["nodes"]}

    def where(self, request: RolloutRequest, attempt: int = 1) -> str:
        """The node that has its sandbox, or empty."""
        identity = self.stack.identity(request, "agent", attempt)
        found = list(self.folder.glob(f"home-*/sandboxes/*/{identity}"))
        return found[0].parents[2].name.removeprefix("home-") if found else ""

    def job_on(self, node: str) -> str:
        [job] = [job for job, _, where in self.slurm.running() if where == node]
        return job

    async def begin(self, run: str, count: int) -> list[RolloutRequest]:
        self.stack.engine.hold(3)
        return [await self.stack.start(run, sample_index=k) for k in range(count)]

    async def at_work(self, requests: list[RolloutRequest], attempt: int = 1) -> None:
        """Wait until their agents wait for the held answer."""
        wanted = {self.stack.identity(one, "agent", attempt) for one in requests}

        def arrived() -> bool:
            return wanted <= {one.rpartition("-")[0] for one in self.stack.engine.waiting}

        await until(arrived, f"{len(requests)} agents wait for their answer", PATIENCE_S)

    async def end(self, requests: list[RolloutRequest], moved: list[RolloutRequest]) -> None:
        """Let them go: all are solved, those that `moved` in their second attempt."""
        self.stack.engine.let_go()
        for request in requests:
            over = partial(self.stack.is_over, request)
            await until(over, f"{request.workflow_id} is over", PATIENCE_S)
            episode = await self.stack.episode(request)
            attempts = 2 if request in moved else 1
            assert (episode.reward, len(episode.attempts)) == (1.0, attempts), episode

    def left(self) -> list[str]:
        """Sandboxes, and processes of nodes."""
        boxes = [str(path) for path in self.folder.glob("home-*/sandboxes/*/*-agent-*")]
        here = os.fsencode(self.folder / "home-")
        return boxes + [f"process {pid}" for pid in pids() if here in cmdline(pid)]
