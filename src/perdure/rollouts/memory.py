"""What a worker process remembers of the rollouts it plays, so that it reads each thing once.

Only what no later stage may find changed: the row as the rollout's first stage here read it, and the
record of an attempt's sandbox, which is written once. Nothing is right because of it; another worker
reads the store.
"""

from collections import OrderedDict
from typing import TypeVar

from pydantic import BaseModel

MOST = 256
"""Things remembered. A row is some tens of kilobytes."""

Model = TypeVar("Model", bound=BaseModel)


class Memory:
    """By play, which is one workflow run: a rollout that is played again is read again."""

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
