"""Two trajectories side by side: their main chains' turns in pairs, and the first difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from perdure.episodes.trajectory_segments import MAIN
from perdure.types import Purpose
from perdure.viewer.conversation_view import TurnView, view

LONGEST = 120
"""Most pairs on a page."""


@dataclass(frozen=True)
class Pair:
    left: TurnView | None
    right: TurnView | None
    parts_here: bool
    """This is the first pair whose answers differ."""


def side_by_side(left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> list[Pair]:
    """Pair the turns of the main chains by position, without side requests."""
    pairs: list[Pair] = []
    parted = False
    for one, other in zip_longest(_steps(left), _steps(right)):
        same = one is not None and other is not None and one["answer"] == other["answer"]
        here, parted = not same and not parted, parted or not same
        pairs.append(Pair(_view(one), _view(other), here))
    return pairs[:LONGEST]


def _steps(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [t for t in turns if t["chain"] == MAIN and t["purpose"] != Purpose.SIDE]


def _view(turn: dict[str, Any] | None) -> TurnView | None:
    return None if turn is None else view(turn, ())
