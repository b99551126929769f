"""Bookkeeping of a run: lists its instances, serves pages of the list, writes the manifest."""

import contextlib
import fnmatch
import json
import math
from collections.abc import Sequence
from typing import Any

from perdure.agents.agent_validation import check_options
from perdure.engines.reported_model import engine_settings
from perdure.episodes.episode_store import scan_run_as
from perdure.episodes.run_manifest import Counted, build_manifest, counted
from perdure.episodes.token_accounting import count
from perdure.errors import ConfigurationError, NotFound, PreconditionFailed, StoreUnavailable
from perdure.instances import calibration_record, instance_catalog
from perdure.rollouts import retry_selection, run_identity, run_label, run_record
from perdure.rollouts.activity_messages import Page, PageRequest, PreparedRun
from perdure.rollouts.request_models import check_models
from perdure.rollouts.reward_model.scoring import check_reward_model
from perdure.rollouts.stage_services import Services
from perdure.sandboxes import phase_specs
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.store_preflight import check_store
from perdure.types import RolloutStatus, RunRequest, RunSummary

CHECKPOINTS, STAGES = ("sandbox.json", "agent.json", "patch.json"), ("agent", "capture", "grade")
"""The checkpoint files of stages, and for each the stage that follows."""
STILL_OPEN = "its host, its engine or the store did not answer in time; it ends by itself"
"""Why a rollout that was at work has no episode yet."""


async def prepare_run(services: Services, run: RunRequest) -> PreparedRun:
    """Raises: ConfigurationError, also for a store that has never worked; StoreUnavailable."""
    await check_store(services.settings, lambda: services.store)
    await run_label.check_not_deleting(services.store, run.run_id)
    rollout = run.rollout_request("any/instance")
    check_options(rollout.agent, rollout.agent_options, rollout.mcp_servers, rollout.user)
    phase_specs.check(rollout, None, services.provider)
    run.check_prices()
    store = services.store
    if run.again is not None:
        if run.again.start_at == "boot":
            await _keep_identity(
                services, run, await retry_selection.instances_of(store, run.run_id)
            )
        chosen = await retry_selection.listed(store, run, run.again)
        return PreparedRun(total=len(chosen), uri=f"{store.url}/runs/{run.run_id}")
    sandbox = phase_specs.place(rollout, None, "grade").provider
    refs = await select(store, run, proved_in=sandbox)
    added = await _keep_identity(services, run, refs)
    await run_record.record(store, run)
    await _goes_on(store, run.run_id)
    refs = await _keep_instances(store, run.run_id, refs, list(added))
    await run_identity.add_instances(store, run.run_id, added)
    resolved = {
        "request": run.model_dump(mode="json"),
        "settings": services.settings.model_dump(mode="json"),
        "instances": len(refs),
    }
    await store.put_if_absent(store_keys.run(run.run_id), json.dumps(resolved, indent=1).encode())
    listed = await retry_selection.read_list(store, run.run_id, 0) if run.listed else refs
    return PreparedRun(total=len(listed), uri=f"{store.url}/runs/{run.run_id}")


async def _keep_instances(
    store: Store, run_id: str, refs: Sequence[str], added: Sequence[str]
) -> list[str]:
    """Store the run's list, or append what was added to it. Returns the list in its stored order.

    Raises: StoreUnavailable if another try appended at the same time; Temporal retries.
    """
    key = store_keys.run_instances(run_id)
    if await store.put_if_absent(key, json.dumps(refs, indent=0).encode()):
        return list(refs)
    stored = await store.get(key)
    known: list[str] = json.loads(stored.data)
    merged = list(dict.fromkeys((*known, *added)))
    if merged != known:
        try:
            await store.put(key, json.dumps(merged, indent=0).encode(), if_match=stored.etag)
        except PreconditionFailed as error:
            raise StoreUnavailable(str(error)) from error
    return merged


async def _goes_on(store: Store, run_id: str) -> None:
    """Clear `stopped` in the manifest of a run that continues. The end of the run sets it again."""
    key = store_keys.manifest(run_id)
    with contextlib.suppress(NotFound, PreconditionFailed):
        found = await store.get(key)
        manifest = json.loads(found.data)
        if manifest.get("stopped"):
            data = json.dumps({**manifest, "stopped": ""}, indent=1).encode()
            await store.put(key, data, if_match=found.etag)


async def _keep_identity(
    services: Services, run: RunRequest, refs: Sequence[str]
) -> dict[str, str]:
    """Returns the instances that the run did not have, with their digests.

    Raises: ConfigurationError if the run was started with another identity, or names a model that no
    engine has."""
    settings = services.settings
    rollout = run.rollout_request("any/instance")
    engine = engine_settings(settings) if services.agent(rollout.agent).needs_model else {}
    if engine:
        await check_models(settings, services.store, rollout, engine)
    await check_reward_model(settings, services.store, rollout)
    asked = await run_identity.identity_of(settings, services.store, rollout, refs, engine)
    return await run_identity.keep(services.store, run.run_id, asked)


async def select(store: Store, run: RunRequest, *, proved_in: str = "") -> list[str]:
    """The instances that a request selects, in order.

    `proved_in`: leave out the rows of a dataset that are quarantined in this provider's sandboxes.
    Raises: ConfigurationError if no instance remains.
    """
    if run.dataset is not None:
        refs = await instance_catalog.refs(store, run.dataset)
        if not refs:
            raise ConfigurationError(
                f"dataset '{run.dataset}' has no instances in {store.url}:"
                " run `perdure instances build` or `perdure instances import` first"
            )
    else:
        refs = list(run.instances)
    chosen = [ref for ref in refs if _wanted(ref.split("/", 1)[1], run)]
    if run.dataset is not None and proved_in:
        bad = calibration_record.quarantined(
            await calibration_record.marks(store, chosen, proved_in)
        )
        chosen = [ref for ref in chosen if ref not in bad]
    if not chosen:
        raise ConfigurationError(
            f"none of {len(refs)} instances is selected: check include {list(run.include)}"
            f" and exclude {list(run.exclude)}; quarantined rows are left out"
        )
    ids = [ref.split("/", 1)[1] for ref in chosen]
    if len(set(ids)) != len(ids):
        raise ConfigurationError("two datasets of this run share an instance_id: use two runs")
    return chosen[: run.limit]


async def load_page(store: Store, request: PageRequest) -> Page:
    if request.round or request.listed:
        chosen = await retry_selection.read_list(store, request.run_id, request.round)
        return Page(instances=(), again=tuple(chosen[request.start : request.stop]))
    stored = await store.get(store_keys.run_instances(request.run_id))
    return Page(instances=tuple(json.loads(stored.data)[request.start : request.stop]))


async def finish_run(store: Store, run: RunRequest) -> RunSummary:
    episodes, unreadable = await scan_run_as(store, run.run_id, counted)
    manifest = build_manifest(run.run_id, episodes)
    manifest["unreadable"] = [one.key for one in unreadable]
    unfinished = await _unfinished(store, run, episodes) if run.stopped else []
    manifest["unfinished"] = unfinished
    stopped = run.stopped if unfinished else await _stopped(store, run.run_id, episodes)
    manifest["stopped"] = stopped
    data = json.dumps(manifest, indent=1).encode()
    key = store_keys.manifest(run.run_id)
    try:
        await store.put(key, data, if_match=(await store.get(key)).etag)
    except NotFound:
        await store.put_if_absent(key, data)
    except PreconditionFailed as error:  # another try wrote it: let Temporal retry this one
        raise StoreUnavailable(str(error)) from error
    graded = [e for e in episodes if e.status is RolloutStatus.GRADED]
    return RunSummary(
        run_id=run.run_id,
        uri=f"{store.url}/{key}",
        rollouts=len(episodes),
        graded=len(graded),
        resolved=sum(e.outcome == "resolved" for e in graded),
        mean_reward=manifest["mean_reward"],
        by_status=count(e.status.value for e in episodes),
        by_outcome=count(e.outcome.value for e in graded if e.outcome is not None),
        stopped=stopped,
    )


async def _unfinished(
    store: Store, run: RunRequest, episodes: Sequence[Counted]
) -> list[dict[str, Any]]:
    """The rollouts that the run ended without, each with its stage and the cause."""
    try:
        request = await run_record.current_request(store, run.run_id)
        names = await retry_selection.planned(store, request)
    except NotFound:  # the run ended before its instances were listed
        return []
    found = {(one.instance, one.sample_index): one for one in episodes}
    open_in = await _open_stages(store, run.run_id, episodes)
    rows = []
    for instance, sample in names:
        episode = found.get((instance, sample))
        if episode is None:
            stage = open_in.get((instance.split("/", 1)[1], sample), "")
            cause = STILL_OPEN if stage else f"not started: {run.stopped}"
        elif episode.status is RolloutStatus.TRUNCATED:
            stage, cause = episode.stopped_in, episode.failure.message if episode.failure else ""
        else:
            continue
        row = {"instance": instance, "sample_index": sample, "stage": stage, "cause": cause}
        rows.append(row)
    return rows


async def _open_stages(
    store: Store, run_id: str, episodes: Sequence[Counted]
) -> dict[tuple[str, int], str]:
    """Instance id and sample -> the stage after the newest checkpoint, for rollouts that began and
    have no episode."""
    ended = {(one.instance.split("/", 1)[1], one.sample_index) for one in episodes}
    newest: dict[tuple[str, int], tuple[int, int]] = {}
    async for key in store.list(store_keys.rollouts(run_id)):
        parts = key.split("/")
        if len(parts) != 8 or parts[5] != "attempts" or parts[7] not in CHECKPOINTS:
            continue
        name, reached = (parts[3], int(parts[4])), (int(parts[6]), CHECKPOINTS.index(parts[7]))
        if name not in ended:
            newest[name] = max(reached, newest.get(name, (0, 0)))
    return {name: STAGES[index] for name, (_, index) in newest.items()}


async def _stopped(store: Store, run_id: str, episodes: Sequence[Counted]) -> str:
    """Why the budget left rollouts without a verdict; empty if it did not, or if all have one."""
    try:
        run = await run_record.current_request(store, run_id)
    except NotFound:  # the run was refused before it had an instance list
        return ""
    planned = await retry_selection.planned_rollouts(store, run) or 0
    whole = (
        *(RolloutStatus.GRADED, RolloutStatus.UNGRADED),
        *(RolloutStatus.ADOPTED, RolloutStatus.FAILED),
    )
    ended = [one for one in episodes if one.status in whole]
    if len(ended) >= planned:
        return ""
    tokens = sum(c.total for one in episodes for c in (one.tokens, *one.other_tokens.values()))
    dollars = math.fsum(run.budget.cost(one.tokens, one.other_tokens) for one in episodes)
    return run.budget.used_up(tokens, dollars)


def _wanted(instance_id: str, run: RunRequest) -> bool:
    included = not run.include or any(fnmatch.fnmatch(instance_id, g) for g in run.include)
    return included and not any(fnmatch.fnmatch(instance_id, g) for g in run.exclude)
