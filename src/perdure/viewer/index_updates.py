"""Updates the index from the store: first a run's manifest, then its rollouts, then its texts.

A page starts a reading of its run and waits for a moment; the reading continues in the background.
A run is read again only after ten times the duration of its last reading, so an open viewer uses at
most a tenth of a core.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from perdure.episodes import turns_parquet
from perdure.errors import NotFound, PerdureError
from perdure.reports import stored_rollout
from perdure.reports.rollout_facts import RolloutFacts, parse_facts
from perdure.reports.stored_rollout import RolloutName, StoredRollout
from perdure.rollouts import run_label
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.viewer.conversation_view import turn_texts
from perdure.viewer.search_index import PATCH, TESTS, About, Index, Row

WAIT_S = 0.4
"""Seconds that a page waits for a reading before it shows the index as it is."""
FIRST_S = 10.0
"""Seconds that it waits for the first rollouts of a run."""
PAUSE = 10
"""The pause after a reading is this many times its duration."""
SHORTEST_PAUSE_S = 2.0
AT_ONCE = 64
"""Episodes to read between two writes to the index."""
TEXT_CHARS, ROLLOUT_CHARS = 4_000, 100_000
"""Characters to index of one turn, and of one rollout."""
PATCH_BYTES = 20_000
STAGES = (
    ("grade-", "grade"),
    ("patch.json", "grade"),
    ("agent.json", "capture"),
    ("sandbox.json", "agent"),
)
"""Prefix of a file name -> the stage that follows. The first entry with a file gives the stage."""
RUNS = ""
"""In place of a run: the list of runs."""


@dataclass
class _Reading:
    task: asyncio.Task[None]
    began_list: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the index has rows to show."""
    rests_until: float = float("inf")
    problem: str = ""


@dataclass
class _Files:
    """The files of a rollout, from a listing of the store."""

    episodes: list[str] = field(default_factory=list)
    attempt: int = 0
    files: list[str] = field(default_factory=list)
    """Names of the last attempt's files."""

    @property
    def seen(self) -> str:
        """A state that changes when an episode is written or replaced (the old one is kept)."""
        return ",".join(sorted(self.episodes)) or f"{self.attempt}:{self.stage}"

    @property
    def stage(self) -> str:
        for beginning, stage in STAGES:
            if any(name.startswith(beginning) for name in self.files):
                return stage
        return "boot"

    def add(self, parts: Sequence[str]) -> None:
        """`parts`: the parts of a key below the rollout's folder."""
        if len(parts) == 1 and parts[0].startswith("episode") and parts[0].endswith(".json"):
            self.episodes.append(parts[0])
        elif len(parts) == 3 and parts[0] == "attempts" and parts[1].isdigit():
            number = int(parts[1])
            if number > self.attempt:
                self.attempt, self.files = number, []
            if number == self.attempt:
                self.files.append(parts[2])


class Readings:
    """The current and last reading of each run."""

    def __init__(self, store: Store, index: Index) -> None:
        self.store = store
        self.index = index
        self._known: dict[str, _Reading] = {}

    async def bring(self, run: str, wait: float = WAIT_S) -> str:
        """Read a run, or the list of runs, unless paused. Returns `reading` or the problem."""
        found = self._known.get(run)
        if found is None or (found.task.done() and time.monotonic() >= found.rests_until):
            found = _Reading(asyncio.create_task(self._read(run)))
            self._known[run] = found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await found.began_list.wait()
        await asyncio.wait({found.task}, timeout=wait)
        return found.problem if found.task.done() else "reading"

    async def aclose(self) -> None:
        for found in self._known.values():
            found.task.cancel()
        await asyncio.gather(*(one.task for one in self._known.values()), return_exceptions=True)

    async def _read(self, run: str) -> None:
        began, problem = time.monotonic(), ""
        try:
            if run == RUNS:
                await self._read_runs()
            else:
                await self._read_run(run)
        except PerdureError as error:
            problem = str(error)
        finally:
            found, now = self._known[run], time.monotonic()
            found.began_list.set()
            found.problem = problem
            found.rests_until = now + max(SHORTEST_PAUSE_S, PAUSE * (now - began))

    # -- runs ----------------------------------------------------------------------------------

    async def _read_runs(self) -> None:
        labels = await run_label.read_all(self.store)
        hidden = {run for run, label in labels.items() if label.is_hidden}
        there = [run async for run in run_ids(self.store) if run not in hidden]
        await asyncio.to_thread(self.index.forget_runs, there)
        for run in there:
            if await asyncio.to_thread(self.index.about, run) is None:
                await asyncio.to_thread(self.index.note_run, run, None, await self._about(run))
        self._has_rows(RUNS)
        for run in reversed(there):
            if not await self._read_manifest(run):
                await self._read_rows(run)

    async def _read_run(self, run: str) -> None:
        await self._read_manifest(run)
        await self._read_rows(run)
        await self._read_texts(run)

    async def _read_manifest(self, run: str) -> bool:
        """Read the manifest, which lists all episodes of an ended run. False if there is none."""
        known = await asyncio.to_thread(self.index.about, run)
        about = known[1] if known and known[1].agent else await self._about(run)
        try:
            found = await self.store.get(store_keys.manifest(run))
        except NotFound:
            if known is None or known[1] != about:
                await asyncio.to_thread(self.index.note_run, run, None, about)
            return False
        if known is None or known[0] != found.etag:
            rows = await asyncio.to_thread(_listed, run, found.data)
            seen = await asyncio.to_thread(self.index.seen, run)
            new = [row for row in rows if (row.instance, row.sample) not in seen]
            await asyncio.to_thread(self.index.put, [(row, "") for row in new])
            models, stopped = _told(found.data)
            about = replace(about, models=models, stopped=stopped)
            await asyncio.to_thread(self.index.note_run, run, found.etag, about)
        self._has_rows(run)
        return True

    def _has_rows(self, run: str) -> None:
        if run in self._known:
            self._known[run].began_list.set()

    async def _about(self, run: str) -> About:
        with contextlib.suppress(NotFound, ValueError, KeyError, TypeError):
            document = json.loads((await self.store.get(store_keys.run(run))).data)
            request = document["request"]
            shared = request.get("rollout") or {}
            return About(
                agent=str(shared.get("agent") or "mini_swe_agent"),
                dataset=str(request.get("dataset") or ""),
                instances=int(document.get("instances") or 0),
                samples=1 if request.get("listed") else int(request.get("n_samples") or 1),
            )
        return About()

    # -- rollouts ------------------------------------------------------------------------------

    async def _read_rows(self, run: str) -> None:
        seen = await asyncio.to_thread(self.index.seen, run)
        if seen:
            self._has_rows(run)
        there: set[tuple[str, int]] = set()
        changed: list[tuple[str, int, _Files]] = []
        async for instance, sample, files in _listing(self.store, run):
            there.add((instance, sample))
            if seen.get((instance, sample), ("",))[0] != files.seen:
                changed.append((instance, sample, files))
            if len(changed) >= AT_ONCE:
                await self._put(run, changed)
                changed = []
        await self._put(run, changed)
        await asyncio.to_thread(self.index.drop, run, seen.keys() - there)

    async def _put(self, run: str, changed: Sequence[tuple[str, int, _Files]]) -> None:
        rows = await asyncio.gather(*(self._row(run, *one) for one in changed))
        await asyncio.to_thread(self.index.put, rows)
        if rows:
            self._has_rows(run)

    async def _row(self, run: str, instance: str, sample: int, files: _Files) -> tuple[Row, str]:
        known = Row(run=run, instance=instance, sample=sample)
        if "episode.json" not in files.episodes:
            return replace(known, stage=files.stage, attempts=files.attempt), files.seen
        key = f"{store_keys.rollout(run, instance, sample)}/episode.json"
        try:
            facts = parse_facts((await self.store.get(key)).data)
        except (ValueError, NotFound):
            return replace(known, ending="unreadable"), ""
        return _of_facts(run, facts), files.seen

    # -- texts ---------------------------------------------------------------------------------

    async def _read_texts(self, run: str) -> None:
        known = await asyncio.to_thread(self.index.seen, run)
        for (instance, sample), (seen, done) in known.items():
            if seen.startswith("episode") and seen != done:
                if self.index.is_full:
                    return
                found = await stored_rollout.read(self.store, RolloutName(run, instance, sample))
                texts = await self._texts(found)
                await asyncio.to_thread(self.index.put_texts, run, instance, sample, seen, texts)

    async def _texts(self, found: StoredRollout) -> list[tuple[int, str]]:
        texts = [(TESTS, _about_tests(found))]
        last = found.last
        if last is not None and last.patch and last.patch["key"]:
            with contextlib.suppress(NotFound):
                data = (await self.store.get(last.patch["key"])).data
                texts.append((PATCH, data[:PATCH_BYTES].decode("utf-8", "replace")))
        if last is not None:
            with contextlib.suppress(NotFound, ValueError):
                key = f"{found.name.prefix}/attempts/{last.number}/turns.parquet"
                data = (await self.store.get(key)).data
                texts += await asyncio.to_thread(lambda: list(_bounded(_of_turns(data))))
        return texts


async def run_ids(store: Store) -> AsyncIterator[str]:
    """The runs of a store, found without listing all their files."""
    after = ""
    while True:
        found = ""
        async for key in store.list("runs/", after=after):
            found = key.split("/")[1]
            break
        if not found:
            return
        yield found
        after = f"runs/{found}0"  # "0" comes after "/"


async def _listing(store: Store, run: str) -> AsyncIterator[tuple[str, int, _Files]]:
    """The rollouts of a run. Keys are sorted, so a rollout is complete when the next one starts."""
    prefix = store_keys.rollouts(run)
    at: tuple[str, str] | None = None
    files = _Files()
    async for key in store.list(prefix):
        parts = key[len(prefix) :].split("/")
        if len(parts) < 3 or not parts[1].isdigit():
            continue
        if (parts[0], parts[1]) != at:
            if at is not None:
                yield at[0], int(at[1]), files
            at, files = (parts[0], parts[1]), _Files()
        files.add(parts[2:])
    if at is not None:
        yield at[0], int(at[1]), files


def _listed(run: str, manifest: bytes) -> list[Row]:
    """The rollouts in a manifest, with the few facts that it has; empty if it is unreadable."""
    rows = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for one in json.loads(manifest)["episodes"]:
            failure = one.get("failure") or {}
            rows.append(
                Row(
                    run=run,
                    instance=one["instance_id"],
                    sample=one["sample_index"],
                    ending=one.get("outcome") or one["status"],
                    agent=one["agent"],
                    boundary=failure.get("boundary", ""),
                    failure=failure.get("message", ""),
                    reward=one.get("reward"),
                    named_rewards=json.dumps(one.get("named_rewards", {})),
                    sampled=one.get("sampled_tokens"),
                    seconds=one.get("seconds"),
                    attempts=one.get("attempts"),
                )
            )
    return rows


def _told(manifest: bytes) -> tuple[str, str]:
    """The models that answered, and why the budget stopped the run."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        document = json.loads(manifest)
        return ", ".join(document["models"]), str(document["stopped"])
    return "", ""


def _of_facts(run: str, facts: RolloutFacts) -> Row:
    return Row(
        run=run,
        instance=facts.instance_id,
        sample=facts.sample_index,
        ending=facts.ending,
        agent=facts.agent,
        model=", ".join(facts.models),
        agent_end=facts.agent_end or "",
        boundary=facts.failure.boundary.value if facts.failure else "",
        failure=facts.failure.message if facts.failure else "",
        reward=facts.reward,
        turns=facts.turns,
        sampled=facts.sampled_tokens,
        seconds=facts.seconds,
        attempts=facts.attempts,
        version_min=facts.version_min,
        version_max=facts.version_max,
        finished=facts.finished_at,
        named_rewards=json.dumps(facts.named_rewards),
    )


def _about_tests(found: StoredRollout) -> str:
    failure = (found.episode or {}).get("failure") or {}
    lines = [failure.get("message", ""), *found.failing_tests()]
    return "\n".join(lines)[:TEXT_CHARS]


def _of_turns(data: bytes) -> Iterator[tuple[int, str]]:
    for turn in turns_parquet.decode_texts(data):
        yield turn.index, "\n".join(turn_texts(turn.new_messages, turn.answer))[:TEXT_CHARS]


def _bounded(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    left = ROLLOUT_CHARS
    for slot, text in texts:
        if left <= 0 or slot >= TESTS:
            return
        yield slot, text[:left]
        left -= len(text)
