"""How long one step of an engine takes. Owns the law and its fit; `fit` does the measuring."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

FITTED = Path(__file__).parent / "vllm_cpu.json"
"""The output of `python -m benchmarks.saturation.fit`, with its date, host and command."""


class Decode(NamedTuple):
    """`step_s`: one step in which `batch` sequences of `context` tokens each get a token, on average."""

    batch: float
    context: int
    step_s: float


class Prefill(NamedTuple):
    """`seconds`: from a request to its first token, with nothing else on the engine."""

    length: int
    seconds: float


@dataclass(frozen=True)
class Law:
    """Seconds of one step: a sum over the work in it.

    Example:
        Law(0.01, 0.004, 1e-7, 4e-5, 1e-9).step(sequences=8, context=32_000)    # 0.0452
    """

    per_step: float
    per_sequence: float
    """Seconds per decoding sequence: its sampling and its share of the matrices."""
    per_context: float
    """Seconds per token of KV that a decoding sequence reads."""
    per_prompt: float
    """Seconds per prefilled token."""
    per_pair: float
    """Seconds per pair of a prefilled token and an earlier one, for attention."""

    def step(
        self, *, sequences: int = 0, context: int = 0, prompt: int = 0, pairs: float = 0.0
    ) -> float:
        parts = (
            self.per_step,
            self.per_sequence * sequences,
            self.per_context * context,
            self.per_prompt * prompt,
            self.per_pair * pairs,
        )
        return sum(parts)

    def faster(self, times: float) -> "Law":
        return Law(*(value / times for value in vars(self).values()))


def fitted(decodes: Sequence[Decode], prefills: Sequence[Prefill]) -> Law:
    """Least squares of relative errors, with no coefficient below 0."""
    steps = [(1.0, d.batch, d.batch * d.context) for d in decodes]
    per_step, per_sequence, per_context = _solved(steps, [d.step_s for d in decodes])
    alone = per_step + per_sequence
    lengths = [(p.length, p.length**2 / 2) for p in prefills]
    seconds = [max(p.seconds - alone, 1e-6) for p in prefills]
    return Law(per_step, per_sequence, per_context, *_solved(lengths, seconds))


def _solved(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Leave out columns whose coefficient would be negative, the most negative first."""
    matrix = np.array(rows) / np.array(values)[:, None]
    kept = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept], np.ones(len(values)), rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    solution = [0.0] * matrix.shape[1]
    for column, value in zip(kept, found, strict=True):
        solution[column] = float(value)
    return solution


def read() -> Law:
    return Law(**json.loads(FITTED.read_text())["law"])
