"""The plan of `perdure engines up`, the same engine N times, and where a home keeps it."""

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


async def read_plan(store: Store, roster_key: str) -> EnginePlan | None:
    try:
        return EnginePlan.model_validate_json((await store.get(_key(roster_key))).data)
    except NotFound:
        return None


async def write_plan(store: Store, roster_key: str, plan: EnginePlan) -> None:
    await store.put(_key(roster_key), plan.model_dump_json(indent=1).encode())


def _key(roster_key: str) -> str:
    return f"{roster_key.removesuffix('.json')}.plan.json"
