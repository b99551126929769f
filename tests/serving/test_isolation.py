"""A stranger on the network of a Ray cluster can do nothing with an engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from perdure.engines.auth_proxy import engine_keys
from perdure.serving.replica_plan import EnginePlan, read_plan
from perdure.storage.local_store import LocalStore
from tests.serving.home import Home
from tests.serving.ray_nodes import RayNodes


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    nodes = RayNodes(tmp_path)
    try:
        yield Home(tmp_path, nodes)
    finally:
        nodes.stop()


async def test_an_engine_of_a_given_cluster_asks_for_keys(home: Home) -> None:
    """On the node's address a proxy answers strangers with 401 and a gateway's control call with
    403; the server itself listens on loopback; the store holds no key."""
    home.nodes.add()
    await home.up_scripted(1)
    (replica,) = (await home.status()).replicas
    url, keys = f"http://{replica.engine}", engine_keys(home.secret)

    async with httpx.AsyncClient(trust_env=False) as client:
        allowed = {
            (key, route): (
                await client.post(
                    f"{url}{route}", headers={"authorization": f"Bearer {key or 'none'}"}, json={}
                )
            ).status_code
            for key in ("", keys.data, keys.control)
            for route in ("/pause?mode=abort", "/inference/v1/generate")
        }

    assert [code for (key, _), code in allowed.items() if not key] == [401, 401]
    assert allowed[keys.data, "/pause?mode=abort"] == 403
    assert allowed[keys.data, "/inference/v1/generate"] == 400  # the engine's own word
    assert allowed[keys.control, "/pause?mode=abort"] == 200
    store = LocalStore(home.settings.store_url)
    plan = await read_plan(store, home.pool)
    assert plan is not None
    assert listens_on(plan, replica.log) == "127.0.0.1"
    assert not any(key in plan.model_dump_json() for key in keys)


def listens_on(plan: EnginePlan, log: str) -> str:
    """The address in the server's own command line."""
    note = json.loads(Path(log).with_suffix(".note").read_text())
    words = Path(f"/proc/{note['group']}/cmdline").read_text().split("\0")
    assert words[0] == plan.command[0]
    return words[words.index("--host") + 1]
