"""A sweep: one run for each combination of values, all at once, and one table of their scores."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.console import answer, say
from perdure.cli.runs import run_launcher, run_reports
from perdure.cli.runs.run_launcher import CheckedRun, RunEnd
from perdure.cli.temporal_connection import connect
from perdure.client.sdk import RunHandle
from perdure.errors import ConfigurationError, NotFound
from perdure.reports import report_tables
from perdure.reports.report_json import document
from perdure.rollouts import run_label
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.types import RolloutStatus, RunRequest

if TYPE_CHECKING:
    from perdure.cli.commands.run_options import LaunchOptions

MOST_RUNS = 64
CONCURRENCY: int = RunRequest.model_fields["concurrency"].default


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep, with the values in which it differs from the others."""

    values: Mapping[str, str]
    planned: CheckedRun

    @property
    def run_id(self) -> str:
        return self.planned.request.run_id


def combinations(given: Sequence[str]) -> list[dict[str, str]]:
    """`["agent=a,b", "sampling.temperature=0,1"]` -> four dicts, in the order of the options.

    A value that begins with a bracket or a brace is not split at its commas. Raises: ConfigurationError.
    """
    values: dict[str, list[str]] = {}
    for one in given:
        name, equals, text = one.partition("=")
        parts = [text] if text[:1] in ("[", "{") else text.split(",")
        if not (name and equals and all(parts)):
            raise ConfigurationError(f"--vary {one}: write it as KEY=VALUE,VALUE")
        values.setdefault(name, []).extend(parts)
    for name, found in values.items():
        if len(set(found)) < len(found):
            raise ConfigurationError(f"--vary {name}: a value is given twice; leave one out")
    made = [
        dict(zip(values, combination, strict=True)) for combination in product(*values.values())
    ]
    if len(made) > MOST_RUNS:
        raise ConfigurationError(f"--vary gives {len(made)} runs: at most {MOST_RUNS} are allowed")
    return made


def command_line(given: Mapping[str, Any], values: Mapping[str, str], runs: int) -> dict[str, Any]:
    """The options of one run. All `runs` runs share the concurrency evenly."""
    fields = [f"{name}={value}" for name, value in values.items() if name != "agent"]
    return {
        **given,
        "agent": values.get("agent", given["agent"]),
        "assignments": (*given["assignments"], *fields),
        "concurrency": max(1, (given["concurrency"] or CONCURRENCY) // runs),
    }


def show(runs: Sequence[SweptRun], *, as_json: bool) -> None:
    """Print what would run."""
    if as_json:
        documents = [run_launcher.document(one.planned) for one in runs]
        listed = zip(_listed(runs), documents, strict=True)
        answer([{**one, **document} for one, document in listed])
        return
    for one in runs:
        click.echo(run_name(one.values))
        run_launcher.show(one.planned, as_json=False)


def play(settings: Settings, runs: Sequence[SweptRun], launch: "LaunchOptions") -> int:
    """Start all runs, follow them, and print their table; return the exit code."""
    if len({one.run_id for one in runs}) < len(runs):
        raise ConfigurationError(
            "--vary: two combinations give the same run; leave one of them out"
        )
    for one in runs:
        run_launcher.ensure_stack_ready(settings, one.planned.request, joins=one.planned.joins)
    for note in dict.fromkeys(note for one in runs for note in one.planned.notes):
        say(note)
    return asyncio.run(_drive(settings, runs, launch))


async def _drive(settings: Settings, runs: Sequence[SweptRun], launch: "LaunchOptions") -> int:
    connection, store = await connect(settings), open_store(settings)
    handles: list[RunHandle] = []
    for one in runs:
        handles.append(await run_launcher.start(settings, connection, one.planned))
        await _name(store, one)
    if not launch.wait:
        if launch.as_json:
            answer(_listed(runs))
        else:
            click.echo("Repeat the command to follow the runs and to see their table.")
        return 0
    ends = [await run_launcher.follow_run(settings, one, notify=launch.notify) for one in handles]
    for one, end in zip(runs, ends, strict=True):
        for line in filter(None, (end.stopped, end.interrupted)):
            say(f"{one.run_id}: {line}")
    with_episodes = [one for one, end in zip(runs, ends, strict=True) if end.episodes]
    if not with_episodes:
        raise NotFound("no run of the sweep has an episode: `perdure status RUN` shows the reason")
    made = await run_reports.make(settings, [one.run_id for one in with_episodes], launch.prices)
    if launch.as_json:
        answer({"runs": _listed(runs), "report": document(made.reports, made.comparisons)})
    else:
        values = [one.values for one in with_episodes]
        run_reports.print_section(report_tables.sweep(made.reports, values, made.comparisons))
        click.echo(f"Report    perdure report {' '.join(one.run_id for one in with_episodes)}")
    return int(any(_is_incomplete(end) for end in ends))


def _is_incomplete(end: RunEnd) -> bool:
    failed = any(one.status is RolloutStatus.FAILED for one in end.episodes)
    return bool(end.stopped or failed or not end.episodes)


def _listed(runs: Sequence[SweptRun]) -> list[dict[str, Any]]:
    return [{"run_id": one.run_id, "values": one.values} for one in runs]


async def _name(store: Store, run: SweptRun) -> None:
    """Name the run after its values, for lists and reports, unless it has a name."""

    def named(label: run_label.RunLabel) -> run_label.RunLabel:
        return label.model_copy(update={"name": label.name or run_name(run.values)})

    await run_label.change(store, run.run_id, named)


def run_name(values: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
