"""A segment's tokens, with the mask, logprob and policy version that a trainer reads.

Colors are CSS classes, because the pages' security policy allows no inline styles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from perdure.types import Segment

PAGE = 3_000
"""Tokens on a page."""
SHADES = 7
VERSIONS = 6
"""Number of colors for versions; they repeat."""
BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0)
"""Upper bounds of the shades of `-logprob`; the last shade has none."""

Text = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Token:
    ids: tuple[int, ...]
    """More than one id if they encode one character together."""
    text: str
    trained: bool
    shade: int | None
    """The shade of its logprob, 0 = certain; None for a token that was not sampled."""
    version: int | None
    """The color of its version; None for a token that was not sampled, or of unknown version."""
    title: str
    """Text shown on hover."""


def page(segment: Segment, start: int, text: Text) -> list[Token]:
    """One page of the segment's prompt and response tokens, from `start` on."""
    ids = (*segment.prompt_ids, *segment.response_ids)
    first = len(segment.prompt_ids)
    found: list[Token] = []
    position, end = start, min(start + PAGE, len(ids))
    while position < end:
        size = _whole(ids, position, end, text)
        found.append(_token(segment, ids[position : position + size], position - first, text))
        position += size
    return found


def _whole(ids: Sequence[int], position: int, end: int, text: Text) -> int:
    """How many ids make whole characters: one byte of an emoji would show as broken."""
    for size in range(1, min(4, end - position) + 1):
        if "\ufffd" not in text(ids[position : position + size]):
            return size
    return 1


def _token(segment: Segment, ids: tuple[int, ...], at: int, text: Text) -> Token:
    """`at`: the token's position in the response; negative in the prompt."""
    shown = text(ids)
    where = f"id {', '.join(map(str, ids))}"
    if at < 0:
        return Token(ids, shown, False, None, None, f"{where} · prompt")
    if not segment.loss_mask[at]:
        return Token(ids, shown, False, None, None, f"{where} · not sampled")
    logprob, version = segment.logprobs[at], segment.versions[at]
    known = version >= 0
    return Token(
        ids,
        shown,
        True,
        shade(logprob),
        version % VERSIONS if known else None,
        f"{where} · logprob {logprob:.3f} · version {version if known else 'unknown'}",
    )


def shade(logprob: float) -> int:
    """The shade of a logprob: 0 for a certain token, up to 6 for an unlikely one."""
    return sum(-logprob > bound for bound in BOUNDS)


def versions(segment: Segment) -> list[tuple[int, int, int]]:
    """The segment's policy versions, each with its color and its number of trained tokens."""
    trained = sorted(v for v, mask in zip(segment.versions, segment.loss_mask, strict=True) if mask)
    counted = ((version, sum(1 for _ in same)) for version, same in groupby(trained))
    return [(version, version % VERSIONS, count) for version, count in counted if version >= 0]


def ids_only(ids: Sequence[int]) -> str:
    """The ids as text, for an unknown tokenizer."""
    return "".join(f"⟨{one}⟩" for one in ids)
