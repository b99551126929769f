"""Real Ray nodes on this host, each a raylet that can be killed; engines are scripted ones."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.serving.ray_cluster import set_environment

set_environment()  # before Ray is imported
os.environ["RAY_health_check_period_ms"] = "500"  # noqa: SIM112 (Ray wants it so); a lost node is known after seconds
os.environ["RAY_health_check_failure_threshold"] = "4"  # noqa: SIM112

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from perdure.engines.engine_roster import Roster, StoredRoster  # noqa: E402
from perdure.serving import replica_manager  # noqa: E402
from perdure.serving.engine_commands import NAMESPACE  # noqa: E402
from perdure.serving.replica_plan import EnginePlan, ReplicaPool  # noqa: E402
from perdure.serving.replica_status import PoolStatus, ReplicaStatus  # noqa: E402
from perdure.settings.settings_tree import Settings  # noqa: E402
from perdure.storage.local_store import LocalStore  # noqa: E402

KEY = "engines/0123456789abcdef.json"
POOL = ReplicaPool(KEY, "policy")
PATIENCE_S = 90.0
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20}


@dataclass
class Pool:
    """A cluster of nodes with one logical GPU each, and the manager of a home on its head."""

    cluster: Cluster
    settings: Settings
    actor: Any = None

    @property
    def roster(self) -> StoredRoster:
        return StoredRoster(LocalStore(self.settings.store_url), KEY)

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, num_gpus=1, **SMALL)

    async def apply(self, **wishes: Any) -> None:
        self.actor = replica_manager.get_or_start(self.settings, POOL, "")
        await self.actor.apply.remote(self.plan(**wishes).model_dump_json())

    def plan(self, **wishes: Any) -> EnginePlan:
        scripts = self.settings.home / "scripts.json"
        if not scripts.exists():
            long = {"default": {"turns": [{"content": " ".join(f"word{n}" for n in range(120))}]}}
            scripts.write_text(json.dumps(long))
        engine = (sys.executable, "-m", "perdure.testing.scripted_engine")
        options = ("--host", "{host}", "--port", "{port}", "--generation", "{generation}")
        slow = ("--scripts", str(scripts), "--chunk-delay", "0.05")
        defaults: dict[str, Any] = {
            "model": "scripted",
            "server": "custom",
            "command": (*engine, *options, *slow),
            "cpus_per_replica": 0.1,
            "listen": "127.0.0.1",
            "folder": str(self.settings.home / "engines"),
        }
        return EnginePlan(**{**defaults, **wishes})

    async def status(self) -> PoolStatus:
        return PoolStatus.model_validate_json(await self.actor.status.remote())

    async def until(self, holds: Callable[[PoolStatus], Any]) -> PoolStatus:
        """The first status for which it holds."""
        status = PoolStatus()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(ray.exceptions.RayError):  # it was killed just now
                        status = await self.status()
                    if holds(status):
                        return status
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"it never came to that; the pool is {status.model_dump_json(indent=1)}")

    async def joined(self, count: int) -> tuple[ReplicaStatus, ...]:
        status = await self.until(lambda now: len([r for r in now.replicas if r.engine]) == count)
        return status.replicas

    async def read(self) -> Roster:
        return await self.roster.read()

    async def actor_pid(self, replica: ReplicaStatus) -> int:
        name = f"engine-{POOL.name}-{replica.index}-g{replica.generation}"
        pid: int = await ray.get_actor(name, namespace=NAMESPACE).pid.remote()
        return pid


def engine_pid(pool: Pool, replica: ReplicaStatus) -> int:
    """The server's own process, which leads its group."""
    name = f"engine-{POOL.name}-{replica.index}-g{replica.generation}.note"
    pid: int = json.loads((pool.settings.home / "engines" / name).read_text())["group"]
    return pid


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, **SMALL},
    )
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
    held = Pool(cluster, Settings(home=tmp_path))
    try:
        yield held
        if held.actor is not None:
            ray.get(held.actor.stop.remote(), timeout=60)
    finally:
        ray.shutdown()
        cluster.shutdown()
