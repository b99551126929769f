"""The command lines of engine servers.

Owns flags only; `replica` runs what is built here, `verdicts` reads what it says.
"""

import re
import shlex
from collections.abc import Mapping

from perdure.engines.plan import EnginePlan, boot_name

VLLM_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
    "VLLM_NO_USAGE_STATS": "1",
}
NAMESPACE = "perdure"
"""Of our actors on Ray."""


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


def environment(plan: EnginePlan) -> dict[str, str]:
    """What the server's process gets besides its node's own environment."""
    base = VLLM_ENVIRONMENT if plan.server == "vllm" else {}
    return {**base, **plan.environment}


def words(text: str) -> tuple[str, ...]:
    """A shell-like string as words."""
    return tuple(shlex.split(text))
