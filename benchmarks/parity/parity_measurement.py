"""One measurement: conversations through the gateway, the same calls at the engine, and their scores.

This module orders the steps; `__main__` prints the report.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import vllm_server
from benchmarks.parity.parity_conversations import TIMED, Job, Played, gateway, straight
from benchmarks.parity.parity_figures import Figures, figures
from benchmarks.parity.scorer_process import Transformers, score
from benchmarks.vllm_server import Device

EXACT = "float32"


@dataclass(frozen=True)
class Stand:
    """The sampling engine and the scoring environment."""

    model: Path
    tokenizer: str
    """The value of PERDURE_ENGINE__TOKENIZER."""
    dtype: str
    device: Device
    vllm: Path
    python: Path
    modes: tuple[str, ...] = TIMED
    engine_url: str = ""
    """URL of a running vLLM. Empty = start one, and end it before transformers starts."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one mode, with all conversations at once."""

    mode: str
    tokens: int
    gateway: float
    straight: float


@dataclass(frozen=True)
class Report:
    figures: list[Figures]
    speeds: list[Speed]
    transformers: list[Transformers]


async def measure(stand: Stand, job: Job, folder: Path) -> Report:
    async with _engine(stand, folder) as url, gateway(folder, url, stand.tokenizer) as served:
        await served.warm_up(job)
        played, speeds = [], []
        for mode in stand.modes:
            one = await served.play(mode, job)
            played.append(one)
            if mode in TIMED:
                alone = await straight(url, one)
                speeds.append(Speed(mode, one.tokens, one.tokens / one.seconds, one.tokens / alone))
    said = [
        await _scored(stand, job, played, dtype) for dtype in dict.fromkeys((stand.dtype, EXACT))
    ]
    return Report([found for one in said for found in _figures(played, one)], speeds, said)


@contextlib.asynccontextmanager
async def _engine(stand: Stand, folder: Path) -> AsyncIterator[str]:
    if stand.engine_url:
        yield stand.engine_url
        return
    async with vllm_server.serving(
        folder / "vllm.log",
        *("--dtype", stand.dtype),
        model=stand.model,
        program=stand.vllm,
        device=stand.device,
    ) as url:
        yield url


async def _scored(stand: Stand, job: Job, played: Sequence[Played], dtype: str) -> Transformers:
    return await score(
        played, job, python=stand.python, model=stand.model, dtype=dtype, device=stand.device
    )


def _figures(played: Sequence[Played], said: Transformers) -> list[Figures]:
    return [figures(p.mode, said.dtype, p.recorded, said.turns[p.mode]) for p in played]
