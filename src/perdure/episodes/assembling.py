"""An episode in both its forms, made of what the stages left in the store.

One function on bytes, for a process of its own: 200 turns of 100k tokens take a second and 250 MB.
"""

from dataclasses import replace
from typing import NamedTuple

from perdure.episodes import lean_arrow, segments
from perdure.episodes.episode import Episode, EpisodeParts, build_episode


class Assembled(NamedTuple):
    """`tokens`: the content of `episode.parquet`."""

    episode: Episode
    tokens: bytes


def assemble(parts: EpisodeParts, turns: bytes | None) -> Assembled:
    """`parts`: without turns; `turns`: the content of `turns.parquet`, None if there is no such file.

    Raises: ValueError when that is no turns file, or grade and status contradict each other.
    """
    lean_arrow.set_up()
    from perdure.episodes.episode_parquet import encode_segments
    from perdure.episodes.turns_parquet import decode

    recorded = decode(turns) if turns is not None else []
    parts = replace(parts, turns=recorded, turns_key=parts.turns_key if recorded else None)
    cut = segments.cut(recorded)
    episode = build_episode(parts, cut)
    return Assembled(episode, encode_segments(episode, cut))
