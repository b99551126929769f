"""Finds the instances of SOURCE: a dataset, one instance, a file, a folder or a hub dataset."""

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.data_source_handlers import handler_of
from perdure.errors import ConfigurationError, InstanceError, NotFound
from perdure.graders.diff import git_diff_parser
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.recipes.dataset_recipe import find_recipe, load_recipe, recipe_names
from perdure.instances.recipes.public_dataset import PublicSet
from perdure.instances.rows.row_choice import ALL, Choice
from perdure.instances.rows.row_conversion import dataset_name
from perdure.instances.rows.row_import import (
    ImportedRow,
    ImportReport,
    import_rows,
)
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import CalibrationState, Instance

FILES = (".jsonl", ".json", ".parquet")
ALIASES = {
    name: f"swe-bench-{name}" for name in ("lite", "multilingual", "multimodal", "pro", "verified")
}
"""Short names of published sets. A dataset of that name in the store takes precedence."""
SHORT_LIST = 200
"""A longer list of references goes into the store instead of the request."""


@dataclass(frozen=True)
class Selection:
    """The instances of a source. `refs` None: the whole dataset. `digest` depends on the content."""

    label: str
    dataset: str
    refs: tuple[str, ...] | None
    digest: str
    notes: tuple[str, ...] = ()


class NoRowsSelected(ConfigurationError):
    """--include and --exclude select no row of the source."""


async def resolve(store: Store, source: str, choice: Choice = ALL) -> Selection:
    """Find the instances, importing a file, a folder or a published dataset first.

    Raises: ConfigurationError (no such source; it lists the known ones), InstanceError (one of the
    chosen rows is bad).
    """
    if not source:
        raise ConfigurationError("SOURCE is empty: name a dataset, an instance, or a file of rows")
    path = Path(source)
    if path.suffix.lower() in FILES:
        return await _imported(store, source, choice)
    there = path.is_dir()
    if path.is_file() or (source.startswith(("/", ".", "~")) and not there):
        raise ConfigurationError(f"{source} is not a file of rows: give a {', '.join(FILES)} file")
    if "/" not in source:
        return await _dataset(store, source, choice)
    dataset = source.split("/", 1)[0]
    if not there and await instance_catalog.refs(store, dataset):
        try:
            instance = await instance_catalog.load(store, source)
        except NotFound as error:
            raise ConfigurationError(str(error)) from None
        return Selection(instance.instance_id, dataset, (instance.ref,), instance.ref)
    return await _imported(store, source, choice)


async def keep_list(store: Store, run_id: str, source: Selection) -> None:
    """Store a long list of references where the run looks first. A joined run keeps its list."""
    if source.refs is not None and len(source.refs) > SHORT_LIST:
        listed = json.dumps(list(source.refs), indent=0).encode()
        await store.put_if_absent(store_keys.run_instances(run_id), listed)


def check_row(instance: Instance) -> None:
    """Check that a row has what the oracle and its grader need. Raises: InstanceError."""
    try:
        git_diff_parser.parse(instance.gold_patch)
    except git_diff_parser.MalformedDiff as error:
        raise InstanceError(f"`patch` is not a git diff: {error}") from error
    handler_of(instance.data_source).validate(instance)


async def _dataset(store: Store, name: str, choice: Choice) -> Selection:
    """A dataset in the store. A public set is imported at its first use."""
    if name in ALIASES and not await instance_catalog.refs(store, name):
        name = ALIASES[name]
    published = find_public_rows(name)
    if published is not None:
        wanted = await _without_quarantined(store, name, choice)
        report = await import_rows(store, published, None, wanted, check_row, keep=True)
        by_id = sorted(report.rows, key=lambda row: row.instance_id)  # as the store lists them
        notes = _judged(name, report, by_id, choice)
        return Selection(name, name, None, f"dataset:{name}", notes)
    if not await instance_catalog.refs(store, name):
        raise ConfigurationError(await _unknown(store, name))
    return Selection(name, name, None, f"dataset:{name}")


async def _without_quarantined(store: Store, dataset: str, choice: Choice) -> Choice:
    """Raise the limit by the number of quarantined rows, which a run leaves out."""
    if choice.limit is None:
        return choice
    known = await calibration_record.records(store, await instance_catalog.refs(store, dataset))
    bad = [r for r in known.values() if any(x.state is CalibrationState.QUARANTINED for x in r)]
    return replace(choice, limit=choice.limit + len(bad))


def find_public_rows(name: str) -> PublicSet | None:
    """The public rows that this dataset's recipe names; None if it names none."""
    folder = find_recipe(name)
    recipe = load_recipe(folder) if folder is not None else None
    if folder is None or recipe is None or recipe.rows is None:
        return None
    return PublicSet(recipe, folder)


async def _unknown(store: Store, name: str) -> str:
    known = await instance_catalog.datasets(store)
    published = recipe_names()
    if name in published:
        return (
            f"dataset {name!r} is not built in {store.url}: `perdure instances build {name}`, "
            "or set PERDURE_HOME for another store"
        )
    close = difflib.get_close_matches(name, [*known, *published], n=1)
    meant = f"did you mean {close[0]!r}? Otherwise " if close else ""
    there = (
        f"(it has: {', '.join(known)})" if known else "(it has none; set PERDURE_HOME for another)"
    )
    give = "give one of them, " if known else "make one with `perdure instances build`, or give "
    return (
        f"no dataset {name!r} in {store.url} {there}: {meant}{give}"
        "a .jsonl, .json or .parquet file, or a Hugging Face name owner/name[:split]"
    )


async def _imported(store: Store, source: str, choice: Choice) -> Selection:
    report = await import_rows(store, source, None, choice, check_row)
    file = Path(source)
    content = file.read_bytes() if file.is_file() else source.encode()
    notes = _judged(source, report, report.rows, choice)
    digest = hashlib.sha256(content).hexdigest()
    here = (ref for ref in report.refs if choice.wants(ref.split("/", 1)[1]))
    refs = tuple(here)[: choice.limit]
    return Selection(dataset_name(source), report.dataset, refs, digest, notes)


def _judged(
    source: str, report: ImportReport, rows: Sequence[ImportedRow], choice: Choice
) -> tuple[str, ...]:
    """Notes about bad rows among the chosen ones. Other rows do not matter.

    Raises: InstanceError if a chosen row is bad and may not be skipped; ConfigurationError if no row
    is usable; NoRowsSelected.
    """
    asked = [row for row in rows if choice.wants(row.instance_id)]
    if rows and not asked:
        some = ", ".join(row.instance_id for row in rows[:3])
        raise NoRowsSelected(
            f"--include / --exclude select none of {len(rows)} instances (such as {some})"
        )
    if not choice.skip_bad_rows:
        asked = asked[: choice.limit]
    problems = [row.problem for row in asked if row.problem]
    if problems and not choice.skip_bad_rows:
        raise InstanceError(bad_rows(problems))
    if not any(row.instance_id and not row.problem and not row.is_left for row in asked):
        why = bad_rows(problems) if problems else "it must hold one JSON object per instance"
        raise ConfigurationError(f"{source} has no usable rows: {why}")
    return tuple(f"left out: {problem}" for problem in problems)


def bad_rows(problems: Sequence[str]) -> str:
    """An error message with the first problem, the number of others and the option that skips them."""
    more = len(problems) - 1
    others = f" (and {more} more bad row{'s' if more > 1 else ''})" if more else ""
    return f"dataset {problems[0]}{others}; skip {'them' if more else 'it'} with --skip-bad-rows"


def chosen(refs: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The references whose instance id matches a glob of `include` and none of `exclude`."""
    choice = Choice(tuple(include), tuple(exclude))
    return [ref for ref in refs if choice.wants(ref.split("/", 1)[1])]
