"""Several rewards of one grade, by name: those of a verifier's `reward.json` or of a handler's
answer. Code under test may have written them.
"""

import math
import statistics
from collections.abc import Mapping

MOST_NAMES, LONGEST_NAME = 32, 64
MAIN = "reward"
"""The name of the reward that decides the outcome. Without it, the mean of all rewards does."""


def parse_named_rewards(found: object) -> dict[str, float]:
    """Raises: ValueError, which says what is wrong with them."""
    if not isinstance(found, Mapping) or not found:
        raise ValueError("not an object with at least one reward")
    if len(found) > MOST_NAMES:
        raise ValueError(f"{len(found)} rewards, and at most {MOST_NAMES} are allowed")
    return {_name(name): _number(name, value) for name, value in found.items()}


def main_reward(named: Mapping[str, float]) -> float:
    """`named`: at least one."""
    return named[MAIN] if MAIN in named else statistics.fmean(named.values())


def _name(name: object) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(
            f"a reward's name has 1 to {LONGEST_NAME} printable characters, not {str(name)[:80]!r}"
        )
    return name


def _number(name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the reward {name!r} is not a finite number")
    return number
