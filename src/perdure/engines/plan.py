"""What a person asks Ray for: the same engine, N times."""

from typing import Literal

from pydantic import Field

from perdure.engines.proxy import Guard
from perdure.types import Frozen


class EnginePlan(Frozen):
    """What `perdure engines up` asks for: the same engine, N times.

    Example:
        EnginePlan(model="Qwen/Qwen3-Coder-30B-A3B-Instruct", replicas=4, gpus_per_replica=2,
                   arguments=("--max-model-len", "65536"))
    """

    model: str
    """What the engine loads: a name of the Hugging Face hub or a folder."""
    served_model: str = "policy"
    """What requests call it; each boot also answers to `<served_model>-g<generation>`."""
    replicas: int = Field(1, ge=0, le=512)
    gpus_per_replica: int = Field(1, ge=0, le=64)
    cpus_per_replica: float = Field(1.0, ge=0)
    server: Literal["vllm", "sglang", "custom"] = "vllm"
    executable: str = ""
    """`vllm`, or the Python that has sglang, in the engine's own environment. Empty = on PATH."""
    command: tuple[str, ...] = ()
    """Of a custom server; `{model}`, `{served_model}`, `{host}`, `{port}`, `{generation}` and
    `{gpus}` are filled in. It must speak vLLM's token endpoint."""
    arguments: tuple[str, ...] = ()
    """Further words of the server's command line."""
    environment: dict[str, str] = Field(default_factory=dict)
    weight: float = Field(1.0, gt=0)
    """Share of new sessions of each replica, relative to other engines of the pool."""
    start_timeout_s: float = Field(1800.0, gt=0)
    """A start that has sampled no token after so long is killed."""
    listen: str = ""
    """Address the engines are reached at. Empty = loopback where the whole cluster is this host, else
    each node's own address."""
    guard: Guard | None = None
    """Of the front on that address: the server itself listens on its node's loopback. None = no
    front, and whoever reaches the address may do anything with the engine."""
    folder: str = "/tmp/perdure-engines"
    """Folder on each node for logs and for the notes of running engines."""


def boot_name(plan: EnginePlan, generation: int) -> str:
    """The fenced name: a request that carries it is refused by every other boot."""
    return f"{plan.served_model}-g{generation}"
