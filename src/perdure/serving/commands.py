"""The command lines of engine servers, and what a person asks for.

Owns flags only; `replica` runs what is built here, `verdicts` reads what it says.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from perdure.serving.front import Guard
from perdure.types import Frozen

VLLM_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
    "VLLM_NO_USAGE_STATS": "1",
}
NAMESPACE = "perdure"
"""Of our actors on Ray."""


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


def command_line(plan: EnginePlan, generation: int, host: str, port: int) -> list[str]:
    """The server's words for one boot."""
    if plan.server == "vllm":
        return [*_vllm(plan, generation, host, port), *plan.arguments]
    if plan.server == "sglang":
        return [*_sglang(plan, generation, host, port), *plan.arguments]
    facts = {
        "{model}": plan.model,
        "{served_model}": plan.served_model,
        "{host}": host,
        "{port}": str(port),
        "{generation}": str(generation),
        "{gpus}": str(plan.gpus_per_replica),
    }
    filled = re.compile("|".join(map(re.escape, facts)))
    words = [filled.sub(lambda found: facts[found[0]], word) for word in plan.command]
    return [*words, *plan.arguments]


def _vllm(plan: EnginePlan, generation: int, host: str, port: int) -> list[str]:
    parallel = plan.gpus_per_replica
    return [
        *(plan.executable or "vllm", "serve", plan.model),
        *("--served-model-name", boot_name(plan, generation), plan.served_model),
        *("--host", host, "--port", str(port)),
        "--enable-scale-out",  # /inference/v1/generate answers 403 without it
        *("--generation-config", "vllm"),  # else the model's file fills fields nobody asked for
        *("--logprobs-mode", "processed_logprobs"),  # after temperature, as sampled
        "--enable-prompt-tokens-details",
        *(("--tensor-parallel-size", str(parallel)) if parallel > 1 else ()),
    ]


def _sglang(plan: EnginePlan, generation: int, host: str, port: int) -> list[str]:
    return [
        *(plan.executable or "python", "-m", "sglang.launch_server", "--model-path", plan.model),
        *("--served-model-name", boot_name(plan, generation)),  # it takes one name only
        *("--tp-size", str(plan.gpus_per_replica or 1), "--host", host, "--port", str(port)),
        "--incremental-streaming-output",  # else each chunk repeats all tokens before it
        "--enable-metrics",  # its KV room, and what runs on it
    ]


def boot_name(plan: EnginePlan, generation: int) -> str:
    """The fenced name: a request that carries it is refused by every other boot."""
    return f"{plan.served_model}-g{generation}"


def environment(plan: EnginePlan) -> dict[str, str]:
    """What the server's process gets besides its node's own environment."""
    base = VLLM_ENVIRONMENT if plan.server == "vllm" else {}
    return {**base, **plan.environment}


def words(text: str) -> tuple[str, ...]:
    """A shell-like string as words."""
    return tuple(shlex.split(text))
