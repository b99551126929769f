"""The order in which a trainer takes instances: endless, shuffled each epoch, resumable."""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.errors import ConfigurationError


class InstanceOrder(Iterator[str]):
    """An endless iterator over instance references, epoch after epoch.

    Example:
        order = InstanceOrder(refs, seed=7)
        order.resume(checkpoint["instances"])  # a trainer that restarts
        requests = (request(ref) for ref in order)
        checkpoint["instances"] = order.position()
    """

    def __init__(self, refs: Sequence[str], *, seed: int = 0, shuffle: bool = True) -> None:
        """Raises: ConfigurationError if `refs` is empty."""
        if not refs:
            raise ConfigurationError("refs is empty: give at least one instance")
        self._refs = tuple(refs)
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 0
        self._taken = 0
        self._order = self._of_epoch()

    def __next__(self) -> str:
        if self._taken == len(self._order):
            self.epoch += 1
            self._taken = 0
            self._order = self._of_epoch()
        self._taken += 1
        return self._order[self._taken - 1]

    def position(self) -> dict[str, Any]:
        """The argument for `resume`, as plain JSON."""
        return {"epoch": self.epoch, "taken": self._taken, "order": self._digest()}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue after the last instance taken.

        Raises: ConfigurationError if the instances, the seed or the shuffling have changed.
        """
        if position["order"] != self._digest():
            raise ConfigurationError(
                "the position belongs to other instances, or to another seed or shuffling"
            )
        self.epoch, self._taken = position["epoch"], position["taken"]
        self._order = self._of_epoch()

    def _of_epoch(self) -> tuple[str, ...]:
        """The order of the current epoch, which depends only on seed and epoch."""
        order = list(self._refs)
        if self._shuffle:
            random.Random(f"{self._seed}/{self.epoch}").shuffle(order)
        return tuple(order)

    def _digest(self) -> str:
        whole = "\n".join((str(self._seed), str(self._shuffle), *self._refs))
        return hashlib.sha256(whole.encode()).hexdigest()[:16]
