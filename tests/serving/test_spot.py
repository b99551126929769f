"""Nodes that leave under load: told to, or not. Run by `make test-serving` (slow)."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.engines.pool.engine_pool import EnginePool
from perdure.episodes import turns_parquet
from perdure.episodes.episode_store import read_run
from perdure.instances import instance_catalog
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.serving.ray_cluster import process_tree
from perdure.serving.replica_status import ReplicaStatus
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Grading, Instance, Outcome, Source, SourceKind
from tests import loop_agent
from tests.serving.home import PATIENCE_S, Home, gateway
from tests.serving.ray_nodes import RayNodes
from tests.serving.test_ray_pool import ask, serving

LONG = {"content": " ".join(f"word{number}" for number in range(600))}
"""Five seconds and more."""
GRACE_S = "20"
"""Ray's notice on SIGTERM; the manager leaves five seconds before its end."""
THOUGHT = " ".join(f"thought{number}" for number in range(300))
"""Seconds, of which a kill meets the middle."""
ROLLOUTS = 4
AMID = 16 * ROLLOUTS
"""Tokens after which a group is amid its first turns."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    nodes = RayNodes(tmp_path)
    try:
        yield Home(tmp_path, nodes)
    finally:
        nodes.stop()


async def busy(engines: EnginePool, calls: int = 4) -> "list[asyncio.Task[Any]]":
    """Calls that run on every engine."""
    asked = [ask(engines, f"s{number}") for number in range(calls)]
    async with asyncio.timeout(PATIENCE_S):
        while not all(pooled.running for pooled in engines.engines.values()):
            await asyncio.sleep(0.02)
    return asked


async def first(home: Home) -> ReplicaStatus:
    """The replica of the node that was there first."""
    return next(one for one in (await home.status()).replicas if one.generation == 1)


async def test_a_node_that_gets_sigterm_gives_its_sessions_up_before_it_ends(home: Home) -> None:
    """Ray makes a notice of it: calls go on elsewhere, and the engine leaves before its node."""
    leaving = home.nodes.add(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=GRACE_S)
    await home.up_scripted(1, [LONG])
    lost = await first(home)
    home.nodes.add()
    await home.up_scripted(2, [LONG])

    async with gateway(home) as engines:
        await serving(engines, 2)
        calls = await busy(engines)
        leaving.terminate()
        await asyncio.to_thread(leaving.wait)
        left = lost.engine not in engines.engines
        answers = await asyncio.gather(*calls)

        assert left, "its node ended while it was in the pool"
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        home.nodes.add()
        await home.until_generations([2, 3])


async def test_a_host_that_sends_sigterm_to_everything_costs_no_answer(home: Home) -> None:
    """A machine that shuts down ends Ray, actor, supervisor and server at once: no worse than a
    lost node, every call is answered whole."""
    leaving = home.nodes.add()
    home.nodes.add()
    await home.up_scripted(2, [LONG])

    async with gateway(home) as engines:
        await serving(engines, 2)
        calls = await busy(engines)
        await asyncio.to_thread(home.nodes.signal_all, leaving, signal.SIGTERM)
        answers = await asyncio.gather(*calls)

        assert len({tuple(answer.token_ids) for answer in answers}) == 1


def turn(command: str) -> dict[str, Any]:
    call = {"name": "bash", "arguments": {"command": command}}
    return {"content": THOUGHT, "tool_calls": [call]}


async def add_toy(store: LocalStore, tree: Path) -> None:
    tree.mkdir()
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    instance = Instance(
        instance_id="add",
        dataset="toys",
        problem_statement="add(2, 3) must be 5.",
        source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
        grading=Grading(
            protocol="eval_cmd", eval_cmd="python3 -c 'import calc; assert calc.add(2, 3) == 5'"
        ),
    )
    await instance_catalog.save(store, instance)


async def test_rollouts_outlive_a_killed_node(home: Home) -> None:
    """SIGKILL of a node while real rollouts sample on it: all resolve, each turn holds exactly the
    script's tokens, some from both engines, and a new node gets the replacement."""
    if missing := BubblewrapProvider(Settings(home=home.folder)).check():
        pytest.skip("; ".join(missing))
    store = LocalStore(home.settings.store_url)
    await add_toy(store, home.folder / "tree")
    fix = "sed -i 's/return a - b/return a + b/' calc.py"
    script = [*(turn(f"echo {n}") for n in range(5)), turn(fix), {"content": loop_agent.DONE}]
    nodes = [home.nodes.add(), home.nodes.add()]
    await home.up_scripted(2, script)
    words = ("run", "toys/add", "--run-id", "spot", "--samples", str(ROLLOUTS), "--wait")
    try:
        run = asyncio.create_task(
            home.perdure(*words, "--agent", loop_agent.NAME, PERDURE_ENGINE__KIND="vllm")
        )
        async with gateway(home) as watching:
            await serving(watching, 2)
            replicas = {one.engine: one for one in (await home.status()).replicas}
            places = {name: node_of(one, nodes) for name, one in replicas.items()}
            engine = await sampling(watching, run)
            home.nodes.kill(places[engine])
            home.nodes.add()
            await run
        survivor = 3 - replicas[engine].generation
        await home.until_generations([survivor, 3])
    finally:
        await home.perdure("down")

    episodes = await read_run(store, "spot")
    assert [one.grade.outcome for one in episodes if one.grade] == [Outcome.RESOLVED] * ROLLOUTS
    recorded = [
        turns_parquet.decode((await store.get(one.turns_key or "")).data) for one in episodes
    ]
    said = {tuple(tuple(each.completion_ids) for each in one) for one in recorded}
    assert len(said) == 1
    assert [len(one) for one in recorded] == [len(script)] * ROLLOUTS
    assert any(len(each.engines) > 1 for one in recorded for each in one)


async def sampling(watching: EnginePool, run: "asyncio.Task[str]") -> str:
    """The engine on which the run's own gateway is amid its turns: a group stays together."""
    begun: dict[str, float] = {}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for name, pooled in watching.engines.items():
                vitals, tokens = pooled.health.vitals, pooled.health.vitals.tokens or 0.0
                if vitals.running > 1 and tokens - begun.setdefault(name, tokens) >= AMID:
                    return name
            if run.done():
                await run
                pytest.fail("the run was over before it was met at work")
            await asyncio.sleep(0.02)


def node_of(
    replica: ReplicaStatus, nodes: "list[subprocess.Popen[bytes]]"
) -> "subprocess.Popen[bytes]":
    """The node below which its server runs."""
    server = json.loads(Path(replica.log).with_suffix(".note").read_text())["group"]
    return next(node for node in nodes if server in process_tree(node.pid))
