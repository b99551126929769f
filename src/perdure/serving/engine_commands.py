"""Builds the command lines of engine servers.

It knows only flags: `engine_replica` runs the command lines, and `engine_exit_causes` reads their logs.
"""

import re
import shlex
from collections.abc import Mapping

from perdure.serving.replica_plan import EnginePlan, fenced_name

VLLM_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates
    "VLLM_NO_USAGE_STATS": "1",
}
NAMESPACE = "perdure"
"""The Ray namespace of our actors."""


def command_line(plan: EnginePlan, generation: int, host: str, port: int) -> list[str]:
    """The server's command line for one start."""
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
        *("--served-model-name", fenced_name(plan, generation), plan.served_model),
        *("--host", host, "--port", str(port)),
        "--enable-scale-out",  # without it /inference/v1/generate answers 403
        *("--generation-config", "vllm"),  # otherwise the model's own file sets sampling defaults
        *("--logprobs-mode", "processed_logprobs"),  # after temperature, as sampled
        "--enable-prompt-tokens-details",
        *(("--tensor-parallel-size", str(parallel)) if parallel > 1 else ()),
    ]


def _sglang(plan: EnginePlan, generation: int, host: str, port: int) -> list[str]:
    return [
        *(plan.executable or "python", "-m", "sglang.launch_server", "--model-path", plan.model),
        *("--served-model-name", fenced_name(plan, generation)),  # it accepts one name only
        *("--tp-size", str(plan.gpus_per_replica or 1), "--host", host, "--port", str(port)),
        "--incremental-streaming-output",  # otherwise each chunk repeats all earlier tokens
        "--enable-metrics",  # the size of its KV cache, and its running requests
    ]


def environment(plan: EnginePlan) -> dict[str, str]:
    """The variables that the server's process gets in addition to its node's environment."""
    base = VLLM_ENVIRONMENT if plan.server == "vllm" else {}
    return {**base, **plan.environment}


def words(text: str) -> tuple[str, ...]:
    """Split a string into words as a shell does."""
    return tuple(shlex.split(text))
