"""Reads runs for `perdure report`, and prints or writes their report."""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.cli.console import answer, invoked_command, print_table, say
from perdure.episodes.output_file import output_file
from perdure.errors import ConfigurationError, NotFound
from perdure.instances import instance_catalog
from perdure.reports import calibration_bounds, metric_loggers, report_tables, rollout_facts
from perdure.reports.published_page import published_page
from perdure.reports.published_report import published
from perdure.reports.report_json import document
from perdure.reports.rollout_facts import RunFacts
from perdure.reports.run_comparison import Comparison, compare
from perdure.reports.run_report import Report, build_report
from perdure.reports.token_prices import Prices, read_prices
from perdure.rollouts import run_label
from perdure.rollouts.retry_selection import planned
from perdure.rollouts.run_record import current_request
from perdure.sandboxes import phase_specs
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.store_url import store_to_read
from perdure.types import Instance, RunRequest


@dataclass(frozen=True)
class RunReports:
    """The report of some runs."""

    runs: Sequence[tuple[RunFacts, Report]]
    comparisons: Sequence[Comparison]

    @property
    def reports(self) -> list[Report]:
        return [report for _, report in self.runs]

    def sections(self) -> list[report_tables.Section]:
        return report_tables.sections(self.reports, self.comparisons)


async def make(settings: Settings, run_ids: Sequence[str], prices: Path | None) -> RunReports:
    """Raises: NotFound for a run without episodes; ConfigurationError for bad prices."""
    store = store_to_read(settings)
    known = read_prices(prices) if prices is not None else None
    for run_id in run_ids:
        await run_label.check_not_deleting(store, run_id)
    runs = [await rollout_facts.read_facts(store, run_id) for run_id in run_ids]
    for run in runs:
        if not run.rollouts and not run.unreadable:
            globs = "give whole names, not globs; " if set(run.run_id) & set("*?[") else ""
            raise NotFound(
                f"run {run.run_id!r} has no episodes in {store.url}: {globs}`perdure status` lists"
                " the runs"
            )
    made = [(run, await _report(store, run, runs, known)) for run in runs]
    made = [(run, await _labelled(store, report)) for run, report in made]
    others = [run for run in runs[1:] if not calibration_bounds.gives_bounds(run, runs[0])]
    return RunReports(made, [compare(runs[0], run) for run in others])


async def log(
    settings: Settings, run_ids: Sequence[str], tensorboard: Path | None, wandb: str | None
) -> list[Path]:
    """Write curves with TensorBoard's or W&B's client; return paths. Raises: MissingDependency."""
    store, written = store_to_read(settings), []
    for run_id in dict.fromkeys(run_ids):
        run = await rollout_facts.read_facts(store, run_id)
        if tensorboard is not None:
            written.append(metric_loggers.write_tensorboard(run, tensorboard))
        if wandb is not None:
            written.append(metric_loggers.write_wandb(run, wandb, Path("wandb")))
    return written


async def publish(
    settings: Settings, run_ids: Sequence[str], prices: Path | None, folder: Path
) -> list[Path]:
    """Write `report.json` and `report.html` of the first run; return their paths.

    Raises: NotFound; ConfigurationError if another run gives no bounds.
    """
    made = await make(settings, run_ids, prices)
    if made.comparisons:
        raise ConfigurationError(
            f"--publish takes one run, and runs of {', '.join(calibration_bounds.BOUND_AGENTS)}"
            f" for its bounds: leave out {made.comparisons[0].second}"
        )
    store, (run, report) = store_to_read(settings), made.runs[0]
    request = await current_request(store, run.run_id)
    refs = {ref for ref, _ in await _planned(store, request)}
    rows = {ref: await _row(store, ref) for ref in refs | {one.instance for one in run.rollouts}}
    found = published(run, report, request, await _identity(store, run.run_id), rows)
    texts = {"report.json": found.model_dump_json(indent=1) + "\n"}
    texts["report.html"] = published_page(found)
    for name, text in texts.items():
        with output_file(folder / name) as file:
            file.write(text.encode())
    return [folder / name for name in texts]


async def _row(store: Store, ref: str) -> Instance | None:
    with contextlib.suppress(NotFound):
        return await instance_catalog.load(store, ref)
    return None


async def _identity(store: Store, run_id: str) -> dict[str, str]:
    with contextlib.suppress(NotFound):
        found: dict[str, str] = json.loads((await store.get(store_keys.run_identity(run_id))).data)
        return found
    return {}


async def _labelled(store: Store, report: Report) -> Report:
    label = await run_label.read(store, report.run_id)
    return replace(report, name=label.name, tags=label.tags, note=label.note)


async def _report(
    store: Store, run: RunFacts, runs: Sequence[RunFacts], prices: Prices | None
) -> Report:
    request = await _request(store, run.run_id)
    known = calibration_bounds.of_runs(run, [one for one in runs if one is not run])
    if known.upper is None and known.floor is None:
        calibrated = await calibration_bounds.calibrated(store, run, _graded_in(request))
        if calibrated.instances:
            known = replace(calibrated, base_suite=known.base_suite)
    return build_report(
        run,
        planned=await _planned(store, request),
        bounds=known,
        prices=prices,
        stopped=await _stopped(store, run.run_id),
    )


async def _planned(store: Store, request: RunRequest | None) -> list[tuple[str, int]]:
    """Empty if the run has no list of instances yet."""
    with contextlib.suppress(NotFound):
        return await planned(store, request) if request is not None else []
    return []


async def _stopped(store: Store, run_id: str) -> str:
    """Why the budget ended the run, from its manifest; empty before the run ends."""
    try:
        manifest = json.loads((await store.get(store_keys.manifest(run_id))).data)
    except (NotFound, ValueError):
        return ""
    return str(manifest.get("stopped", "")) if isinstance(manifest, dict) else ""


async def _request(store: Store, run_id: str) -> RunRequest | None:
    """None if the run's rollouts were started by hand."""
    try:
        return await current_request(store, run_id)
    except NotFound:
        return None


def _graded_in(request: RunRequest | None) -> str:
    """The sandbox provider that grades; empty means any."""
    if request is None:
        return ""
    return phase_specs.place(request.rollout_request("any/instance"), None, "grade").provider


def print_document(made: RunReports) -> None:
    answer(document(made.reports, made.comparisons))


def print_text(made: RunReports) -> None:
    for section in made.sections():
        print_section(section)


def print_section(section: report_tables.Section) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=section.title, title_justify="left")
    table.caption, table.caption_justify = section.note or None, "left"
    for number, name in enumerate(section.columns):
        right = number and not section.texts
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    print_table(table)


def print_links(settings: Settings, made: RunReports) -> None:
    """Print links to the Web UI's failed workflows and the viewer, if known. It opens no connection."""
    from perdure.cli.temporal_connection import failed_link, known_ui, viewer_link
    from perdure.client.temporal_server import configured_server

    ui_url = known_ui(settings)
    for report in made.reports:
        if ui_url and report.failures:
            namespace = configured_server(settings).namespace
            say(f"Failed: {failed_link(ui_url, namespace, report.run_id)}")
        if viewer := viewer_link(settings, report.run_id):
            say(f"Viewer: {viewer}")


def write_page(made: RunReports, path: Path) -> None:
    """Raises: MissingDependency if matplotlib is not installed."""
    from perdure.reports.report_html import page
    from perdure.reports.svg_plots import plots

    title = " and ".join(report.run_id for report in made.reports)
    stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    text = page(title, made.sections(), plots(made.runs), f"{invoked_command()} report, {stamp}")
    with output_file(path) as file:
        file.write(text.encode())
