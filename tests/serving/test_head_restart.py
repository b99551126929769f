"""The head of a Ray cluster dies and comes back: engines serve on, with and without its tables."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.home import PATIENCE_S, Home, gateway
from tests.serving.ray_nodes import RayNodes
from tests.serving.test_ray_pool import ask, serving


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Home]:
    """A cluster whose head keeps its tables in memory."""
    nodes = RayNodes(tmp_path)
    try:
        yield Home(tmp_path, nodes)
    finally:
        nodes.stop()


@pytest.fixture
def persistent(tmp_path: Path) -> Iterator[Home]:
    """A cluster whose head keeps its tables as docs/ray.md says."""
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    nodes = RayNodes(tmp_path, **storage)
    try:
        yield Home(tmp_path, nodes)
    finally:
        nodes.stop()


async def test_a_head_that_keeps_its_tables_loses_no_engine(persistent: Home) -> None:
    """SIGKILL of the head and all it runs, the manager too: calls in flight and new ones are served,
    the same generations serve after its return, and the manager replaces what is removed then."""
    home = persistent
    home.nodes.add()
    home.nodes.add()
    await home.up_scripted(2)
    before = await home.status()

    async with gateway(home) as engines:
        await serving(engines, 2)
        calls = [ask(engines, f"s{number}") for number in range(4)]
        while not all(pooled.running for pooled in engines.engines.values()):
            await asyncio.sleep(0.02)
        home.nodes.kill(home.nodes.head)
        answers = await asyncio.gather(*calls, ask(engines, "begun without a head"))
        assert len({tuple(answer.token_ids) for answer in answers}) == 1

        home.nodes.start_head()
        async with asyncio.timeout(PATIENCE_S):
            while (await home.status()).at == before.at:  # the next manager has found them
                await asyncio.sleep(0.2)
        await home.until_generations([1, 2])
        assert all(pooled.record.generation in (1, 2) for pooled in engines.engines.values())

        await home.perdure("engines", "remove", before.replicas[0].engine)
        await home.until_generations([2, 3])


async def test_a_head_without_its_tables_starts_the_plan_again(forgetful: Home) -> None:
    """Nodes that a new head does not know end with their engines; `up` without a model brings the
    stored plan back, and no generation is given twice."""
    home = forgetful
    home.nodes.add()
    await home.up_scripted(1)

    async with gateway(home) as engines:
        await serving(engines, 1)
        home.nodes.kill(home.nodes.head)
        home.nodes.start_head()
        await serving(engines, 0)

        home.nodes.add()
        await home.up()
        await home.until_generations([2])
        await serving(engines, 1)
