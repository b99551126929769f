"""`python -m benchmarks.trainer`: CPU of a trainer's process for each episode that it reads and converts.

Episodes of several sizes lie in a local store. "read" is `read_episodes`: references to segments. Then each
trainer's rows are made of them. The baseline, "x columns", is pyarrow alone, which reads the same arrays
of the same files without a check or a row. Waits for rollouts take no CPU and are not counted.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from perdure.client.episodes import read_episodes
from perdure.episodes import trainers
from perdure.episodes.episode import EpisodeParts, EpisodeSegments, build_episode
from perdure.episodes.episode_parquet import encode_segments
from perdure.episodes.episode_store import write_episode
from perdure.episodes.segments import cut
from perdure.storage.local import LocalStore
from perdure.types import (
    EpisodeRef,
    Grade,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
    VersionSpan,
)

SIZES = {
    "12 turns, 8k tokens": (12, 650),
    "40 turns, 32k": (40, 800),
    "100 turns, 128k": (100, 1280),
}
"""Turns, and tokens that each adds: a quarter of them is sampled."""
COLUMNS = ["prompt_ids", "response_ids", "loss_mask", "logprobs", "versions"]
ROUNDS = 5
Convert = Callable[[EpisodeSegments], Any]
CONVERSIONS: dict[str, Convert] = {
    "slime": lambda found: trainers.slime_samples(found, index=0, group_index=0),
    "SkyRL": lambda found: trainers.skyrl_output([found]),
    "TorchTitan": lambda found: trainers.torchtitan_samples(found, group_id=0, advantage=1.0),
    "verl": trainers.verl_outputs,
    "TRL": lambda found: trainers.trl_output([found]),
}


def turns(count: int, added: int, rng: random.Random) -> tuple[Turn, ...]:
    sampled = added // 4
    held: list[int] = []
    found = []
    for index in range(count):
        held += [rng.randrange(150_000) for _ in range(added - sampled)]
        completion = tuple(rng.randrange(150_000) for _ in range(sampled))
        found.append(
            Turn(
                index=index,
                prompt_ids=tuple(held),
                completion_ids=completion,
                logprobs=tuple(-rng.random() for _ in completion),
                versions=(VersionSpan(version=3, start=0, end=sampled),),
            )
        )
        held += completion
    return tuple(found)


async def episode(store: LocalStore, size: str, index: int) -> EpisodeRef:
    taken = turns(*SIZES[size], random.Random(index))
    parts = EpisodeParts(
        request=RolloutRequest(run_id="r", instance="d/i", sample_index=index),
        status=RolloutStatus.GRADED,
        failure=None,
        grade=Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0)),
        started_at=0.0,
        finished_at=1.0,
        turns=taken,
    )
    segments = cut(taken)
    episode = build_episode(parts, segments)
    stored = await write_episode(store, episode, encode_segments(episode, segments))
    return stored.ref(store.url)


def cpu_ms(work: Callable[[], Any], episodes: int) -> float:
    """Median over rounds of CPU milliseconds an episode."""
    rounds = []
    for _ in range(ROUNDS):
        gc.collect()
        began = time.process_time()
        work()
        rounds.append((time.process_time() - began) * 1000 / episodes)
    return statistics.median(rounds)


async def measured(size: str, episodes: int, folder: Path) -> dict[str, Any]:
    store = LocalStore(folder)
    refs = [await episode(store, size, index) for index in range(episodes)]
    found = await read_episodes(refs, store)
    files = [folder / one.episode.tokens_key for one in found]
    ms = {
        "columns": cpu_ms(lambda: _columns(files), episodes),
        "read": await asyncio.to_thread(
            cpu_ms, lambda: asyncio.run(read_episodes(refs, store)), episodes
        ),
    }
    for name, convert in CONVERSIONS.items():
        ms[name] = cpu_ms(lambda convert=convert: _each(convert, found), episodes)  # type: ignore[misc]  # a default, so that each has its own
    return {"size": size, "episodes": episodes, "cpu_ms": ms}


def _columns(files: Sequence[Path]) -> None:
    for file in files:
        pq.read_table(file, columns=COLUMNS)


def _each(convert: Convert, found: Sequence[EpisodeSegments]) -> None:
    for one in found:
        convert(one)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measured(size, asked.episodes, Path(folder))))
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"| CPU ms an episode | columns | read | x columns | {' | '.join(CONVERSIONS)} |")
    print("|---|" + "---|" * (3 + len(CONVERSIONS)))
    for row in rows:
        ms = row["cpu_ms"]
        made = " | ".join(f"{ms[name]:.1f}" for name in CONVERSIONS)
        ratio = ms["read"] / ms["columns"]
        print(f"| {row['size']} | {ms['columns']:.1f} | {ms['read']:.1f} | {ratio:.1f} | {made} |")
    print(f"load average: {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
