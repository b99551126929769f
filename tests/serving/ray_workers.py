"""Ray nodes that share a stack: the ground of the tests and of the benchmark of workers on Ray."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.serving.ray_cluster import ENVIRONMENT, LOOPBACK_ONLY, process_tree
from perdure.types import RolloutRequest
from tests.checkout_paths import ROOT
from tests.serving.ray_nodes import RAY, RESERVED, RayNodes
from tests.stack.host_requirements import cmdline, pids, why_not_here
from tests.stack.running_stack import BEAT_S, Stack, running
from tests.stack.wait_until import until

PATIENCE_S = 300.0
FOREIGN = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
NODES = (
    "import json, ray, sys; ray.init(address=sys.argv[1], log_to_driver=False);"
    "print(json.dumps({n['NodeID']: n['NodeName'] for n in ray.nodes() if n['Alive']}))"
)

HOLDER = """
import ray, sys
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
address, name, cpus, group = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "True"
ray.init(address=address, log_to_driver=False)
[node] = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeName"] == name]
class Holder:
    def here(self): return True
if group:
    group = placement_group([{"CPU": cpus}], "STRICT_PACK", lifetime="detached", _soft_target_node_id=node)
    ray.get(group.ready())
else:
    holder = ray.remote(Holder).options(num_cpus=cpus, scheduling_strategy=On(node, soft=False)).remote()
    ray.get(holder.here.remote())
print("held", flush=True)
sys.stdin.read()
"""
"""A program that holds CPUs of a node: for good in a placement group, as engines do, or as an actor of
its own, until its stdin closes."""


def polls(home: Path) -> int:
    """How many workers of this home have begun to poll."""
    log = home / "logs" / "worker.log"
    return log.read_text().count("polls its queues") if log.exists() else 0


class Cluster:
    """Ray nodes whose workers belong to a stack that has none of its own."""

    def __init__(self, folder: Path, stack: Stack, nodes: RayNodes, env: dict[str, str]) -> None:
        """`env`: what those who connect to the cluster need."""
        self.folder, self.stack, self.nodes, self.env = folder, stack, nodes, env

    def add(self, name: str, cpus: int, resource: str = "worker", label: str = RESERVED) -> Any:
        offered = json.dumps({resource: 1})
        more = ("--num-cpus", str(cpus), "--node-name", name, "--resources", offered)
        where = str(ROOT)  # of the tests' agent
        return self.nodes.add(*more, "--labels", label, PYTHONPATH=where)

    def home(self, name: str) -> Path:
        return self.folder / f"home-{name}"

    async def workers(self, *words: str) -> Any:
        """What `perdure workers ...` answers."""
        child = await self.started(*words)
        said, aside = await child.communicate()
        assert child.returncode == 0, said.decode() + aside.decode()
        return json.loads(said or "null")

    async def ask(self, *words: str) -> tuple[int | None, str]:
        """Exit code and lines of `perdure workers ...`, which must end within a minute."""
        child = await self.started(*words)
        try:
            async with asyncio.timeout(60):
                said, aside = await child.communicate()
        except TimeoutError:
            child.kill()
            pytest.fail(f"`perdure workers {' '.join(words)}` did not end")
        return child.returncode, said.decode() + aside.decode()

    async def started(self, *words: str) -> asyncio.subprocess.Process:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        spec = self.stack.plan.worker()
        argv = [sys.executable, "-m", "perdure.cli.main", "workers", *words]
        if words[0] == "up" and "--home" not in words:
            argv += ["--home", str(self.folder / "home-{node}")]
        return await asyncio.create_subprocess_exec(
            *(*argv, "--ray-address", self.nodes.address),
            cwd=ROOT,
            env={**kept, **ENVIRONMENT, **self.env, **self.stack.environment(spec)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def hold_cpus(self, name: str, cpus: int, *, group: bool) -> asyncio.subprocess.Process:
        """A program that holds CPUs of the node `name`. `group`: in a placement group that outlives it,
        as engines do; otherwise by an actor, which `let_go` ends."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDER, self.nodes.address, name, str(cpus), str(group)),
            env={**os.environ, **ENVIRONMENT, **self.env},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while (line := await child.stdout.readline()) != b"held\n":
                assert line, "the program that holds CPUs ended"
        if group:
            await self.let_go(child)
        return child

    async def let_go(self, holder: asyncio.subprocess.Process) -> None:
        assert holder.stdin is not None
        holder.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            await holder.wait()

    async def alive(self) -> dict[str, str]:
        """Ids and names of Ray's nodes, the head's too."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", NODES, self.nodes.address),
            env={**os.environ, **ENVIRONMENT, **self.env},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await child.communicate()
        lines = [line for line in said.splitlines() if line.startswith(b"{")]  # Ray prints others
        found: dict[str, str] = json.loads(lines[-1])
        return found

    def raylets(self) -> int:
        """Nodes that the head and its autoscaler have started."""
        below = process_tree(self.nodes.head.pid)
        return sum(b"/raylet/raylet" in cmdline(pid) for pid in below)

    def at_home(self) -> int:
        """Nodes whose worker is kept."""
        note = f"{self.folder}/home-".encode()
        lines = (cmdline(pid) for pid in pids())
        return sum(b"perdure.serving.engine_supervisor" in line and note in line for line in lines)

    async def up(self, *words: str, home: str = "home-{node}") -> dict[str, int]:
        """Seats of each node."""
        where = ("--home", str(self.folder / home), "--resource", "worker")
        said = await self.workers("up", "--ray", "--json", *where, *words)
        assert not said["absent"]
        return {one["node"]: one["seats"] for one in said["nodes"]}

    async def starts(self) -> dict[str, int]:
        """How often each node's worker was started, as the manager knows it."""
        found = await self.workers("list", "--json")
        return {one["node"]: one["starts"] for one in found["nodes"] if one["pid"]}

    def polls(self, name: str) -> int:
        """How many workers of this node have begun to poll."""
        return polls(self.home(name))

    def worker(self, name: str) -> int:
        """The pid of this node's worker."""
        note = self.home(name) / "run" / "worker.note"
        group: int = json.loads(note.read_text())["group"]
        return group

    def where(self, request: RolloutRequest, attempt: int = 1) -> str:
        """The node that has its sandbox, or empty."""
        identity = self.stack.identity(request, "agent", attempt)
        found = list(self.folder.glob(f"home-*/sandboxes/*/{identity}"))
        return found[0].parents[2].name.removeprefix("home-") if found else ""

    async def begin(self, run: str, count: int) -> list[RolloutRequest]:
        self.stack.engine.hold(3)
        return [await self.stack.start(run, sample_index=k) for k in range(count)]

    async def at_work(self, requests: list[RolloutRequest], count: int, attempt: int = 1) -> None:
        """Wait until so many agents wait for the held answer."""
        wanted = {self.stack.identity(one, "agent", attempt) for one in requests}

        def arrived() -> bool:
            held = {one.rpartition("-")[0] for one in self.stack.engine.waiting}
            return len(wanted & held) >= count

        await until(arrived, f"{count} agents wait for their answer", PATIENCE_S)

    async def end(self, requests: list[RolloutRequest], attempts: int = 1) -> None:
        """Let them go; all are solved, in their `attempts`-th attempt."""
        self.stack.engine.let_go()
        for request in requests:
            over = partial(self.stack.is_over, request)
            await until(over, f"{request.workflow_id} is over", PATIENCE_S)
            episode = await self.stack.episode(request)
            assert (episode.reward, len(episode.attempts)) == (1.0, attempts), episode

    async def notice(self, name: str) -> None:
        """A spot notice, as infra/ray/spot_notice sends it."""
        [key] = [key for key, found in (await self.alive()).items() if found == name]
        told = await asyncio.create_subprocess_exec(
            *(*RAY, "drain-node", "--address", self.nodes.address, "--node-id", key),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot notice"),
            *("--deadline-remaining-seconds", "300"),
            env={**os.environ, **ENVIRONMENT},
        )
        assert await told.wait() == 0


@asynccontextmanager
async def a_cluster(
    folder: Path, autoscaling: Mapping[str, float] | None = None, /, **head: str
) -> AsyncIterator[Cluster]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(folder / "stack", workers=0, beat_s=BEAT_S) as stack:
        env = LOOPBACK_ONLY if autoscaling else {}  # its nodes take the head's address for theirs
        start = partial(RayNodes, folder, autoscaling, **env, **head)
        cluster = Cluster(folder, stack, await asyncio.to_thread(start), env)
        try:
            yield cluster
        finally:
            stack.engine.let_go()
            try:
                await cluster.workers("down")
            finally:
                await asyncio.to_thread(cluster.nodes.stop)
