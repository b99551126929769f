"""Imports a whole source of rows into the catalog."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from perdure.errors import InstanceError, RetryHere
from perdure.instances import build_contexts, instance_catalog
from perdure.instances.recipes.public_dataset import PublicSet
from perdure.instances.rows.format_recognition import read_instance_id
from perdure.instances.rows.row_choice import ALL, Choice
from perdure.instances.rows.row_conversion import dataset_name, to_instance
from perdure.instances.rows.row_fields import Row
from perdure.instances.rows.row_readers import NumberedRow, read_rows
from perdure.storage.base import Store
from perdure.types import Instance

AT_ONCE = 32
"""Rows to convert at a time: some formats fetch commits, which takes seconds per row."""


class ImportedRow(NamedTuple):
    """The import result of one row."""

    number: int
    instance_id: str
    """Empty if the row names none."""
    problem: str = ""
    """Why it was not imported."""
    is_left: bool = False
    """Not imported yet: no command has asked for it."""


@dataclass(frozen=True)
class ImportReport:
    """The state of a dataset's rows after an import, in row order."""

    dataset: str
    rows: Sequence[ImportedRow]

    @property
    def refs(self) -> list[str]:
        here = (row for row in self.rows if row.instance_id and not row.problem)
        return [f"{self.dataset}/{row.instance_id}" for row in here if not row.is_left]

    @property
    def problems(self) -> list[str]:
        """One line for each row that could not be imported."""
        return [row.problem for row in self.rows if row.problem]

    @property
    def left(self) -> int:
        """Number of rows that are not imported yet."""
        return sum(row.is_left for row in self.rows)


async def import_rows(
    store: Store,
    source: str | Path | PublicSet,
    dataset: str | None = None,
    choice: Choice = ALL,
    validate: Callable[[Instance], None] | None = None,
    *,
    keep: bool = False,
) -> ImportReport:
    """Import the chosen rows of `source` into the catalog; bad rows are reported and skipped.

    A limit counts the rows of a file in their order, and those of a public set by id, as a run
    does. `dataset`: its name in the catalog; the default is the file's name or the recipe's.
    `validate`: a further check (the grader's), which raises InstanceError. `keep`: do not read
    imported rows again.
    Raises: ConfigurationError or MissingDependency when the source cannot be read at all; RetryHere
    naming the row whose repository cannot be reached. Rows imported earlier stay.
    """
    own_name = source.recipe.name if isinstance(source, PublicSet) else dataset_name(str(source))
    name = dataset or own_name
    rows = [ImportedRow(**row) for row in await instance_catalog.load_import(store, name) or ()]
    if keep and rows and _Import(source, name, rows, choice, keep=keep).is_complete():
        return ImportReport(name, rows)
    listed = await asyncio.to_thread(lambda: list(_listed(source, rows, keep=keep)))
    running = _Import(source, name, listed, choice, keep=keep, validate=validate)
    try:
        await running.save(store)  # marks the dataset as partial if this process is killed
        await running.play(store)
    finally:
        await running.save(store)
    return ImportReport(name, running.rows)


async def earlier_import(store: Store, dataset: str) -> ImportReport | None:
    """The state of this dataset's rows after earlier imports; None if there were none."""
    rows = await instance_catalog.load_import(store, dataset)
    return None if rows is None else ImportReport(dataset, [ImportedRow(**row) for row in rows])


class _Import:
    """One import: converts the chosen rows in rounds, until enough of them are good."""

    def __init__(
        self,
        source: str | Path | PublicSet,
        dataset: str,
        rows: list[ImportedRow],
        choice: Choice,
        *,
        keep: bool,
        validate: Callable[[Instance], None] | None = None,
    ) -> None:
        self.source = source
        self.published = source if isinstance(source, PublicSet) else None
        self.dataset = dataset
        self.rows = rows
        self.choice = choice
        self.validate = validate
        self._done = {place for place, row in enumerate(rows) if keep and not row.is_left}
        """Positions of rows that need no further conversion."""
        good = (place for place in self._done if not self.rows[place].problem)
        self._first = {self.rows[place].instance_id: place for place in good}
        """Instance id -> the position of its row."""

    def is_complete(self) -> bool:
        """Whether every row that the choice asks for is imported."""
        return not self._round()

    async def save(self, store: Store) -> None:
        rows = [row._asdict() for row in self.rows]
        await instance_catalog.save_import(store, self.dataset, rows)

    async def play(self, store: Store) -> None:
        """Raises: RetryHere naming the row."""
        with ThreadPoolExecutor(AT_ONCE, "import") as threads:
            while places := self._round():
                rows = enumerate(_read(self.source))
                asked = ((place, row) for place, row in rows if place in places)
                while some := list(islice(asked, AT_ONCE)):
                    await self._convert(store, threads, some)
                self._done |= places  # ends the loop even if the source became shorter

    def _round(self) -> set[int]:
        """Positions of the rows to convert next; empty if the choice is complete."""
        unnamed = {place for place in self._open() if not self.rows[place].instance_id}
        if unnamed and self.published:  # the limit counts by id, so all ids must be known
            return unnamed
        chosen: set[int] = set()
        counted = 0
        for place in self._order():
            row, is_open = self.rows[place], place not in self._done
            if counted == self.choice.limit:
                break
            if not (self.choice.wants(row.instance_id) or (is_open and not row.instance_id)):
                continue
            if is_open:
                chosen.add(place)
            counted += is_open or not (row.problem and self.choice.skip_bad_rows)
        return chosen

    def _order(self) -> Sequence[int]:
        places = range(len(self.rows))
        if self.published is None:
            return places
        return sorted(places, key=lambda place: self.rows[place].instance_id)

    def _open(self) -> Iterator[int]:
        return (place for place in range(len(self.rows)) if place not in self._done)

    async def _convert(
        self, store: Store, threads: ThreadPoolExecutor, some: Sequence[tuple[int, NumberedRow]]
    ) -> None:
        loop, away = asyncio.get_running_loop(), list[RetryHere]()
        reads = [loop.run_in_executor(threads, self._instance_of, row) for _, row in some]
        results = await asyncio.gather(*reads, return_exceptions=True)
        for (place, row), result in zip(some, results, strict=True):
            if isinstance(result, RetryHere):
                where = f"row {row.number} ({self.rows[place].instance_id})"
                away.append(RetryHere(f"{where}: {result}", boundary=result.boundary))
                continue
            self._done.add(place)
            self.rows[place] = await self._kept(store, row, place, result)
        if away:
            raise away[0]

    async def _kept(
        self, store: Store, row: NumberedRow, place: int, result: Instance | BaseException
    ) -> ImportedRow:
        """Save the instance. Raises: `result`, if it is an error that the row did not cause."""
        if isinstance(result, Instance):
            own = result.instance_id
            if self._first.setdefault(own, place) == place:
                try:
                    await instance_catalog.save(
                        store, await build_contexts.store_contexts(store, result)
                    )
                except InstanceError as error:
                    return ImportedRow(row.number, own, f"row {row.number}: {error}")
                return ImportedRow(row.number, own)
            repeats = f"row {row.number} repeats the `instance_id` {own!r} of an earlier row"
            return ImportedRow(row.number, own, repeats)
        if not isinstance(result, InstanceError):
            raise result
        given = row.fields.get("instance_id")
        return ImportedRow(row.number, given if isinstance(given, str) else "", str(result))

    def _instance_of(self, row: NumberedRow) -> Instance:
        """Convert and check the row; runs in a thread. Raises: InstanceError, RetryHere."""
        if row.problem:
            raise InstanceError(row.problem)
        instance = to_instance(row.fields, self.dataset, row.number, _folder_of(self.source))
        try:
            if self.published:
                instance = self.published.finished(instance)
            if self.validate is not None:
                self.validate(instance)
        except InstanceError as error:
            problem = str(error).removeprefix(f"{instance.ref}: ")
            where = f"row {row.number}{'' if problem.startswith('lacks ') else ':'}"
            raise InstanceError(f"{where} {problem}") from error
        return instance


def _read(source: str | Path | PublicSet) -> Iterator[NumberedRow]:
    return source.read() if isinstance(source, PublicSet) else read_rows(str(source))


def _listed(
    source: str | Path | PublicSet, earlier: Sequence[ImportedRow], *, keep: bool
) -> Iterator[ImportedRow]:
    """The rows of the source, with their state after earlier imports."""
    for place, row in enumerate(_read(source)):
        given = "" if row.problem else read_instance_id(Row(row.number, row.fields))
        known = earlier[place] if place < len(earlier) else ImportedRow(0, "", is_left=True)
        if known.is_left or given not in ("", known.instance_id):
            yield ImportedRow(row.number, given, is_left=True)
        else:  # without `keep` the source may have changed, so its current id replaces the old one
            yield known if keep else known._replace(instance_id=given)


def _folder_of(source: str | Path | PublicSet) -> Path:
    """The folder from which relative paths in the rows start."""
    if isinstance(source, PublicSet):
        return _folder_of(source.elsewhere) if source.elsewhere else source.folder
    path = Path(source)
    return path if path.is_dir() else path.parent
