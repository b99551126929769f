"""`perdure workers up --ray`: a worker on every node, through kills, notices and the head's restart."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.serving.cluster import ENVIRONMENT, LOOPBACK_ONLY, process_tree
from perdure.stack.on_ray.node import NodeWorker
from perdure.types import RolloutRequest
from tests.paths import ROOT
from tests.serving.ray_nodes import RAY, RESERVED, SPOT, RayNodes
from tests.stack.host import cmdline, pids, why_not_here
from tests.stack.stack import BEAT_S, MET, Stack, running
from tests.stack.waiting import until

PATIENCE_S = 300.0
FOREIGN = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
NODES = (
    "import json, ray, sys; ray.init(address=sys.argv[1], log_to_driver=False);"
    "print(json.dumps({n['NodeID']: n['NodeName'] for n in ray.nodes() if n['Alive']}))"
)


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
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        spec = self.stack.plan.worker()
        argv = [sys.executable, "-m", "perdure.cli.main", "workers", *words]
        child = await asyncio.create_subprocess_exec(
            *(*argv, "--ray-address", self.nodes.address),
            cwd=ROOT,
            env={**kept, **ENVIRONMENT, **self.env, **self.stack.environment(spec)},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await child.communicate()
        assert child.returncode == 0, said.decode()
        return json.loads(said or "null")

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
        return sum(b"perdure.serving.supervisor" in line and note in line for line in lines)

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
        log = self.home(name) / "logs" / "worker.log"
        return log.read_text().count("polls its queues") if log.exists() else 0

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


async def test_every_node_has_one_worker_through_kills_and_a_restart_of_the_head(
    tmp_path: Path,
) -> None:
    """Seats follow CPUs; a node that joins works; killed workers, and the killed head with the manager,
    cost no rollout an attempt. The code is what Ray's runtime environment has brought."""
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    async with a_cluster(tmp_path, **storage) as cluster:
        cluster.add("a", cpus=2)
        cluster.add("engines-only", cpus=4, resource="other")
        assert await cluster.up() == {"a": 2}
        requests = await cluster.begin("nodes", 3)
        await cluster.at_work(requests, 2)

        cluster.add("b", cpus=2)
        joined = time.monotonic()
        await until(lambda: cluster.polls("b"), "the worker of the new node polls", PATIENCE_S)
        print(f"the worker of a node polls {time.monotonic() - joined:.1f} s after it joined")
        await cluster.at_work(requests, 3)
        assert sorted(cluster.where(one) for one in requests) == ["a", "a", "b"]
        environ = Path(f"/proc/{cluster.worker('b')}/environ").read_bytes().split(b"\0")
        [path] = [one for one in environ if one.startswith(b"PYTHONPATH=")]
        assert b"py_modules_files" in path.split(b":")[0]

        os.kill(cluster.worker("a"), signal.SIGKILL)
        await until(lambda: cluster.polls("a") == 2, "the killed worker is back", PATIENCE_S)
        await asyncio.to_thread(cluster.nodes.kill, cluster.nodes.head)
        await asyncio.to_thread(cluster.nodes.start_head)

        async def adopted() -> bool:
            return await cluster.starts() == {"a": 2, "b": 1}

        await until(adopted, "the next manager has found the workers", PATIENCE_S)
        assert (cluster.polls("a"), cluster.polls("b")) == (2, 1)
        await cluster.end(requests)


async def test_a_spot_notice_moves_the_rollouts_of_its_node(tmp_path: Path) -> None:
    """The node that stays takes them, in new attempts, before the deadline."""
    async with a_cluster(tmp_path) as cluster:
        cluster.add("leaving", cpus=2)
        await cluster.up()
        requests = await cluster.begin("spot", 2)
        await cluster.at_work(requests, 2)
        cluster.add("staying", cpus=2)
        await until(lambda: cluster.polls("staying"), "the other node polls", PATIENCE_S)
        await _notice(cluster, "leaving")
        await cluster.at_work(requests, 2, attempt=2)
        assert [cluster.where(one, 2) for one in requests] == ["staying", "staying"]
        await cluster.end(requests, attempts=2)
        assert [cluster.where(one) for one in requests] == ["", ""]


async def _notice(cluster: Cluster, name: str) -> None:
    """As infra/ray/spot_notice sends it."""
    [key] = [key for key, found in (await cluster.alive()).items() if found == name]
    told = await asyncio.create_subprocess_exec(
        *(*RAY, "drain-node", "--address", cluster.nodes.address, "--node-id", key),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot notice"),
        *("--deadline-remaining-seconds", "300"),
        env={**os.environ, **ENVIRONMENT},
    )
    assert await told.wait() == 0


async def test_rollouts_of_a_killed_node_move_and_it_returns_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of raylet, worker and signs of life at once: no turn that was answered is asked again.
    Of what labels leave out nothing takes part. The node that returns ends its old sandboxes."""
    monkeypatch.setenv("PERDURE_HOST__SILENT_S", "24")
    async with a_cluster(tmp_path) as cluster:
        lost = cluster.add("lost", cpus=2, label=SPOT)
        cluster.add("left-out", cpus=4, label="market=other")
        chosen = ("--label", "market=in(spot, reserved)")
        assert await cluster.up(*chosen) == {"lost": 2}
        requests = await cluster.begin("killed", 2)
        await cluster.at_work(requests, 2)
        cluster.add("staying", cpus=2)
        await until(lambda: cluster.polls("staying"), "the other node polls", PATIENCE_S)
        await asyncio.to_thread(cluster.nodes.kill, lost)
        await cluster.at_work(requests, 2, attempt=2)
        assert [cluster.where(one, 2) for one in requests] == ["staying", "staying"]

        cluster.add("lost", cpus=2, label=SPOT)
        await until(lambda: cluster.polls("lost") == 2, "the node is back", PATIENCE_S)
        await until(lambda: not any(map(cluster.where, requests)), "its old sandboxes end")
        again = await cluster.begin("after", 2)
        await cluster.at_work(again, 2)
        assert [cluster.where(one) for one in again] == ["lost", "lost"]
        cluster.stack.engine.let_go()
        for request in requests:
            await cluster.stack.solved_once(request, attempt=2, replayed=MET, again=1)
        await cluster.end(again)


async def test_a_node_on_which_a_rollout_has_just_begun_is_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever decided saw an idle node. Its worker ends, finds the rollout and starts again: the agent
    never notices. Without a rollout, the worker stays away."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path, workers=0) as stack:
        for name, value in stack.environment(stack.plan.worker()).items():
            monkeypatch.setenv(name, value)
        worker = NodeWorker("here", stack.settings)
        requests = await stack.met("just-begun")
        agents = stack.agents()

        assert not await worker.give_back()
        await until(lambda: worker.report().starts == 2, "the worker is back")
        assert stack.agents() == agents
        stack.engine.let_go()
        await stack.solved_once(requests[0])
        assert await worker.give_back()
        assert worker.report().pid == 0


async def test_rays_autoscaler_adds_nodes_for_what_waits_and_takes_idle_ones_back(
    tmp_path: Path,
) -> None:
    """From no node to two of the kind that the label names, and back to one: the last decides and
    counts. Rollouts that come while a node is given back start once each."""
    offered = {"CPU": 2, "worker": 1, "object_store_memory": 80 << 20}
    async with a_cluster(tmp_path, offered, PYTHONPATH=str(ROOT)) as cluster:
        words = ("--most-rollouts", "4", "--idle-s", "15", "--label", SPOT)
        assert list((await cluster.up(*words, home="home-{id}")).values()) == [2]
        requests = await cluster.begin("waits", 3)
        await cluster.at_work(requests, 3)
        assert cluster.raylets() == 1 + 2
        await cluster.end(requests)

        await until(lambda: cluster.at_home() == 1, "one worker has left its node", PATIENCE_S)
        again = await cluster.begin("comes-back", 3)
        await cluster.at_work(again, 3)
        await cluster.end(again)
        await until(lambda: cluster.raylets() == 1 + 1, "one node is left", PATIENCE_S)
