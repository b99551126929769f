"""A home whose engines run on a given Ray cluster, used as a person does: by the command line."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.engines.auth_proxy import engine_keys
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_roster import StoredRoster, roster_key
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.home_folder import load_secret
from perdure.serving.replica_plan import ReplicaPool
from perdure.serving.replica_status import PoolStatus, read_status
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from tests.serving.ray_nodes import RayNodes

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
PATIENCE_S = 300.0
TURN = {"content": " ".join(f"word{number}" for number in range(120))}


@dataclass
class Home:
    """What a user has: a folder, a cluster's address and the command line."""

    folder: Path
    nodes: RayNodes

    @property
    def settings(self) -> Settings:
        return Settings(home=self.folder)

    @property
    def secret(self) -> bytes:
        return load_secret(self.settings)

    @property
    def roster(self) -> StoredRoster:
        return StoredRoster(LocalStore(self.settings.store_url), roster_key(self.secret))

    async def status(self) -> PoolStatus:
        return await read_status(LocalStore(self.settings.store_url), self.pool)

    @property
    def pool(self) -> ReplicaPool:
        return ReplicaPool(roster_key(self.secret), "policy")

    async def generations(self) -> list[int]:
        """Generations of the replicas that serve."""
        return sorted(one.generation for one in (await self.status()).replicas if one.engine)

    async def until_generations(self, wanted: list[int]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while await self.generations() != wanted:
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pytest.fail(f"never {wanted}: {(await self.status()).model_dump_json(indent=1)}")

    async def perdure(self, *words: str, **variables: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        own = {"PERDURE_HOME": str(self.folder), "RAY_AUTH_MODE": "disabled", **variables}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perdure.cli.main", *words),
            cwd=ROOT,
            env={**kept, **own},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await child.communicate()
        assert child.returncode == 0, said.decode()
        return said.decode()

    async def up(self, *words: str) -> str:
        return await self.perdure("engines", "up", "--ray-address", self.nodes.address, *words)

    async def up_scripted(
        self, replicas: int, turns: Sequence[dict[str, Any]] = (TURN,), *more: str
    ) -> str:
        scripts = self.folder / "scripts.json"
        scripts.write_text(json.dumps({"default": {"turns": list(turns)}}))
        engine = f"{sys.executable} -m perdure.testing.scripted_engine --scripts {scripts}"
        engine += " --host {host} --port {port} --generation {generation} --chunk-delay 0.05"
        words = ["--model", "scripted", "--replicas", str(replicas), "--cpus-per-replica", "0.1"]
        return await self.up(*words, "--engine-command", engine, *more)


@asynccontextmanager
async def gateway(home: Home) -> AsyncIterator[EnginePool]:
    async with new_client() as client:
        key = engine_keys(home.secret).data
        engines = EnginePool(
            home.roster, client, options=PoolOptions(poll_s=0.1, hang_s=10.0, home_key=key)
        )
        await engines.start()
        try:
            yield engines
        finally:
            await engines.aclose()
