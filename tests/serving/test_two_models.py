"""Two models on one Ray cluster, each with its own replicas: run by `make test-serving` (slow)."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from perdure.engines.engine_state import EngineRecord
from perdure.serving.engine_commands import NAMESPACE
from perdure.serving.replica_manager import manager_name
from perdure.serving.replica_plan import ReplicaPool
from tests.serving.home import PATIENCE_S, TURN, Home
from tests.serving.ray_nodes import RayNodes

JUDGE = ("--served-model", "judge", "--tokenizer", "qwen3")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    nodes = RayNodes(tmp_path)
    try:
        yield Home(tmp_path, nodes)
    finally:
        ray.shutdown()
        nodes.stop()


async def engines_of(home: Home) -> dict[str, list[EngineRecord]]:
    """The engines in the roster, by the model that they serve."""
    found: dict[str, list[EngineRecord]] = {}
    for record in (await home.roster.read()).engines:
        if not record.removed:
            found.setdefault(record.model, []).append(record)
    return found


async def listed(home: Home) -> dict[str, list[dict[str, Any]]]:
    pools = json.loads(await home.perdure("engines", "list", "--json"))["replicas"]
    return {pool["served_model"]: pool["replicas"] for pool in pools}


async def test_a_judge_runs_on_ray_next_to_the_policy(home: Home) -> None:
    """Each model keeps its replicas when the other's number changes and its manager is killed, and
    `engines down` ends both."""
    for _ in range(3):  # a replica takes a node's only GPU
        home.nodes.add()
    await home.up_scripted(1)
    await home.up_scripted(1, (TURN,), *JUDGE)
    before = await engines_of(home)
    assert {model: len(engines) for model, engines in before.items()} == {"policy": 1, "judge": 1}
    assert (await home.roster.read()).formats["judge"].tokenizer == "qwen3"

    ray.init(home.nodes.address, namespace=NAMESPACE, log_to_driver=False)
    judges = ReplicaPool(home.pool.roster_key, "judge")
    killed = ray.get_actor(manager_name(judges))
    ray.kill(killed, no_restart=False)
    await home.up_scripted(2)
    async with asyncio.timeout(PATIENCE_S):
        while len((await engines_of(home))["policy"]) != 2:
            await asyncio.sleep(0.2)

    assert (await engines_of(home))["judge"] == before["judge"]
    assert {model: len(replicas) for model, replicas in (await listed(home)).items()} == {
        "policy": 2,
        "judge": 1,
    }
    logs = ("engines", "logs", "--ray-address", home.nodes.address, "--served-model")
    assert "http://127.0.0.1:" in await home.perdure(*logs, "judge")  # the server, behind its proxy

    ray.shutdown()
    await home.perdure("engines", "down", "--ray-address", home.nodes.address)
    assert await engines_of(home) == {}
