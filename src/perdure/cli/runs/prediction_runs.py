"""Plans a run that grades another program's patches: finds instances, stores the patches."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from perdure.cli.console import many, say
from perdure.cli.runs import instance_selection, run_launcher
from perdure.cli.runs.run_request import RunOptions, check
from perdure.errors import ConfigurationError
from perdure.instances import instance_catalog
from perdure.instances.rows.row_choice import Choice
from perdure.rollouts.predictions import (
    Prediction,
    are_uneven,
    digest_of,
    place,
    read_predictions,
)
from perdure.sandboxes import phase_specs
from perdure.settings.settings_tree import Settings
from perdure.stack.home_providers import provider
from perdure.storage.base import Store
from perdure.storage.store_preflight import check_store
from perdure.storage.store_url import open_store
from perdure.types import GIVEN_PATCHES, GIVEN_PATCHES_OPTION


def plan(
    settings: Settings,
    source: str,
    file: Path,
    fields: Mapping[str, JsonValue],
    *,
    model: str,
    concurrency: int | None,
    run_id: str | None,
    new: bool,
    skip_unknown: bool,
    dry_run: bool,
) -> run_launcher.CheckedRun:
    """Check everything and put the patches into the store, unless it is a dry run.

    `model`: whose patches to grade; empty if the file has only one model's. Raises:
    ConfigurationError for several models, or for a patch whose instance is not in SOURCE.
    """
    given = read_predictions(file, model)
    digest: JsonValue = {GIVEN_PATCHES_OPTION: digest_of(given)}
    options = RunOptions(
        source=source,
        agent=GIVEN_PATCHES,
        concurrency=concurrency,
        run_id=run_id,
        new=new,
        fields={"model": given[0].model, "agent_options": digest, **fields},
        of_run={"listed": are_uneven(given)},
    )
    return asyncio.run(_plan(settings, options, given, skip_unknown, dry_run))


async def _plan(
    settings: Settings,
    options: RunOptions,
    given: Sequence[Prediction],
    skip_unknown: bool,
    dry_run: bool,
) -> run_launcher.CheckedRun:
    phase_specs.check(check(options), None, partial(provider, settings))
    await check_store(settings)
    store = open_store(settings)
    ids = tuple(dict.fromkeys(one.instance_id for one in given))
    try:
        found = await instance_selection.resolve(
            store, options.source, Choice(ids, skip_bad_rows=True)
        )
    except instance_selection.NoRowsSelected:
        raise _lacks(options.source, ids) from None
    refs = await _refs(store, found)
    kept = _known(given, refs, options.source, skip_unknown)
    wanted = tuple(dict.fromkeys(refs[one.instance_id] for one in kept))
    digest = hashlib.sha256(f"{found.digest} {digest_of(kept)}".encode()).hexdigest()
    chosen = replace(found, refs=wanted, digest=digest)
    samples = 1 + max(one.sample_index for one in kept)
    planned = await run_launcher.checked(
        settings, replace(options, samples=samples), chosen, dry_run=dry_run
    )
    if not dry_run:
        await place(store, planned.request, refs, kept)
    return replace(planned, rollouts=len(kept))


async def _refs(store: Store, found: instance_selection.Selection) -> dict[str, str]:
    """Maps each instance id to its reference."""
    refs = await instance_catalog.refs(store, found.dataset) if found.refs is None else found.refs
    return {ref.split("/", 1)[1]: ref for ref in refs}


def _known(
    given: Sequence[Prediction], refs: Mapping[str, str], source: str, skip_unknown: bool
) -> list[Prediction]:
    unknown = [one.instance_id for one in given if one.instance_id not in refs]
    kept = [one for one in given if one.instance_id in refs]
    if unknown and not (skip_unknown and kept):
        raise _lacks(source, list(dict.fromkeys(unknown)))
    if unknown:
        say(f"left out: {many(len(unknown), 'prediction')} of unknown instances")
    return kept


def _lacks(source: str, unknown: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{source} lacks {many(len(unknown), 'instance')} of the predictions (such as"
        f" {', '.join(unknown[:3])}); skip them with --skip-unknown"
    )
