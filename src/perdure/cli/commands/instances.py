"""`perdure instances`: build, import, list and show the problems that agents work on."""

import asyncio
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import signal_cleanup
from perdure.cli.commands import completion
from perdure.cli.commands.calibrate import calibrate
from perdure.cli.console import answer, invoked_command, json_option, many, only_one_of, say
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from perdure.instances.calibration_proof import Calibrated, MakeSandbox
    from perdure.instances.recipes.dataset_build import Built
    from perdure.instances.recipes.dataset_recipe import Recipe
    from perdure.types import Instance

SANDBOX = "bubblewrap"
"""The provider whose sandboxes build and calibrate environments."""


@click.group()
def instances() -> None:
    """Build, import, calibrate, list and show instances."""


instances.add_command(calibrate)


@instances.command()
@click.argument("dataset", default="first-steps")
@click.option(
    "-i", "--include", multiple=True, metavar="GLOB", help="Only instance ids that match."
)
@click.option("--demo", is_flag=True, help="Only the quick entries that `perdure demo` uses.")
@click.option("--runs", type=click.IntRange(1, 20), default=3, metavar="N", show_default=True,
              help="Test runs with and without the gold patch; only stable tests are kept.")  # fmt: skip
@click.option("--twins", type=click.IntRange(0, 20), default=5, metavar="N", show_default=True,
              help="Most twins per FAIL_TO_PASS test; 0: grades stay unverified.")  # fmt: skip
@click.option("-l", "--limit", type=click.IntRange(1), metavar="N", help="Try at most N entries.")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N",
              help="Entries built at a time.  [default: one per core]")  # fmt: skip
@click.option(
    "--rebuild", is_flag=True, help="Also build entries that are in the store or made no row."
)
@json_option
def build(
    *,
    dataset: str,
    include: tuple[str, ...],
    demo: bool,
    runs: int,
    twins: int,
    limit: int | None,
    jobs: int | None,
    rebuild: bool,
    as_json: bool,
) -> None:
    """Build instances from a recipe or a git clone.

    DATASET is a folder under datasets/ (default: first-steps), any folder with a dataset.toml, or a
    git clone: its newest commits that touch both tests and code become rows.

    Builds the environment of each entry, runs the tests with and without the gold patch, and keeps
    the stable tests. Ctrl-C and SIGTERM end its sandboxes; repeat the command to continue where it
    stopped. Exit code 1: an entry could not be built.
    """
    settings = load_settings()
    built = signal_cleanup.run(
        build_dataset(
            settings,
            dataset,
            include,
            demo=demo,
            runs=runs,
            twins=twins,
            limit=limit,
            jobs=jobs,
            rebuild=rebuild,
        )
    )
    if as_json:
        answer({"dataset": dataset, "instances": [_built_document(one) for one in built]})
    else:
        good = [one.instance for one in built if one.instance is not None]
        click.echo(f"{len(good)} of {many(len(built), 'instance')} in {settings.store_url}")
        if good:
            click.echo(f"Next      {invoked_command()} run {good[0].dataset} --agent oracle")
    if any(one.problem for one in built):
        raise click.exceptions.Exit(1)


async def build_dataset(
    settings: Settings,
    dataset: str,
    only: tuple[str, ...] = (),
    *,
    demo: bool = False,
    runs: int = 3,
    twins: int = 5,
    limit: int | None = None,
    jobs: int | None = None,
    rebuild: bool = False,
) -> "list[Built]":
    """Build all entries and print each result. Raises: ConfigurationError, MissingDependency."""
    from perdure.instances.recipes import dataset_build
    from perdure.stack.home_providers import ready_provider
    from perdure.storage.store_url import open_store

    recipe, folder = _recipe_of(dataset, limit)
    known = await asyncio.to_thread(dataset_build.candidates_of, recipe, folder, demo=demo)
    candidates = dataset_build.chosen(known, only, limit)
    say(f"Building {many(len(candidates), 'instance')} of {recipe.name} ...")
    built = []
    builder = dataset_build.Builder(
        settings.home.absolute(),
        open_store(settings),
        ready_provider(settings, SANDBOX),
        recipe,
        functools.partial(_proved, runs=runs, twins=2 if demo else twins),
        build_hosts=settings.sandbox.build_hosts,
    )
    async for one in dataset_build.build_all(builder, candidates, rebuild=rebuild, jobs=jobs or 0):
        built.append(one)
        say(f"  {_told(one)}{_otherwise(one, recipe.counted)}")
    return sorted(built, key=lambda one: one.instance_id)


async def _proved(
    instance: "Instance", make_sandbox: "MakeSandbox", *, runs: int, twins: int
) -> "Calibrated":
    """Compute the row's test lists; a row that is graded by one command has none."""
    from perdure.graders.gold_and_base_check import calibrate, verify

    prove = verify if instance.grading.protocol == "eval_cmd" else calibrate
    return await prove(instance, make_sandbox, runs=runs, twins=twins)


def _recipe_of(dataset: str, limit: int | None) -> "tuple[Recipe, Path]":
    """The recipe and its folder. A git clone without a recipe gets one made from its history."""
    from perdure.instances.recipes.dataset_recipe import (
        FILE,
        History,
        Recipe,
        load_recipe,
        recipe_folder,
    )
    from perdure.types import slugify

    folder = Path(dataset).absolute()
    if (folder / ".git").exists() and not (folder / FILE).is_file():
        history = History(repository=str(folder), **({"limit": limit} if limit else {}))
        return Recipe(name=slugify(folder.name), histories=(history,)), folder
    folder = recipe_folder(dataset)
    return load_recipe(folder), folder


@instances.command("import")
@click.argument("source")
@click.option(
    "--dataset", metavar="NAME", help="Name in the store.  [default: the name of the file]"
)
@click.option("-l", "--limit", type=click.IntRange(1), metavar="N", help="Read at most N rows.")
@json_option
def import_(source: str, dataset: str | None, limit: int | None, as_json: bool) -> None:
    """Import rows from a file, a folder or a Hugging Face dataset.

    SOURCE is a .jsonl, .json or .parquet file, a folder of them, a Hugging Face name
    owner/name[:split], or a public set of datasets/, such as swe-bench-verified. If --dataset names
    a public set, the rows get its defaults, wherever they come from.

    stderr names each bad row with its number, the field and the fix. The other rows are imported.
    Exit code 1: there was a bad row.
    """
    settings = load_settings()
    from dataclasses import replace

    from perdure.cli.runs.instance_selection import check_row, find_public_rows
    from perdure.data_source_handlers import import_handlers
    from perdure.instances.rows.row_choice import Choice
    from perdure.instances.rows.row_import import import_rows
    from perdure.storage.store_url import open_store

    import_handlers(settings.handlers)
    published = find_public_rows(dataset or source)
    if published is not None and dataset is not None and source != published.recipe.name:
        published = replace(published, elsewhere=source)
    store, choice = open_store(settings), Choice(limit=limit)
    report = asyncio.run(import_rows(store, published or source, dataset, choice, check_row))
    for problem in report.problems:
        click.echo(f"error: {source}: {problem}", err=True)
    if as_json:
        answer({"dataset": report.dataset, "instances": report.refs, "problems": report.problems})
    else:
        click.echo(f"{many(len(report.refs), 'instance')} imported as {report.dataset}")
        if report.refs:
            click.echo(f"Next      {invoked_command()} run {report.dataset} --agent oracle")
    if report.problems:
        raise click.exceptions.Exit(1)


@instances.command("list")
@click.argument("dataset", required=False, shell_complete=completion.datasets)
@json_option
def list_(dataset: str | None, as_json: bool) -> None:
    """List the datasets in the store, or with DATASET its instances.

    Each instance is followed by its calibration result.
    """
    settings = load_settings()
    found = asyncio.run(_listed(settings, dataset))
    left = asyncio.run(_rows_left(settings, list(found)))
    if dataset:
        _list_one(settings, dataset, found[dataset], left[dataset], as_json)
        return
    if as_json:
        answer(found)
        return
    for name, refs in found.items():
        click.echo(_counted(name, len(refs), left[name]))
    if not found:
        click.echo(
            f"No instances in {settings.store_url}: make some with `perdure instances build`"
        )


@instances.command()
@click.argument("ref", metavar="DATASET/INSTANCE")
@click.option("--gold", is_flag=True, help="Print only the gold patch, byte for byte.")
@click.option("--tests", is_flag=True, help="Print only the hidden test patch, byte for byte.")
@json_option
def show(ref: str, gold: bool, tests: bool, as_json: bool) -> None:
    """Show one instance: its problem, environment and grading."""
    only_one_of(gold=gold, tests=tests, json=as_json)
    settings = load_settings()
    from perdure.cli import calibration_labels
    from perdure.instances import calibration_record, instance_catalog
    from perdure.storage.store_url import open_store

    store = open_store(settings)
    instance = asyncio.run(instance_catalog.load(store, ref))
    if gold or tests:
        sys.stdout.buffer.write(instance.gold_patch if gold else instance.grading.test_patch)
        return
    records = asyncio.run(calibration_record.records(store, [ref]))[ref]
    if as_json:
        found = [record.model_dump(mode="json") for record in records]
        answer({**instance.model_dump(mode="json"), "calibration": found})
        return
    grading = instance.grading
    facts = {
        "instance": instance.ref,
        "repository": f"{instance.repo} {instance.base_commit or ''}".strip(),
        "source": instance.source.requirement or instance.source.key or instance.source.kind.value,
        "python": instance.environment.python,
        "grader": f"{grading.protocol}: {grading.test_cmd or grading.eval_cmd or ''}",
        "tests": f"{len(grading.fail_to_pass)} to fix, {len(grading.pass_to_pass)} to keep",
        "gold": f"{len(instance.gold_patch)} bytes (--gold prints it)",
        "calibration": "; ".join(map(calibration_labels.label_record, records))
        or calibration_labels.NOT_CALIBRATED,
    }
    for name, value in facts.items():
        click.echo(f"{name:<13}{value}")
    click.echo(f"\n{instance.problem_statement.strip()}")


def _counted(dataset: str, here: int, left: int) -> str:
    """`suite (40)`, `suite (1 of 40 rows; the others are imported when a command needs them)`."""
    rest = f" of {here + left} rows; the others are imported when a command needs them"
    return f"{dataset} ({here}{rest if left else ''})"


def _list_one(settings: Settings, dataset: str, refs: list[str], left: int, as_json: bool) -> None:
    from perdure.cli import calibration_labels
    from perdure.instances import calibration_record
    from perdure.storage.store_url import open_store

    records = asyncio.run(calibration_record.records(open_store(settings), refs))
    if as_json:
        fields = {"sandbox", "state", "reason"}
        told = [
            {
                "ref": ref,
                "calibration": [one.model_dump(mode="json", include=fields) for one in here],
            }
            for ref, here in records.items()
        ]
        answer({"dataset": dataset, "rows_left": left, "instances": told})
        return
    click.echo(_counted(dataset, len(refs), left))
    wide = max(map(len, refs))
    for ref, here in records.items():
        click.echo(f"  {ref:<{wide}}  {calibration_labels.label_records(here)}")


async def _listed(settings: Settings, dataset: str | None) -> dict[str, list[str]]:
    from perdure.errors import NotFound
    from perdure.instances import instance_catalog
    from perdure.storage.store_url import open_store

    store = open_store(settings)
    names = [dataset] if dataset else await instance_catalog.datasets(store)
    found = {name: await instance_catalog.refs(store, name) for name in names}
    if dataset and not found[dataset]:
        there = ", ".join(await instance_catalog.datasets(store)) or "none yet"
        raise NotFound(f"no dataset {dataset!r} in {store.url} (it has: {there})")
    return {name: refs for name, refs in found.items() if refs}


async def _rows_left(settings: Settings, datasets: list[str]) -> dict[str, int]:
    """How many rows of each dataset's source are not imported yet."""
    from perdure.instances.rows.row_import import earlier_import
    from perdure.storage.store_url import open_store

    store = open_store(settings)
    reports = [await earlier_import(store, name) for name in datasets]
    counts = [0 if report is None else report.left for report in reports]
    return dict(zip(datasets, counts, strict=True))


def _told(one: "Built") -> str:
    if one.problem:
        return f"{one.instance_id}: not built: {one.problem}"
    if one.report is None:
        return f"{one.instance_id}: kept"
    if not one.report.fail_to_pass:
        return f"{one.instance_id}: resolved with the gold patch, not without ({one.seconds:.0f} s)"
    tests = f"{many(one.report.fail_to_pass, 'test')} to fix, {one.report.pass_to_pass} to keep"
    unstable = f", {len(one.report.unstable)} unstable left out" if one.report.unstable else ""
    if without := len(one.report.without_twins):
        unstable += f", {without} without a twin"
    return f"{one.instance_id}: {tests}{unstable} ({one.seconds:.0f} s)"


def _otherwise(one: "Built", counted: dict[str, tuple[int, int]]) -> str:
    """A remark if the recipe's author counted other tests; otherwise empty."""
    there = counted.get(one.instance_id)
    if one.report is None or there in (None, (one.report.fail_to_pass, one.report.pass_to_pass)):
        return ""
    return f"; the recipe counts {there[0]} to fix, {there[1]} to keep"


def _built_document(one: "Built") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "instance_id": one.instance_id,
        "ref": one.instance.ref if one.instance else None,
        "problem": one.problem or None,
        "seconds": round(one.seconds, 1),
        "calibration": asdict(one.report) if one.report else None,
    }
