"""`perdure workers up --ray`: a worker on every node, through kills, notices and the head's restart."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from perdure.stack.node_worker import NodeWorker
from tests.checkout_paths import ROOT
from tests.serving.ray_nodes import SPOT
from tests.serving.ray_workers import PATIENCE_S, a_cluster
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import MET, running
from tests.stack.wait_until import until


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
        await cluster.notice("leaving")
        await cluster.at_work(requests, 2, attempt=2)
        assert [cluster.where(one, 2) for one in requests] == ["staying", "staying"]
        await cluster.end(requests, attempts=2)
        assert [cluster.where(one) for one in requests] == ["", ""]


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


async def test_workers_take_the_cpus_that_engines_left(tmp_path: Path) -> None:
    """`workers up` with its defaults starts a worker beside an engine. A node whose CPUs all belong to
    engines is named at once, with the option that changes it."""
    async with a_cluster(tmp_path) as cluster:
        cluster.add("shared", cpus=2)
        await cluster.hold_cpus("shared", 1, group=True)
        assert await cluster.up() == {"shared": 1}

        await cluster.workers("down")
        await cluster.hold_cpus("shared", 1, group=True)
        code, said = await cluster.ask("up", "--ray", "--resource", "worker")
        assert (code, "shared: " in said, "--spare-cpus" in said) == (1, True, True), said


async def test_a_worker_that_ray_cannot_place_is_told_and_ends(tmp_path: Path) -> None:
    """Another actor holds the node's CPUs: `up` says within seconds what it waits for, `down` and a
    second `up` return, and the second one works once the CPUs are free."""
    async with a_cluster(tmp_path) as cluster:
        cluster.add("busy", cpus=2)
        holder = await cluster.hold_cpus("busy", 2, group=False)
        waiting = await cluster.started("up", "--ray", "--resource", "worker")
        assert waiting.stderr is not None
        async with asyncio.timeout(60):
            while b"busy: " not in await waiting.stderr.readline():
                pass
        waiting.kill()
        await waiting.wait()

        code, said = await cluster.ask("down")
        assert (code, said) == (0, "stopped\n")
        waiting = await cluster.started("up", "--ray", "--resource", "worker")
        await cluster.let_go(holder)
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting.wait() == 0


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
    """From no node to two of the kind that the label names, and back to one, whichever was first: the
    last decides and counts. Rollouts that come while a node is given back start once each."""
    offered = {"CPU": 2, "worker": 1, "object_store_memory": 80 << 20}
    async with a_cluster(tmp_path, offered, PYTHONPATH=str(ROOT)) as cluster:
        words = ("--most-rollouts", "4", "--idle-s", "15", "--label", SPOT)
        assert list((await cluster.up(*words, home="home-{id}")).values()) == [2]
        requests = await cluster.begin("waits", 3)
        await cluster.at_work(requests, 3)
        assert cluster.raylets() == 1 + 2
        await cluster.end(requests)

        await until(lambda: cluster.raylets() == 1 + 1, "one node is left", PATIENCE_S)
        more = await cluster.begin("grows-again", 3)
        await cluster.at_work(more, 3)
        await cluster.end(more)

        await until(lambda: cluster.at_home() == 1, "one worker has left its node", PATIENCE_S)
        again = await cluster.begin("comes-back", 3)
        await cluster.at_work(again, 3)
        await cluster.end(again)
        await until(lambda: cluster.raylets() == 1 + 1, "one node is left", PATIENCE_S)
