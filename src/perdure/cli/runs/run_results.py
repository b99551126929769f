"""Reads a run's results from the store."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from perdure.cli.runs.interruptions import Interruptions
from perdure.episodes.episode_store import scan_run_as
from perdure.errors import NotFound
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import EpisodeRef


async def episodes(store: Store, run_id: str) -> list[EpisodeRef]:
    """One reference per finished rollout, sorted by instance and sample.

    Prints unreadable episodes on stderr.
    """
    return [ref for ref, _ in await _episodes(store, run_id)]


async def episodes_and_interruptions(
    store: Store, run_id: str
) -> tuple[list[EpisodeRef], Interruptions]:
    """The same, and what interrupted the rollouts."""
    found = await _episodes(store, run_id)
    return [ref for ref, _ in found], Interruptions.total(one for _, one in found)


async def _episodes(store: Store, run_id: str) -> list[tuple[EpisodeRef, Interruptions]]:
    found, unreadable = await scan_run_as(
        store, run_id, lambda episode: (episode.ref(store.url), Interruptions.of(episode))
    )
    for one in unreadable:
        click.echo(f"error: {one}", err=True)
    return found


async def read_unfinished(store: Store, run_id: str) -> list[dict[str, Any]]:
    """The rollouts that the run ended without, from its manifest; empty if there is no manifest."""
    try:
        manifest = json.loads((await store.get(store_keys.manifest(run_id))).data)
    except (NotFound, ValueError):
        return []
    found: list[dict[str, Any]] = manifest.get("unfinished", [])
    return found


def document(
    run_id: str,
    episodes: Sequence[EpisodeRef],
    stopped: str = "",
    unfinished: Sequence[Mapping[str, Any]] = (),
    interrupted: str = "",
) -> dict[str, Any]:
    """The document that `perdure run --wait --json` prints."""
    told = {"stopped": stopped, "interrupted": interrupted}
    more: dict[str, Any] = {name: text for name, text in told.items() if text}
    if unfinished:
        more["unfinished"] = list(unfinished)
    return {"run_id": run_id, "rollouts": [_row(episode) for episode in episodes], **more}


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
