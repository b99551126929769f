"""Reads `perdure export --format sft-tokens`: recorded ids, masks and rewards, one row per segment."""

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.learn.training_rows import Sample


class Exported(NamedTuple):
    sample: Sample
    reward: float


def read(path: Path) -> list[Exported]:
    return [_row(json.loads(line)) for line in path.read_text().splitlines()]


def _row(row: dict[str, list[int] | float]) -> Exported:
    ids, mask, reward = row["input_ids"], row["assistant_masks"], row["reward"]
    assert isinstance(ids, list)
    assert isinstance(mask, list)
    assert isinstance(reward, float)
    return Exported(Sample(tuple(ids), tuple(mask), (0.0,) * len(ids)), reward)
