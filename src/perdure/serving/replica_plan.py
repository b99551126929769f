"""The plans of `perdure engines up`, the same engine N times for a model, and where a home keeps them."""

import hashlib
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from perdure.engines.auth_proxy import KeyHashes
from perdure.errors import NotFound
from perdure.storage.base import Store
from perdure.types import Frozen


class EnginePlan(Frozen):
    """The plan of `perdure engines up`: the same engine, N times.

    Example:
        EnginePlan(model="Qwen/Qwen3-Coder-30B-A3B-Instruct", replicas=4, gpus_per_replica=2,
                   arguments=("--max-model-len", "65536"))
    """

    model: str
    """The model that the engine loads: a name on the Hugging Face hub or a folder."""
    served_model: str = "policy"
    """The model name in requests. Each start also serves `<served_model>-g<generation>`."""
    replicas: int = Field(1, ge=0, le=512)
    gpus_per_replica: int = Field(1, ge=0, le=64)
    cpus_per_replica: float = Field(1.0, ge=0)
    server: Literal["vllm", "sglang", "custom"] = "vllm"
    executable: str = ""
    """`vllm`, or a Python with sglang, in the engine's own environment. Empty = on PATH."""
    command: tuple[str, ...] = ()
    """Command line of a custom server, which must offer vLLM's token endpoint. `{model}`,
    `{served_model}`, `{host}`, `{port}`, `{generation}` and `{gpus}` are filled in."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of the server's command line."""
    environment: dict[str, str] = Field(default_factory=dict)
    weight: float = Field(1.0, gt=0)
    """Each replica's share of new sessions, relative to other engines of the pool."""
    start_timeout_s: float = Field(1800.0, gt=0)
    """Seconds that a start may take to sample its first token; a slower one is killed."""
    listen: str = ""
    """The address of the engines. Empty = loopback if the whole cluster is this host, otherwise each
    node's own address."""
    proxy_keys: KeyHashes | None = None
    """Keys that the proxy on `listen` requires; the server then listens on its node's loopback.
    None = no proxy, and every client that reaches the address has full control of the engine."""
    folder: str = "/tmp/perdure-engines"
    """The folder on each node for logs and for the notes of running engines."""


def fenced_name(plan: EnginePlan, generation: int) -> str:
    """A model name that only this start of the engine serves. Every other start refuses it."""
    return f"{plan.served_model}-g{generation}"


@dataclass(frozen=True)
class ReplicaPool:
    """The replicas of one model in a home. They have one plan, one status and one manager."""

    roster_key: str
    served_model: str

    @property
    def name(self) -> str:
        """Part of the names of its actors. A model's name may have characters that Ray refuses."""
        return self._prefix.rsplit("/", 1)[-1]

    @property
    def plan_key(self) -> str:
        return f"{self._prefix}.plan.json"

    @property
    def status_key(self) -> str:
        return f"{self._prefix}.replicas.json"

    @property
    def _prefix(self) -> str:
        digest = hashlib.sha256(self.served_model.encode()).hexdigest()[:12]
        return f"{_home(self.roster_key)}-{digest}"


async def find_pools(store: Store, roster_key: str) -> list[ReplicaPool]:
    """All pools of the home that have a plan, also those that run no replica now."""
    names = [key async for key in store.list(f"{_home(roster_key)}-") if key.endswith(".plan.json")]
    plans = [EnginePlan.model_validate_json((await store.get(key)).data) for key in names]
    return [ReplicaPool(roster_key, plan.served_model) for plan in plans]


async def read_plan(store: Store, pool: ReplicaPool) -> EnginePlan | None:
    try:
        return EnginePlan.model_validate_json((await store.get(pool.plan_key)).data)
    except NotFound:
        return None


async def write_plan(store: Store, pool: ReplicaPool, plan: EnginePlan) -> None:
    await store.put(pool.plan_key, plan.model_dump_json(indent=1).encode())


def _home(roster_key: str) -> str:
    return roster_key.removesuffix(".json")
