"""Gives TorchTitan the rows of a JSONL file as an endless dataset."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config import Configurable

from perdure.errors import ConfigurationError

Row = dict[str, Any] | str
"""`{"instance": "<dataset>/<instance_id>"}`, a row with an `instance_id`, or just the reference."""


class Instances(Configurable):  # type: ignore[misc]  # torchtitan has no types
    """An endless stream of rows, shuffled again after each pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        path: str = ""
        """A JSONL file. Each row names its `instance` or its `instance_id`."""
        seed: int = 42
        shuffle: bool = True

    def __init__(self, config: "Instances.Config") -> None:
        self._path = config.path
        self._rows: list[Row] = []
        self._random = random.Random(config.seed) if config.shuffle else None
        self._left: list[Row] = []

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if not self._left:
            self._rows = self._rows or _rows(self._path)
            self._left = list(reversed(self._rows))
            if self._random is not None:
                self._random.shuffle(self._left)
        return self._left.pop()


def _rows(path: str) -> list[Row]:
    """Raises: ConfigurationError."""
    if not path:
        raise ConfigurationError("the dataset needs a `path`: a JSONL file of instances")
    try:
        lines = Path(path).read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a JSONL file: {error}") from None
    if not rows:
        raise ConfigurationError(f"{path} has no rows")
    return rows
