"""Explains in one line why an engine server ended, and decides whether to start it again.

It knows the final messages of vLLM 0.32 and SGLang 0.5; `engine_replica` reads the log.
"""

import re
from collections import defaultdict
from typing import NamedTuple

from perdure.serving.replica_plan import EnginePlan

PORT_TAKEN = "another process took the port"
TAIL_BYTES = 65_536


class ExitCause(NamedTuple):
    """Why a server ended. `final`: another start would end the same way."""

    text: str
    final: bool = False


CAUSES: tuple[tuple[str, str, bool], ...] = (
    (r"address already in use|\[Errno 98\]", PORT_TAKEN, False),
    (
        r"No available memory for the cache blocks",
        "the model does not fit: KV cache for 0 sequences; use more GPUs per replica, "
        "raise --gpu-memory-utilization, or take a smaller model",
        True,
    ),
    (
        r"max seq len \((?P<asked>\d+)\), \((?P<needed>[\d.]+ GiB) KV\s+cache is needed, which is "
        r"larger than the available KV cache\s+memory \((?P<room>[\d.]+ GiB)\)\. "
        r"(Based on the available memory, the estimated maximum model length is (?P<fits>\d+))?",
        "the model does not fit: KV cache for 0 sequences of --max-model-len {asked} ({needed} "
        "needed, {room} free); lower it{fits? to {fits}}, or use more GPUs per replica",
        True,
    ),
    (
        r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
        r"\(\w+=(?P<most>\d+)",
        "--max-model-len {asked} exceeds the model's maximum of {most} tokens",
        True,
    ),
    (
        r"less than requested memory for kv \((?P<asked>[\d.]+ GiB)\)",
        "the node has less than {asked} for the KV cache: lower VLLM_CPU_KVCACHE_SPACE",
        True,
    ),
    (
        r"Free memory on device .* is less than|less than desired CPU memory utilization",
        "another process uses part of the memory; end it, or lower --gpu-memory-utilization",
        False,
    ),
    (
        r"OutOfMemoryError|CUDA out of memory",
        "the model does not fit: out of GPU memory; use more GPUs per replica, or lower "
        "--max-num-seqs or --gpu-memory-utilization",
        True,
    ),
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the model does not fit: KV cache for 0 sequences; use more GPUs per replica, or raise "
        "--mem-fraction-static",
        True,
    ),
    (
        r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
        r"\((?P<parts>\d+)\)",
        "the model's {heads} attention heads cannot be split over {parts} GPUs: change "
        "--gpus-per-replica or --tensor-parallel-size",
        True,
    ),
    (
        r"World size \((?P<asked>\d+)\) is larger than the number of available GPUs "
        r"\((?P<there>\d+)\)",
        "{asked} GPUs are needed and the replica sees {there}: raise --gpus-per-replica, or lower the "
        "parallel sizes in --vllm-args",
        True,
    ),
    (
        r"Failed to infer device type|No CUDA GPUs are available|NVIDIA driver on your system",
        "the engine finds no GPU that it can use: check the node's driver and --gpus-per-replica",
        True,
    ),
    (
        r"GatedRepo|401 Client Error|Access to model .* is restricted",
        "the hub refuses {model}: pass --env HF_TOKEN=... of an account that may read it",
        True,
    ),
    (
        r"Cannot find any model weights with",
        "no weights in {model}: it needs *.safetensors next to its config.json",
        True,
    ),
    (
        r"Invalid repository ID or local directory|Can't load the configuration of|"
        r"RepositoryNotFoundError|is not a local folder and is not a valid model identifier|"
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|HFValidationError|"
        r"ensure the presence of a 'config.json'",
        "model not found: {model} is not a folder with a config.json on the node, and the hub has no "
        "such model or could not be reached",
        True,
    ),
    (
        r"Model architectures (?P<detail>\[[^\]]*\]) are not supported",
        "this version of the server does not know the model's architecture {detail}",
        True,
    ),
    (
        r"trust[-_]remote[-_]code(=True)?` (?:in LLM|flag)|requires you to execute the config",
        "the model contains its own code: if you trust it, add --trust-remote-code to --vllm-args",
        True,
    ),
    (
        r"error: unrecognized arguments: (?P<detail>.*)",
        "the server does not know the argument {detail}",
        True,
    ),
    (r"error: (?P<detail>argument .*)", "the server refuses {detail}", True),
    (r"perdure: cannot start (?P<detail>.*)", "cannot start {detail}", True),
    (
        r"No module named (?P<detail>\S+)",
        "the engine's environment lacks the module {detail}",
        True,
    ),
    (r"No space left on device", "the node's disk is full", False),
)
"""Pattern in the log, cause, and whether it is final. The first match counts. `{a? text}` is kept only
if the group `a` matched."""

ERROR_LINE = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR .*?\] )?(?:\w+\.)*\w*(?:Error|Exception): (.+)$", re.M
)
NO_CAUSE = "Engine core initialization failed"


def exit_cause(plan: EnginePlan, status: int, tail: str) -> ExitCause:
    """Why a server ended, from its exit status and the end of its log."""
    for pattern, text, final in CAUSES:
        if found := re.search(pattern, tail, re.IGNORECASE):
            said = {name: (value or "").strip() for name, value in found.groupdict().items()}
            return ExitCause(_filled(text, {**said, "model": plan.model}), final)
    if status == 128 + 9:
        return ExitCause("the server was killed (signal 9): probably the node ran out of memory")
    ended = f"signal {status - 128}" if status > 128 else f"status {status}"
    return ExitCause(f"the server ended with {ended}{_last_cause(tail)}")


def _filled(text: str, facts: dict[str, str]) -> str:
    chosen = re.sub(
        r"\{(\w+)\?(.*?\{\1\}.*?)\}", lambda part: part[2] if facts[part[1]] else "", text
    )
    return chosen.format_map(defaultdict(str, facts))


def _last_cause(tail: str) -> str:
    """The last informative error: after it, servers log only warnings and follow-up errors."""
    causes = [said for said in ERROR_LINE.findall(tail) if NO_CAUSE not in said]
    if causes:
        return f": {causes[-1].strip()[:200]}"
    lines = [line for line in tail.splitlines() if line.strip()]
    return f"; its last line: {lines[-1].strip()[:200]}" if lines else ""
