"""`perdure workers up --slurm` on Debian's Slurm: one controller, two nodes of two CPUs."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.hosts.slurm_cluster import PATIENCE_S, SlurmCluster
from tests.hosts.slurm_daemons import CPUS, NODES, PARTITION, URGENT, SlurmDaemons, why_not
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import BEAT_S, running
from tests.stack.wait_until import nothing, until


@pytest_asyncio.fixture
async def slurm_cluster(tmp_path: Path) -> AsyncIterator[SlurmCluster]:
    if missing := why_not() or why_not_here():
        pytest.skip(missing)
    slurm = SlurmDaemons(tmp_path / "slurm")
    async with running(tmp_path / "stack", workers=0, beat_s=BEAT_S) as stack:
        cluster = SlurmCluster(tmp_path, stack, slurm)
        try:
            await slurm.start()
            yield cluster
            stack.engine.let_go()
            code, _, aside = await cluster.workers("down", "--slurm")
            assert code == 0, aside
            assert slurm.active() == ""
            await nothing(cluster.left)
        finally:
            stack.engine.let_go()
            await slurm.stop()


async def test_a_requeued_task_and_a_killed_controller_cost_no_rollout(
    slurm_cluster: SlurmCluster,
) -> None:
    """Agents continue while the controller is down. The requeued task's rollouts move in a second
    attempt, because a spare task takes its node at once."""
    cluster, slurm = slurm_cluster, slurm_cluster.slurm
    assert await cluster.up("--min", "2") == dict.fromkeys(NODES, CPUS)
    requests = await cluster.begin("requeue", 3)
    await cluster.at_work(requests)
    moving = [one for one in requests if cluster.where(one) == NODES[0]]
    await slurm.save_state()

    slurm.kill_controller()
    code, _, told = await cluster.workers("list", "--slurm")
    assert (code, "Slurm's controller does not answer; running workers continue" in told) == (
        1,
        True,
    )
    await slurm.start_controller()

    slurm.run("scontrol", "requeue", cluster.job_on(NODES[0]))
    await cluster.at_work(moving, attempt=2)
    slurm.kill_controller()
    await cluster.end(requests, moving)
    await slurm.start_controller()

    assert moving


async def test_a_task_near_its_time_limit_moves_its_rollouts_and_requeues_itself(
    slurm_cluster: SlurmCluster,
) -> None:
    """Slurm sends `--signal` before a limit that is lowered here. The controller is down when the task
    wants to requeue itself."""
    cluster, slurm, began = slurm_cluster, slurm_cluster.slurm, time.monotonic()
    await cluster.up("--min", "2")
    requests = await cluster.begin("limit", 2)
    await cluster.at_work(requests)
    node = cluster.where(requests[0])
    moving = [one for one in requests if cluster.where(one) == node]
    [(job, task)] = [(job, task) for job, task, where in slurm.running() if where == node]
    minutes = int((time.monotonic() - began) / 60) + 2
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    log = cluster.stack.home / "slurm" / f"worker-{task}.log"
    await until(lambda: "its rollouts move" in log.read_text(), "Slurm's signal", PATIENCE_S)
    slurm.kill_controller()
    await until(lambda: "cannot requeue" in log.read_text(), "no controller answers", PATIENCE_S)
    await slurm.start_controller()

    def restarted() -> bool:
        return "Restarts=1" in slurm.run("scontrol", "show", "job", job)

    await until(restarted, "the task is in the queue again", PATIENCE_S)
    await cluster.at_work(moving, attempt=2)
    await cluster.end(requests, moving)


async def test_a_preempted_task_gives_its_node_up_and_moves_its_rollouts(
    slurm_cluster: SlurmCluster,
) -> None:
    """The job that preempts it ends before the rollouts do, so the next task can have the node."""
    cluster, slurm = slurm_cluster, slurm_cluster.slurm
    await cluster.up("--min", "2")
    requests = await cluster.begin("preempted", 3)
    await cluster.at_work(requests)
    moving = [one for one in requests if cluster.where(one) == NODES[0]]
    urgent = ("--partition", URGENT, "--exclusive", "--nodelist", NODES[0], "--output=/dev/null")
    job = slurm.run("sbatch", "--parsable", *urgent, "--wrap", "sleep 5").strip()
    await until(lambda: job not in slurm.active(), "the urgent job is over", PATIENCE_S)
    await cluster.at_work(moving, attempt=2)
    await cluster.end(requests, moving)

    assert moving


async def test_nodes_are_added_for_waiting_rollouts_and_idle_ones_given_back(
    slurm_cluster: SlurmCluster,
) -> None:
    cluster, slurm = slurm_cluster, slurm_cluster.slurm
    assert list((await cluster.up("--max", "2", "--idle-s", "10")).values()) == [CPUS]
    requests = await cluster.begin("waits", CPUS + 1)
    await cluster.at_work(requests)
    assert len(slurm.running()) == 2
    await cluster.end(requests, [])

    await until(lambda: len(slurm.running()) == 1, "one node is given back", PATIENCE_S)


async def test_rollouts_of_a_lost_node_move(slurm_cluster: SlurmCluster) -> None:
    """slurmd, the job and its processes die at once. The node that returns ends its old sandboxes."""
    cluster, slurm = slurm_cluster, slurm_cluster.slurm
    await cluster.up("--min", "2")
    requests = await cluster.begin("lost", 2)
    await cluster.at_work(requests)
    node = cluster.where(requests[0])
    moving = [one for one in requests if cluster.where(one) == node]
    slurm.kill_node(node)
    await cluster.at_work(moving, attempt=2)
    slurm.start_node(node)

    def has_swept() -> bool:
        return not any(cluster.where(one) for one in moving)

    await until(has_swept, f"{node} has ended its old sandboxes", PATIENCE_S)
    await cluster.end(requests, moving)


async def test_up_again_replaces_the_workers(slurm_cluster: SlurmCluster) -> None:
    """With new settings, under a new job; the old one is gone."""
    cluster, slurm = slurm_cluster, slurm_cluster.slurm
    await cluster.up()
    [(old, _, _)] = slurm.running()
    seats = await cluster.up("--cpus-per-rollout", "0.5")

    assert list(seats.values()) == [2 * CPUS]
    await until(lambda: len(slurm.running()) == 1, "one worker is left", PATIENCE_S)
    assert old not in {job for job, _, _ in slurm.running()}


async def test_what_slurm_cannot_run_is_refused_with_the_fix(slurm_cluster: SlurmCluster) -> None:
    """An unknown partition, and a home that the node does not see. Nothing stays in the queue."""
    cluster, slurm = slurm_cluster, slurm_cluster.slurm
    code, _, partition = await cluster.workers("up", "--slurm", "--partition", "gpu")
    assert code == 2
    slurm.stop_node(NODES[0])
    slurm.start_node(NODES[0], without=cluster.stack.home)
    there = ("--sbatch-args", f"--nodelist={NODES[0]}")
    code, _, home = await cluster.workers("up", "--slurm", *there)

    assert code == 2
    assert partition.endswith(f"choose one of {PARTITION}, {URGENT} with --partition\n")
    assert f"{NODES[0]}: the node does not see {cluster.stack.home / 'slurm'}" in home
    await nothing(slurm.active)
