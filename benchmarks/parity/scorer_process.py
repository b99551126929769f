"""Sends recorded turns to transformers, in its own environment, and reads the scores.

REQUEST to `transformers_scorer.py`: `turns` (prompt, completion, sampling) and `batches` (prompts, tokens).
ANSWER: `turns`, in the same order, as `Scored`; `generate_s`, seconds of each batch; what ran.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parity.parity_conversations import Job, Played
from benchmarks.vllm_server import Device
from perdure.types import Turn

SCORER = Path(__file__).with_name("transformers_scorer.py")


@dataclass(frozen=True)
class Scored:
    """A forward pass over one turn. Shapes: all [C]."""

    logprobs: list[float]
    """Logprobs of the recorded ids under the distribution after the turn's sampling parameters."""
    likeliest: list[int]
    behind: list[float]
    """Difference between the recorded id's logit and the highest one."""


@dataclass(frozen=True)
class Transformers:
    """The answer of one start of transformers, in one dtype."""

    dtype: str
    device: str
    version: str
    turns: dict[str, list[Scored]]
    """Scores by mode, in the order of `Played.recorded`."""
    generated_per_s: float
    """Tokens per second of its own greedy `generate`, per batch."""


async def score(
    played: Sequence[Played], job: Job, *, python: Path, model: Path, dtype: str, device: Device
) -> Transformers:
    """Raises: RuntimeError with the end of its log if transformers fails."""
    batches = _batches(played[0], job)
    asked = {"turns": [_turn(turn) for one in played for turn in one.recorded], "batches": batches}
    said = await _run([str(python), str(SCORER), str(model), dtype, device], asked)
    scored = iter([Scored(**one) for one in said["turns"]])
    tokens = sum(batch["tokens"] * len(batch["prompts"]) for batch in batches)
    return Transformers(
        dtype=dtype,
        device=said["device"],
        version=said["transformers"],
        turns={p.mode: [next(scored) for _ in p.recorded] for p in played},
        generated_per_s=tokens / sum(said["generate_s"]),
    )


def _turn(turn: Turn) -> dict[str, Any]:
    said = turn.sampling.model_dump() if turn.sampling is not None else {}
    return {
        "prompt": list(turn.prompt_ids),
        "completion": list(turn.completion_ids),
        # An engine reports a greedy token's logprob at temperature 1.
        "sampling": {**said, "temperature": said.get("temperature") or 1.0},
    }


def _batches(played: Played, job: Job) -> list[dict[str, Any]]:
    """The first turns of all conversations, then all second turns, and so on."""
    found = zip(*played.conversations, strict=False)
    return [
        {"prompts": [list(turn.prompt_ids) for turn in together], "tokens": job.tokens}
        for together in found
    ]


async def _run(argv: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    answer, log = await child.communicate(json.dumps(asked).encode())
    if child.returncode != 0:
        raise RuntimeError(f"transformers failed: {log.decode(errors='replace')[-2000:]}")
    said: dict[str, Any] = json.loads(answer)
    return said
