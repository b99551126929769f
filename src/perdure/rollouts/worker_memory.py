"""A worker process's cache for the rollouts it runs, so that it reads each object once.

It holds only what cannot change between stages: the row as the rollout's first stage read it, the
record of an attempt's sandbox, and the result of a handler's `init`. Correctness does not depend on
it: another worker reads the store.
"""

from collections import OrderedDict
from typing import TypeVar

from pydantic import BaseModel

MOST = 256
"""Maximum number of cached objects. A row has some tens of kilobytes."""

Model = TypeVar("Model", bound=BaseModel)


class Memory:
    """Keyed by `play`, the workflow run, so that a rerun of a rollout reads everything again."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[tuple[str, str], BaseModel] = OrderedDict()

    def recall(self, play: str, key: str, model: type[Model]) -> Model | None:
        known = self._known.get((play, key))
        if not isinstance(known, model):
            return None
        self._known.move_to_end((play, key))
        return known

    def keep(self, play: str, key: str, known: BaseModel) -> None:
        self._known[play, key] = known
        self._known.move_to_end((play, key))
        if len(self._known) > self._most:
            self._known.popitem(last=False)
