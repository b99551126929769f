"""Checks that ids and logprobs can come from sampling, so that no episode records impossible tokens."""

import math
from collections.abc import Sequence
from typing import Any

ROUNDING = 1e-3
"""How far above 0 the logprob of a certain token may be, because of rounding in the engine's kernels."""
MOST_IDS = 1 << 31
"""Episodes store ids in 32 bits."""


class ImpossibleTokens(ValueError):
    """The engine's answer cannot come from sampling."""


def check_ids(ids: Sequence[Any], vocabulary: int | None) -> None:
    """`vocabulary`: how many ids the model has; None: not known. Raises: ImpossibleTokens."""
    for token_id in ids:
        if type(token_id) is not int:
            raise ImpossibleTokens(f"a token id is {token_id!r}, which is not an integer")
        if not 0 <= token_id < (vocabulary or MOST_IDS):
            size = "" if vocabulary is None else f" of {vocabulary} tokens"
            raise ImpossibleTokens(f"the token id {token_id} is outside the vocabulary{size}")


def check_logprobs(logprobs: Sequence[float]) -> None:
    """Raises: ImpossibleTokens unless all are finite and at most 0, apart from rounding."""
    for value in logprobs:
        if not (math.isfinite(value) and value <= ROUNDING):
            raise ImpossibleTokens(
                f"a logprob is {value}, which is not the logarithm of a probability"
            )
