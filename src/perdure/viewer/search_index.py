"""The viewer's index: one SQLite file under `<home>/cache` with a row per rollout and texts to
search.

It caches the part of the store that was read, and may be deleted at any time. This module owns the
tables and their queries; `index_updates.py` fills them.
"""

import contextlib
import hashlib
import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from perdure.viewer.safe_text import readable

VERSION = 3
SCHEMA = """
CREATE TABLE runs (run TEXT PRIMARY KEY, manifest TEXT, about TEXT NOT NULL DEFAULT '{}');
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, instance TEXT NOT NULL, sample INTEGER NOT NULL,
  seen TEXT NOT NULL, searchable TEXT NOT NULL DEFAULT '', stage TEXT NOT NULL DEFAULT '',
  ending TEXT NOT NULL DEFAULT '', agent TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT '',
  agent_end TEXT NOT NULL DEFAULT '', boundary TEXT NOT NULL DEFAULT '',
  failure TEXT NOT NULL DEFAULT '', reward REAL, turns INTEGER, sampled INTEGER, seconds REAL,
  attempts INTEGER, version_min INTEGER, version_max INTEGER, finished REAL,
  named_rewards TEXT NOT NULL DEFAULT '{}',
  UNIQUE (run, instance, sample));
CREATE INDEX by_ending ON rollouts (run, ending);
CREATE VIRTUAL TABLE texts USING fts5 (body, tokenize = "unicode61 tokenchars '_'");
"""
SLOTS = 1 << 20
"""Slots for the texts of one rollout: its turns by index, then the two below. A text's rowid is
`rollout id * SLOTS + slot`, so a rollout's texts are a range."""
TESTS, PATCH = SLOTS - 2, SLOTS - 1
BEGIN, END = "\x02", "\x03"
"""Marks around a match in a snippet."""
MOST_BYTES = 4 << 30
"""File size beyond which the index adds no more texts."""
WORD = re.compile(r'"([^"]*)"|(\S+)')

Order = Literal["instance", "finished", "seconds", "turns", "sampled", "reward"]
ORDERS: dict[Order, str] = {
    "instance": "run, instance, sample",
    "finished": "finished DESC, id",
    "seconds": "seconds DESC, id",
    "turns": "turns DESC, id",
    "sampled": "sampled DESC, id",
    "reward": "reward DESC, run, instance, sample",
}


@dataclass(frozen=True)
class Row:
    """A rollout in a list. `ending` is its outcome, or its status if it has none. While the rollout
    is open, `ending` is empty and `stage` is its current stage."""

    run: str
    instance: str
    sample: int
    id: int = 0
    stage: str = ""
    ending: str = ""
    agent: str = ""
    model: str = ""
    agent_end: str = ""
    boundary: str = ""
    failure: str = ""
    reward: float | None = None
    turns: int | None = None
    sampled: int | None = None
    seconds: float | None = None
    attempts: int | None = None
    version_min: int | None = None
    version_max: int | None = None
    finished: float | None = None
    named_rewards: str = "{}"
    """JSON, by name."""


COLUMNS = tuple(Row.__dataclass_fields__)
WRITTEN = tuple(name for name in COLUMNS if name != "id")


@dataclass(frozen=True)
class Filters:
    """Selects the rollouts of a list. An empty field matches all."""

    run: str = ""
    instance: str = ""
    """A substring of the instance id."""
    ending: str = ""
    """An outcome, a status, or `open`."""
    agent_end: str = ""
    boundary: str = ""
    agent: str = ""
    q: str = ""
    """Words that one of its texts contains."""


@dataclass(frozen=True)
class Found:
    """A text that matches a search."""

    slot: int
    snippet: str


@dataclass(frozen=True)
class About:
    """A run's request and results; empty for rollouts that were started by hand."""

    agent: str = ""
    models: str = ""
    """The models that answered, once the run has ended."""
    stopped: str = ""
    """Why its budget stopped the run."""
    dataset: str = ""
    instances: int = 0
    samples: int = 1


@dataclass(frozen=True)
class RunTotals:
    run: str
    about: About = About()
    rollouts: int = 0
    ended: int = 0
    graded: int = 0
    resolved: int = 0
    reward: float | None = None
    """Mean over graded rollouts."""
    finished: float | None = None
    searchable: int = 0


def index_path(home: Path, store_url: str) -> Path:
    """The index file of a store."""
    name = hashlib.sha256(store_url.encode()).hexdigest()[:12]
    return home.absolute() / "cache" / "view" / f"{name}.sqlite"


class Index:
    """One index file. Threads share one connection for writes, and open one for each read."""

    def __init__(self, path: Path) -> None:
        """Opens the file. An unusable file is replaced by an empty one."""
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        try:
            self._writer = self._open()
        except sqlite3.DatabaseError:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._writer = self._open()

    def _open(self) -> sqlite3.Connection:
        """Raises: sqlite3.DatabaseError if the file is no database or has another version."""
        connection = sqlite3.connect(self.path, timeout=20, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            connection.close()
            raise sqlite3.DatabaseError(f"version {version}")
        return connection

    def close(self) -> None:
        self._writer.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, timeout=20)
        try:
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._writer:
            yield self._writer

    # -- runs ----------------------------------------------------------------------------------

    def about(self, run: str) -> tuple[str | None, About] | None:
        """The etag of the manifest that was read, and the run's facts; None for an unknown run."""
        with self._reading() as db:
            found = db.execute("SELECT manifest, about FROM runs WHERE run = ?", (run,)).fetchone()
        return (found[0], About(**json.loads(found[1]))) if found else None

    def note_run(self, run: str, manifest: str | None, about: About) -> None:
        with self._writing() as db:
            db.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?)",
                (run, manifest, json.dumps(asdict(about))),
            )

    def forget_runs(self, there: Sequence[str]) -> None:
        """Drop the runs that are no longer in the store."""
        with self._reading() as db:
            known = {run for (run,) in db.execute("SELECT run FROM runs")}
        for run in known - set(there):
            self.forget_run(run)

    def forget_run(self, run: str) -> None:
        with self._writing() as db:
            ids = [one for (one,) in db.execute("SELECT id FROM rollouts WHERE run = ?", (run,))]
            self._drop(db, ids)
            db.execute("DELETE FROM runs WHERE run = ?", (run,))

    def totals(self, run: str = "") -> list[RunTotals]:
        """The totals of all runs, the latest first, or of one run."""
        question = f"""
            SELECT runs.run, about, count(id), total(ending != ''), total(reward IS NOT NULL),
              total(ending = 'resolved'), avg(reward), max(finished), total(searchable != '')
            FROM runs LEFT JOIN rollouts USING (run) {"WHERE runs.run = ?" if run else ""}
            GROUP BY runs.run ORDER BY max(finished) IS NOT NULL, max(finished) DESC, runs.run"""
        with self._reading() as db:
            rows = db.execute(question, (run,) if run else ()).fetchall()
        return [
            RunTotals(
                name, About(**json.loads(about)), count, int(ended), int(graded), int(resolved), reward,
                finished, int(searchable),
            )
            for name, about, count, ended, graded, resolved, reward, finished, searchable in rows
        ]  # fmt: skip

    # -- rollouts ------------------------------------------------------------------------------

    def seen(self, run: str) -> dict[tuple[str, int], tuple[str, str]]:
        """(instance, sample) -> its state when last read, and when its texts were indexed."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT instance, sample, seen, searchable FROM rollouts WHERE run = ?", (run,)
            )
            return {(instance, sample): (seen, done) for instance, sample, seen, done in rows}

    def put(self, rows: Iterable[tuple[Row, str]]) -> None:
        """Insert or update rows, each with its state. `id` is ignored."""
        names = (*WRITTEN, "seen")
        changed = ", ".join(f"{name} = excluded.{name}" for name in names)
        statement = (
            f"INSERT INTO rollouts ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
            f" ON CONFLICT (run, instance, sample) DO UPDATE SET {changed}"
        )
        values = [(*(_clean(getattr(row, name)) for name in WRITTEN), seen) for row, seen in rows]
        with self._writing() as db:
            db.executemany(statement, values)

    def drop(self, run: str, gone: Iterable[tuple[str, int]]) -> None:
        with self._writing() as db:
            for instance, sample in gone:
                found = db.execute(
                    "SELECT id FROM rollouts WHERE run = ? AND instance = ? AND sample = ?",
                    (run, instance, sample),
                )
                self._drop(db, [one for (one,) in found])

    def _drop(self, db: sqlite3.Connection, ids: Sequence[int]) -> None:
        for one in ids:
            db.execute("DELETE FROM texts WHERE rowid BETWEEN ? AND ?", _texts_of(one))
            db.execute("DELETE FROM rollouts WHERE id = ?", (one,))

    def rows(self, filters: Filters, order: Order, start: int, count: int) -> list[Row]:
        where, values = _where(filters)
        question = (
            f"SELECT {', '.join(COLUMNS)} FROM rollouts {where}"
            f" ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?"
        )
        with self._reading() as db:
            return [Row(*row) for row in db.execute(question, (*values, count, start))]

    def count(self, filters: Filters) -> int:
        where, values = _where(filters)
        with self._reading() as db:
            (found,) = db.execute(f"SELECT count(*) FROM rollouts {where}", values).fetchone()
        return int(found)

    def groups(self, filters: Filters, start: int, count: int) -> list[list[Row]]:
        """The matching rollouts, grouped by instance."""
        where, values = _where(filters)
        page = f"SELECT DISTINCT instance FROM rollouts {where} ORDER BY instance LIMIT ? OFFSET ?"
        question = (
            f"SELECT {', '.join(COLUMNS)} FROM rollouts {where} AND instance IN ({page})"
            " ORDER BY instance, sample"
        )
        with self._reading() as db:
            found = [Row(*row) for row in db.execute(question, (*values, *values, count, start))]
        by_instance: dict[str, list[Row]] = {}
        for row in found:
            by_instance.setdefault(row.instance, []).append(row)
        return list(by_instance.values())

    def count_groups(self, filters: Filters) -> int:
        where, values = _where(filters)
        question = f"SELECT count(DISTINCT instance) FROM rollouts {where}"
        with self._reading() as db:
            return int(db.execute(question, values).fetchone()[0])

    def values(
        self, run: str, column: Literal["ending", "agent_end", "boundary", "agent"]
    ) -> dict[str, int]:
        """Value -> number of rollouts with it. Open rollouts have none."""
        question = (
            f"SELECT {column}, count(*) FROM rollouts WHERE run = ? AND {column} != ''"
            f" GROUP BY {column} ORDER BY count(*) DESC"
        )
        with self._reading() as db:
            return dict(db.execute(question, (run,)).fetchall())

    def beside(self, filters: Filters, instance: str, sample: int) -> tuple[Row | None, Row | None]:
        """The previous and the next rollout, ordered by instance and sample."""
        where, values = _where(filters)
        found: list[Row | None] = []
        for sign, direction in (("<", "DESC"), (">", "ASC")):
            question = (
                f"SELECT {', '.join(COLUMNS)} FROM rollouts {where}"
                f" AND (instance, sample) {sign} (?, ?)"
                f" ORDER BY instance {direction}, sample {direction} LIMIT 1"
            )
            with self._reading() as db:
                row = db.execute(question, (*values, instance, sample)).fetchone()
            found.append(Row(*row) if row else None)
        return found[0], found[1]

    # -- texts ---------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self.path.stat().st_size > MOST_BYTES

    def put_texts(
        self, run: str, instance: str, sample: int, seen: str, texts: Iterable[tuple[int, str]]
    ) -> None:
        """Replace a rollout's texts, given with their slots."""
        with self._writing() as db:
            found = db.execute(
                "SELECT id FROM rollouts WHERE run = ? AND instance = ? AND sample = ?",
                (run, instance, sample),
            ).fetchone()
            if found is None:
                return
            (one,) = found
            db.execute("DELETE FROM texts WHERE rowid BETWEEN ? AND ?", _texts_of(one))
            db.executemany(
                "INSERT INTO texts (rowid, body) VALUES (?, ?)",
                [(one * SLOTS + slot, readable(body)) for slot, body in texts],
            )
            db.execute("UPDATE rollouts SET searchable = ? WHERE id = ?", (seen, one))

    def snippets(self, rows: Sequence[Row], q: str, each: int = 2) -> dict[int, list[Found]]:
        """Rollout id -> its first texts that match."""
        words = match(q)
        found: dict[int, list[Found]] = {}
        if not words:
            return found
        question = (
            f"SELECT rowid, snippet(texts, 0, '{BEGIN}', '{END}', '…', 24) FROM texts"
            " WHERE texts MATCH ? AND rowid BETWEEN ? AND ? LIMIT ?"
        )
        with self._reading() as db:
            for row in rows:
                hits = db.execute(question, (words, *_texts_of(row.id), each))
                found[row.id] = [Found(rowid % SLOTS, text) for rowid, text in hits]
        return found


def match(q: str) -> str:
    """Convert a user's search to an FTS5 query: all words must match, the last one as a prefix, "a
    phrase" as a whole."""
    words = [(phrase or word, not phrase) for phrase, word in WORD.findall(q.replace("\0", " "))]
    kept = [(text.replace('"', ""), open_end) for text, open_end in words if re.search(r"\w", text)]
    last = len(kept) - 1
    return " ".join(
        f'"{text}"{"*" if open_end and number == last else ""}'
        for number, (text, open_end) in enumerate(kept)
    )


def _clean(value: object) -> object:
    """Remove lone surrogates, which JSON can hold and SQLite cannot."""
    return readable(value) if isinstance(value, str) else value


def _texts_of(rollout: int) -> tuple[int, int]:
    return rollout * SLOTS, rollout * SLOTS + SLOTS - 1


def _where(filters: Filters) -> tuple[str, tuple[object, ...]]:
    parts: list[str] = ["1"]
    values: list[object] = []
    for name in ("run", "agent_end", "boundary", "agent"):
        if given := getattr(filters, name):
            parts.append(f"{name} = ?")
            values.append(given)
    if filters.ending:
        parts.append("ending = ?")
        values.append("" if filters.ending == "open" else filters.ending)
    if filters.instance:
        parts.append("instr(instance, ?)")
        values.append(filters.instance)
    if filters.q:
        words = match(filters.q)
        found = (
            f"SELECT DISTINCT rowid / {SLOTS} FROM texts WHERE texts MATCH ?" if words else "NULL"
        )
        parts.append(f"id IN ({found})")
        values += [words] if words else []
    return f"WHERE {' AND '.join(parts)}", tuple(values)
