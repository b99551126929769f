"""Starts a run again for some of its rollouts: `perdure retry`, `regrade`, `grade RUN`."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from perdure.cli.console import answer, many, say
from perdure.cli.runs import run_launcher, run_results
from perdure.cli.temporal_connection import connect
from perdure.episodes.episode_store import scan_run, scan_run_as
from perdure.errors import ConfigurationError, NotFound
from perdure.rollouts import retry_selection
from perdure.rollouts.activity_messages import RolloutAgain
from perdure.rollouts.run_record import current_request
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.store_preflight import check_store
from perdure.storage.store_url import open_store
from perdure.types import EpisodeRef, PlayAgain, RolloutStatus, RunRequest


def play(
    settings: Settings,
    run_id: str,
    asked: dict[str, Any],
    *,
    concurrency: int | None,
    wait: bool,
    dry_run: bool,
    as_json: bool,
    notify: str,
) -> int:
    """Run rollouts of a run again; return the exit code.

    `asked`: fields of PlayAgain. Raises: NotFound; ConfigurationError if no rollout is chosen or the
    run is open.
    """
    request, chosen = asyncio.run(_plan(settings, run_id, asked, concurrency))
    if dry_run:
        _show(request, chosen, as_json=as_json)
        return 0
    needs_model = request.again is not None and request.again.start_at == "boot"
    run_launcher.ensure_stack_ready(settings, request, joins=True, samples=needs_model)
    return asyncio.run(_drive(settings, request, chosen, wait=wait, as_json=as_json, notify=notify))


def grade_ungraded(settings: Settings, run_id: str, *, as_json: bool, **how: Any) -> int:
    """Grade the ungraded rollouts of a run; return the exit code, 0 if there are none.

    Raises: NotFound; ConfigurationError if the run is open.
    """
    ungraded = asyncio.run(_count(open_store(settings), run_id, RolloutStatus.UNGRADED))
    if not ungraded:
        if as_json:
            answer({"run_id": run_id, "rollouts": []})
        say(f"run {run_id} has no ungraded rollout; `perdure regrade` grades all of them again")
        return 0
    asked = {"outcomes": (RolloutStatus.UNGRADED.value,), "start_at": "grade"}
    return play(settings, run_id, asked, as_json=as_json, **how)


async def _count(store: Store, run_id: str, status: RolloutStatus) -> int:
    """Raises: NotFound for an unknown run."""
    if not await store.exists(store_keys.run(run_id)):
        raise NotFound(
            f"no run {run_id!r} in {store.url}: `perdure status` lists the runs; to grade the patches"
            " of a file, give --predictions"
        )
    found, _ = await scan_run_as(store, run_id, lambda episode: episode.status)
    return found.count(status)


async def _plan(
    settings: Settings, run_id: str, asked: dict[str, Any], concurrency: int | None
) -> tuple[RunRequest, Sequence[RolloutAgain]]:
    await check_store(settings)
    store = open_store(settings)
    first = await current_request(store, run_id)
    wanted = PlayAgain(round=await retry_selection.next_round(store, run_id), **asked)
    chosen = await retry_selection.select(store, first, wanted)
    if not chosen:
        there = await _endings(store, run_id)
        raise ConfigurationError(
            f"run {run_id} has no rollout to repeat ({retry_selection.asked(wanted)}); it has {there}"
        )
    if wanted.start_at == "boot":
        refs = await retry_selection.instances_of(store, run_id)
        await run_launcher.check_same(settings, store, first, refs)
    update = {"again": wanted, "concurrency": concurrency or first.concurrency}
    return first.model_copy(update=update), chosen


async def _endings(store: Store, run_id: str) -> str:
    episodes, _ = await scan_run(store, run_id)
    counted = Counter(episode.ending for episode in episodes)
    return ", ".join(f"{name} {count}" for name, count in counted.most_common()) or "no episode"


def _show(request: RunRequest, chosen: Sequence[RolloutAgain], *, as_json: bool) -> None:
    names = [f"{one.instance}/{one.sample_index}" for one in chosen]
    if as_json:
        answer({"run_id": request.run_id, "rollouts": names})
        return
    click.echo(f"{request.run_id}: would repeat {many(len(names), 'rollout')}")
    for name in names:
        click.echo(f"  {name}")


async def _drive(
    settings: Settings,
    request: RunRequest,
    chosen: Sequence[RolloutAgain],
    *,
    wait: bool,
    as_json: bool,
    notify: str,
) -> int:
    connection = await connect(settings)
    handle = await connection.perdure.play_again(request)
    say(f"Started run {handle.run_id} again: {many(len(chosen), 'rollout')}")
    run_launcher.print_run_links(settings, connection, handle.run_id)
    if not wait:
        run_launcher.print_watch_command(connection, handle.run_id, as_json)
        return 0
    episodes, stopped, interrupted = await run_launcher.follow_run(settings, handle, notify=notify)
    asked = {(one.instance, one.sample_index) for one in chosen}
    ended = [one for one in await handle.rollouts() if (one.instance, one.sample_index) in asked]
    without = [one.episode for one in ended if one.episode and not _graded(one.episode)]
    if as_json:
        answer(run_results.document(handle.run_id, episodes, stopped, (), interrupted))
    else:
        run_launcher.show_results(settings, connection, handle.run_id, episodes, interrupted)
        if stopped:
            say(stopped)
        say(f"{len(ended) - len(without)} of {len(chosen)} have a new verdict")
        for one in without:
            why = f"{one.failure.boundary.value}: {one.failure.message}" if one.failure else ""
            say(f"no new verdict  {one.instance_id} #{one.sample_index}: {why or one.status.value}")
    return 1 if without or len(ended) < len(chosen) else 0


def _graded(episode: EpisodeRef) -> bool:
    return episode.status is RolloutStatus.GRADED
