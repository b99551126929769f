"""Reads a run's results from the store."""

from collections.abc import Sequence
from typing import Any

import click

from perdure.episodes.episode_store import scan_run_as
from perdure.storage.base import Store
from perdure.types import EpisodeRef


async def episodes(store: Store, run_id: str) -> list[EpisodeRef]:
    """One reference per finished rollout, sorted by instance and sample.

    Prints unreadable episodes on stderr.
    """
    found, unreadable = await scan_run_as(store, run_id, lambda episode: episode.ref(store.url))
    for one in unreadable:
        click.echo(f"error: {one}", err=True)
    return found


def document(run_id: str, episodes: Sequence[EpisodeRef], stopped: str = "") -> dict[str, Any]:
    """The document that `perdure run --wait --json` prints."""
    rows = [_row(episode) for episode in episodes]
    return {"run_id": run_id, "rollouts": rows, **({"stopped": stopped} if stopped else {})}


def _row(episode: EpisodeRef) -> dict[str, Any]:
    row = {
        "instance_id": episode.instance_id,
        "sample_index": episode.sample_index,
        "agent": episode.agent,
        "model": episode.model,
        "status": episode.status.value,
        "outcome": episode.outcome.value if episode.outcome else None,
        "reward": episode.reward,
        "attempts": episode.attempts,
        "seconds": episode.seconds,
        "episode": episode.uri,
    }
    if episode.official is not None:
        row["official"] = episode.official.value
    if episode.withheld:
        row["withheld"] = episode.withheld
    if episode.failure is not None:
        row["failure"] = episode.failure.model_dump(mode="json")
    return row
