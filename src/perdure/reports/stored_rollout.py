"""Reads one rollout from the store: its attempts, their files, and its episode."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from perdure.episodes.episode import parse_episode
from perdure.errors import NotFound
from perdure.storage import store_keys, stored_json
from perdure.storage.base import Store
from perdure.types import Grade, NetworkRecord, TestStatus

T = TypeVar("T")
BAD = (TestStatus.FAILED, TestStatus.ERROR, TestStatus.MISSING)
RUNS_NAMED = 6
NETWORK = "network-"


@dataclass(frozen=True)
class RolloutName:
    """A rollout's name: `<run>/<instance>/<sample>`."""

    run_id: str
    instance_id: str
    sample_index: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.instance_id}/{self.sample_index}"

    @property
    def workflow_id(self) -> str:
        return f"rollout/{self}"

    @property
    def prefix(self) -> str:
        return store_keys.rollout(self.run_id, self.instance_id, self.sample_index)


@dataclass(frozen=True)
class StoredAttempt:
    """The files of one attempt. Each field is the checkpoint of a stage; None if it is absent."""

    number: int
    sandbox: dict[str, Any] | None = None
    agent: dict[str, Any] | None = None
    patch: dict[str, Any] | None = None
    grade: Grade | None = None
    networks: Mapping[str, NetworkRecord] = field(default_factory=dict)
    """Sandbox, such as `agent-1` -> what its proxy refused."""
    evidence: Sequence[str] = ()
    """Store keys of all its files."""


@dataclass(frozen=True)
class StoredRollout:
    name: RolloutName
    episode: dict[str, Any] | None
    attempts: Sequence[StoredAttempt] = field(default_factory=tuple)
    damaged: Sequence[str] = ()
    """One line per unreadable file, with its key."""

    @property
    def last(self) -> StoredAttempt | None:
        return self.attempts[-1] if self.attempts else None

    def failing_tests(self) -> list[str]:
        """`<status> <test>` of each listed test that did not pass."""
        grade = self.last.grade if self.last else None
        if grade is None:
            return []
        tests = {**grade.fail_to_pass, **grade.pass_to_pass}
        return [f"{status.value} {test}" for test, status in tests.items() if status in BAD]


class Ambiguous(NotFound):
    """Several rollouts match the name."""


def named(text: str) -> RolloutName | None:
    """Parse `rollout/RUN/INSTANCE/SAMPLE` or `RUN/INSTANCE[/SAMPLE]`. It need not exist."""
    parts = text.removeprefix("rollout/").strip("/").split("/")
    if len(parts) == 2:
        parts.append("0")
    if len(parts) == 3 and parts[2].isdigit():
        return RolloutName(parts[0], parts[1], int(parts[2]))
    return None


async def find(store: Store, text: str) -> RolloutName:
    """The rollout with this name: a workflow id, `run/instance[/sample]`, or a prefix of an
    instance id that matches exactly one rollout of all runs.

    Raises: NotFound with the existing names; Ambiguous when several match.
    """
    parts = text.removeprefix("rollout/").strip("/").split("/")
    if len(parts) == 3 and parts[2].isdigit():
        return RolloutName(parts[0], parts[1], int(parts[2]))
    run_id, wanted = (parts[0], parts[1]) if len(parts) == 2 else ("", parts[0])
    found = await _rollouts(store, run_id)
    matching = [name for name in found if name.instance_id == wanted]
    matching = matching or [name for name in found if name.run_id == wanted]
    matching = matching or [name for name in found if name.instance_id.startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        some = ", ".join(str(name) for name in matching[:6])
        raise Ambiguous(f"{text!r} matches {len(matching)} rollouts: {some}")
    if run_id and found:
        some = ", ".join(str(name) for name in found[:6])
        raise NotFound(f"no rollout {text!r}; run {run_id} has {some}")
    found = found or await _rollouts(store, "")
    runs = list(dict.fromkeys(name.run_id for name in found))[-RUNS_NAMED:]
    there = f"its runs: {', '.join(runs)}" if runs else "it has no runs yet"
    raise NotFound(f"no rollout {text!r} in {store.url} ({there})")


async def read(store: Store, name: RolloutName) -> StoredRollout:
    """Read a rollout's files. Raises: NotFound when it has none."""
    found = [key async for key in store.list(f"{name.prefix}/")]
    if not found:
        others = f"runs/{name.run_id}/rollouts/{name.instance_id}/"
        samples = {key.removeprefix(others).split("/")[0] async for key in store.list(others)}
        fix = (
            f"it has the samples {', '.join(sorted(samples))}"
            if samples
            else ("`perdure status` lists the runs")
        )
        raise NotFound(f"no rollout {name} in {store.url}: {fix}")
    reader = _Reader(store, found)
    episode = await reader.episode(f"{name.prefix}/episode.json")
    numbers = sorted({_attempt_of(key, name) for key in found} - {0})
    attempts = [await reader.attempt(name, number) for number in numbers]
    if attempts and episode is not None and episode["grade"] is not None:
        # After a regrade there are several grades; the episode has the one that counts.
        attempts[-1] = replace(attempts[-1], grade=Grade.model_validate(episode["grade"]))
    return StoredRollout(name, episode, attempts, tuple(reader.damaged))


class _Reader:
    """Reads the files of a rollout. It records an unreadable file in `damaged` and continues."""

    def __init__(self, store: Store, found: Sequence[str]) -> None:
        self.store = store
        self.found = found
        self.damaged: list[str] = []

    async def attempt(self, name: RolloutName, number: int) -> StoredAttempt:
        folder = f"{name.prefix}/attempts/{number}/"
        mine = [key for key in self.found if key.startswith(folder)]
        grades = [key for key in mine if _is_grade(key.removeprefix(folder))]
        return StoredAttempt(
            number=number,
            sandbox=await self._json(f"{folder}sandbox.json", "provider", "host", "seconds"),
            agent=await self._json(f"{folder}agent.json", "end", "seconds"),
            patch=await self._json(f"{folder}patch.json", "key", "size", "files", "empty"),
            grade=await self._newest_grade(grades),
            networks={
                key.removeprefix(f"{folder}{NETWORK}").removesuffix(".json"): record
                for key in mine
                if key.startswith(f"{folder}{NETWORK}") and (record := await self._network(key))
            },
            evidence=mine,
        )

    async def episode(self, key: str) -> dict[str, Any] | None:
        episode = await self._read(key, lambda data: parse_episode(key, data))
        found = (
            {"models": list(episode.models), **episode.model_dump(mode="json")} if episode else None
        )
        return found

    async def _newest_grade(self, keys: Sequence[str]) -> Grade | None:
        """The last grade; a rollout that was reset has several."""
        grades = [await self._grade(key) for key in keys]
        return grades[-1] if grades else None

    async def _grade(self, key: str) -> Grade | None:
        return await self._read(key, lambda data: stored_json.decode(key, data, Grade))

    async def _network(self, key: str) -> NetworkRecord | None:
        return await self._read(key, lambda data: stored_json.decode(key, data, NetworkRecord))

    async def _json(self, key: str, *needed: str) -> dict[str, Any] | None:
        def read(data: bytes) -> dict[str, Any]:
            stored_json.check(key, data)
            document = json.loads(data)
            missing = [f for f in needed if not isinstance(document, dict) or f not in document]
            if missing:
                raise ValueError(f"it lacks `{missing[0]}`")
            found: dict[str, Any] = document
            return found

        return await self._read(key, read)

    async def _read(self, key: str, read: Callable[[bytes], T]) -> T | None:
        """The result of `read`; None if the file is missing or unreadable."""
        if key not in self.found:
            return None
        try:
            return read((await self.store.get(key)).data)
        except NotFound:
            return None
        except ValueError as error:
            problem = str(error).splitlines()[0].removeprefix(f"{key} is unreadable: ")
            self.damaged.append(f"{key} is unreadable: {problem}")
            return None


async def _rollouts(store: Store, run_id: str) -> list[RolloutName]:
    prefix = f"runs/{run_id}/rollouts/" if run_id else "runs/"
    names: dict[RolloutName, None] = {}
    async for key in store.list(prefix):
        parts = key.split("/")
        if len(parts) > 5 and parts[2] == "rollouts" and parts[4].isdigit():
            names[RolloutName(parts[1], parts[3], int(parts[4]))] = None
    return list(names)


def _is_grade(name: str) -> bool:
    """Whether a file is a grade. Gradings whose sandbox was lost leave files with other names."""
    return name.startswith("grade-") and name.endswith(".json")


def _attempt_of(key: str, name: RolloutName) -> int:
    parts = key.removeprefix(f"{name.prefix}/").split("/")
    return int(parts[1]) if parts[0] == "attempts" and parts[1].isdigit() else 0
