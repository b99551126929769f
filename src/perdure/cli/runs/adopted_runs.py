"""Plans a run that completes another program's results: keeps, grades or samples each rollout."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pydantic import JsonValue

from perdure.adoption.adopted_results import place
from perdure.adoption.foreign_rollouts import (
    ForeignRollout,
    Placed,
    Reading,
    digest_of,
    most_samples,
    of_one_maker,
    places,
)
from perdure.cli.console import many, say
from perdure.cli.runs import instance_selection, run_launcher
from perdure.cli.runs.run_request import RunOptions, build, check, instances_of
from perdure.errors import ConfigurationError
from perdure.instances.rows.row_choice import Choice
from perdure.sandboxes import phase_specs
from perdure.settings.settings_tree import Settings
from perdure.stack.home_providers import provider
from perdure.storage.store_preflight import check_store
from perdure.storage.store_url import open_store
from perdure.types import GIVEN_PATCHES, GIVEN_PATCHES_OPTION

SHOWN = 3
"""Maximum number of causes to name."""


@dataclass(frozen=True)
class Chosen:
    """Which results to adopt. `by`: an agent or a model. `score`: the score that is the verdict."""

    by: str = ""
    score: str = ""
    skip_unknown: bool = False


async def plan(
    settings: Settings, options: RunOptions, reading: Reading, chosen: Chosen, *, dry_run: bool
) -> run_launcher.CheckedRun:
    """Check everything and put the results into the store, unless it is a dry run.

    Raises: ConfigurationError, for example for results of an instance that SOURCE lacks.
    """
    phase_specs.check(check(options), None, partial(provider, settings))
    theirs = of_one_maker(reading.rollouts, chosen.by)
    await check_store(settings)
    store = open_store(settings)
    choice = Choice(options.include, options.exclude, options.limit, options.skip_bad_rows)
    found = await instance_selection.resolve(store, options.source, choice)
    refs, marks = await instances_of(store, build(options, found), found)
    by_id = {ref.split("/", 1)[1]: ref for ref in refs}
    placed, others = places(theirs, by_id, chosen.score)
    quarantined = {ref.split("/", 1)[1] for ref in marks} - by_id.keys()
    _check_known(others, quarantined, options, chosen)
    planned = await run_launcher.checked(
        settings, _completed(options, placed, len(refs)), found, dry_run=dry_run
    )
    for line in (*found.notes, *reading.notes, *_summary(theirs, placed, planned.rollouts)):
        say(line)
    if not dry_run:
        await place(store, planned.request, placed)
    return planned


def _completed(options: RunOptions, placed: Sequence[Placed], instances: int) -> RunOptions:
    """The options with the results' digest. If nothing is to be sampled, no agent is needed."""
    most = most_samples(placed)
    samples = options.samples or most
    if samples < most:
        raise ConfigurationError(
            f"the results have {most} attempts at an instance: give -n {most} or more"
        )
    digest = digest_of(placed)
    fields: Mapping[str, JsonValue] = {**options.fields, "adopted_sha256": digest}
    agent = options.agent
    if len(placed) == samples * instances:
        agent, fields = GIVEN_PATCHES, {**fields, "agent_options": {GIVEN_PATCHES_OPTION: digest}}
    return replace(options, agent=agent, samples=samples, fields=fields)


def _check_known(
    others: Sequence[ForeignRollout], quarantined: set[str], options: RunOptions, chosen: Chosen
) -> None:
    if not others:
        return
    unknown = [one for one in others if one.instance_id not in quarantined]
    is_part = options.include or options.exclude or options.limit
    if unknown and not (is_part or chosen.skip_unknown):
        raise ConfigurationError(
            f"{options.source} lacks the instances of {many(len(unknown), 'result')} (such as "
            f"{unknown[0].instance_id} of {unknown[0].file}): give their dataset, or --skip-unknown"
        )
    say(f"left out: {many(len(others), 'result')} of instances that this run does not have")


def _summary(
    theirs: Sequence[ForeignRollout], placed: Sequence[Placed], rollouts: int
) -> list[str]:
    kept = Counter(one.adopted.origin for one in placed if one.adopted.reward is not None)
    graded = sum(one.adopted.reward is None for one in placed)
    of = ", ".join(f"{count} of {origin}" for origin, count in kept.items()) or "none"
    lines = [
        f"verdicts kept: {of}; patches to grade: {graded}; to sample: {rollouts - len(placed)}"
    ]
    lost = Counter(one.lacks for one in theirs if not one.has_work)
    lines += [f"no verdict: {many(n, 'attempt')}: {why}" for why, n in lost.most_common(SHOWN)]
    return lines
