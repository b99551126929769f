"""An episode in both its forms, made of what the stages left in the store.

One function on bytes, for a process of its own: 200 turns of 100k tokens take a second and 250 MB.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from perdure.episodes import lean_arrow, segments
from perdure.episodes.episode import (
    AttemptSummary,
    Episode,
    EpisodeParts,
    build_episode,
    build_episode_again,
    usage_by_model,
)
from perdure.types import Segment, Turn


class Assembled(NamedTuple):
    """`tokens`: the content of `episode.parquet`."""

    episode: Episode
    tokens: bytes


def assemble(
    parts: EpisodeParts, turns: bytes | None, discarded: Mapping[int, bytes] = MappingProxyType({})
) -> Assembled:
    """`parts`: without turns; `turns`: the content of `turns.parquet`, None if there is no such file.
    `discarded`: the same of attempts that no longer count, by their number.

    Raises: ValueError when that is no turns file, or grade and status contradict each other.
    """
    lean_arrow.set_up()
    from perdure.episodes.turns_parquet import decode

    recorded = decode(turns) if turns is not None else []
    parts = replace(parts, turns=recorded, turns_key=parts.turns_key if recorded else None)
    parts = replace(parts, attempts=_bought(parts, recorded, discarded, decode))
    cut = segments.cut(recorded)
    episode = build_episode(parts, cut)
    digest = _sha256(turns) if turns is not None and recorded else ""
    return _with_tokens(episode.model_copy(update={"turns_sha256": digest}), cut)


def _bought(
    parts: EpisodeParts,
    last: Sequence[Turn],
    discarded: Mapping[int, bytes],
    decode: Callable[[bytes], list[Turn]],
) -> list[AttemptSummary]:
    """The attempts, each discarded one with the calls that only it used: a replayed one was bought once."""
    replayed = {turn.replayed_from.rpartition("-")[2] for turn in last if turn.replayed_from}
    found = {}
    for number, data in discarded.items():
        with contextlib.suppress(ValueError):  # a file of no use to the attempt that counts
            kept = (turn for turn in decode(data) if not turn.replayed_from)
            # a session's name ends with the number of its attempt
            bought = [turn for turn in kept if f"{number}/{turn.index}" not in replayed]
            found[number] = usage_by_model(bought)
    return [one.model_copy(update={"bought": found.get(one.attempt, ())}) for one in parts.attempts]


def assemble_again(parts: EpisodeParts, earlier: Episode, tokens: bytes) -> Assembled:
    """The turns are lost: their tokens are in `tokens`, the content of the earlier `episode.parquet`.

    Raises: ValueError when that cannot be read.
    """
    lean_arrow.set_up()
    from perdure.episodes.episode_parquet import decode_segments

    kept = decode_segments(tokens, earlier.tokens_key)
    return _with_tokens(build_episode_again(replace(parts, turns_key=None), earlier), kept)


def _with_tokens(episode: Episode, cut: Sequence[Segment]) -> Assembled:
    from perdure.episodes.episode_parquet import encode_segments

    tokens = encode_segments(episode, cut)
    return Assembled(episode.model_copy(update={"tokens_sha256": _sha256(tokens)}), tokens)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
