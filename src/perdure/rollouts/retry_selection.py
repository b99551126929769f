"""The planned rollouts of a run, and those that a `PlayAgain` reruns: by how they ended and by
name."""

import fnmatch
import json
from collections.abc import Sequence

from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import scan_run
from perdure.errors import ConfigurationError, NotFound
from perdure.rollouts.activity_messages import RolloutAgain
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import MISSING, PlayAgain, RolloutStatus, RunRequest


async def planned_rollouts(store: Store, run: RunRequest) -> int | None:
    """Number of rollouts that the run was started for; None before its instance list is stored."""
    try:
        return len(await planned(store, run))
    except NotFound:
        return None


async def next_round(store: Store, run_id: str) -> int:
    """The first round number that no earlier start of the run has used."""
    lists = [key async for key in store.list(store_keys.rerun_lists_prefix(run_id))]
    return 1 + max((int(key.rsplit("/", 1)[1].removesuffix(".json")) for key in lists), default=0)


async def select(store: Store, run: RunRequest, again: PlayAgain) -> list[RolloutAgain]:
    """The rollouts to rerun, in the order of the run's list."""
    episodes, unreadable = await scan_run(store, run.run_id)
    found = {(one.instance_id, one.sample_index): one for one in episodes}
    damaged = {(one.instance_id, one.sample_index) for one in unreadable}
    chosen = []
    for instance, sample in await planned(store, run):
        name = instance.split("/", 1)[1], sample
        episode = found.get(name)
        ending = episode.ending if episode is not None else MISSING
        if name in damaged:
            ending = RolloutStatus.FAILED.value
        if not _wanted(again, f"{name[0]}/{sample}", ending):
            continue
        if again.start_at == "grade" and not (episode and episode.has_final_patch):
            continue
        graded = _has_verdict(episode)
        before = episode.round if episode is not None else 0
        chosen.append(
            RolloutAgain(
                instance=instance, sample_index=sample, round=again.round if graded else before
            )
        )
    return chosen


async def listed(store: Store, run: RunRequest, again: PlayAgain) -> list[RolloutAgain]:
    """Like `select`, but stores the list once, so that every try reruns the same rollouts.

    Raises: ConfigurationError if the list is empty.
    """
    chosen = await select(store, run, again)
    if not chosen:
        raise ConfigurationError(f"run {run.run_id} has no matching rollout: {asked(again)}")
    return await keep_list(store, run.run_id, again.round, chosen)


async def keep_list(
    store: Store, run_id: str, round: int, chosen: list[RolloutAgain]
) -> list[RolloutAgain]:
    """Store the list unless the round has one. Returns what is stored."""
    data = json.dumps([one.model_dump() for one in chosen], indent=0).encode()
    if await store.put_if_absent(store_keys.rerun_list(run_id, round), data):
        return chosen
    return await read_list(store, run_id, round)


async def read_list(store: Store, run_id: str, round: int) -> list[RolloutAgain]:
    stored = await store.get(store_keys.rerun_list(run_id, round))
    return [RolloutAgain.model_validate(one) for one in json.loads(stored.data)]


def asked(again: PlayAgain) -> str:
    """Example: `outcome failed or missing, named django__*`."""
    parts = [f"outcome {' or '.join(again.outcomes)}"] if again.outcomes else []
    parts += [f"named {' or '.join(again.include)}"] if again.include else []
    parts += ["with a verdict or ungraded"] if again.start_at == "grade" else []
    return ", ".join(parts) or "any"


async def instances_of(store: Store, run_id: str) -> Sequence[str]:
    """The run's instance list. Raises: NotFound if its first start stored none."""
    found: list[str] = json.loads((await store.get(store_keys.run_instances(run_id))).data)
    return found


async def planned(store: Store, run: RunRequest) -> list[tuple[str, int]]:
    """Instance and sample of each rollout. Raises: NotFound if the first start stored no list."""
    if run.listed:
        entries = await read_list(store, run.run_id, 0)
        return [(one.instance, one.sample_index) for one in entries]
    instances = await instances_of(store, run.run_id)
    return [(instance, sample) for instance in instances for sample in range(run.n_samples)]


def _has_verdict(episode: Episode | None) -> bool:
    verdicts = RolloutStatus.GRADED, RolloutStatus.ADOPTED
    return episode is not None and episode.status in verdicts


def _wanted(again: PlayAgain, name: str, ending: str) -> bool:
    if again.outcomes and ending not in again.outcomes:
        return False
    names = name, name.rpartition("/")[0]
    return not again.include or any(fnmatch.fnmatch(n, g) for n in names for g in again.include)
