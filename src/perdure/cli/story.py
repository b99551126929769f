"""One rollout as the store tells it: its attempts, what each left, and how it ended."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.errors import NotFound
from perdure.storage import keys
from perdure.storage.base import Store
from perdure.types import Grade, TestStatus

BAD = (TestStatus.FAILED, TestStatus.ERROR, TestStatus.MISSING)


@dataclass(frozen=True)
class RolloutName:
    """Which rollout: `<run>/<instance>/<sample>`."""

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
        return keys.rollout(self.run_id, self.instance_id, self.sample_index)


@dataclass(frozen=True)
class AttemptStory:
    """What one attempt left. Each part is the checkpoint of one step, or None when it never was."""

    number: int
    sandbox: dict[str, Any] | None = None
    agent: dict[str, Any] | None = None
    patch: dict[str, Any] | None = None
    grade: Grade | None = None
    evidence: Sequence[str] = ()
    """Keys of everything it left."""


@dataclass(frozen=True)
class Story:
    name: RolloutName
    episode: dict[str, Any] | None
    attempts: Sequence[AttemptStory] = field(default_factory=tuple)

    @property
    def last(self) -> AttemptStory | None:
        return self.attempts[-1] if self.attempts else None

    def failing_tests(self) -> list[str]:
        """`<status> <test>` of the tests that should have passed and did not."""
        grade = self.last.grade if self.last else None
        if grade is None:
            return []
        tests = {**grade.fail_to_pass, **grade.pass_to_pass}
        return [f"{status.value} {test}" for test, status in tests.items() if status in BAD]


async def find(store: Store, text: str) -> RolloutName:
    """The rollout that a person means: a workflow id, `run/instance[/sample]`, or the beginning of
    an instance id that is unique among all runs.

    Raises: NotFound saying what there is.
    """
    parts = text.removeprefix("rollout/").strip("/").split("/")
    if len(parts) == 3 and parts[2].isdigit():
        return RolloutName(parts[0], parts[1], int(parts[2]))
    run_id, wanted = (parts[0], parts[1]) if len(parts) == 2 else ("", parts[0])
    found = await _rollouts(store, run_id)
    matching = [name for name in found if name.instance_id == wanted]
    matching = matching or [name for name in found if name.instance_id.startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        some = ", ".join(str(name) for name in matching[:6])
        raise NotFound(f"{text!r} means {len(matching)} rollouts: {some}")
    raise NotFound(f"no rollout {text!r} in {store.url}: `perdure status` lists the runs")


async def read(store: Store, name: RolloutName) -> Story:
    """Raises: NotFound when it left nothing."""
    found = [key async for key in store.list(f"{name.prefix}/")]
    if not found:
        raise NotFound(f"no rollout {name} in {store.url}: `perdure status` lists the runs")
    episode = await _json(store, f"{name.prefix}/episode.json")
    numbers = sorted({_attempt_of(key, name) for key in found} - {0})
    attempts = [await _attempt(store, name, number, found) for number in numbers]
    return Story(name, episode, attempts)


async def _attempt(
    store: Store, name: RolloutName, number: int, found: Sequence[str]
) -> AttemptStory:
    folder = f"{name.prefix}/attempts/{number}/"
    mine = [key for key in found if key.startswith(folder)]
    grades = [key for key in mine if key.removeprefix(folder).startswith("grade")]
    return AttemptStory(
        number=number,
        sandbox=await _json(store, f"{folder}sandbox.json"),
        agent=await _json(store, f"{folder}agent.json"),
        patch=await _json(store, f"{folder}patch.json"),
        grade=await _newest_grade(store, grades),
        evidence=mine,
    )


async def _newest_grade(store: Store, found: Sequence[str]) -> Grade | None:
    """A rollout that was reset has several; the episode tells of the last one."""
    grades = [Grade.model_validate_json((await store.get(key)).data) for key in found]
    return grades[-1] if grades else None


async def _json(store: Store, key: str) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads((await store.get(key)).data)
    except NotFound:
        return None
    return document


async def _rollouts(store: Store, run_id: str) -> list[RolloutName]:
    prefix = f"runs/{run_id}/rollouts/" if run_id else "runs/"
    names: dict[RolloutName, None] = {}
    async for key in store.list(prefix):
        parts = key.split("/")
        if len(parts) > 5 and parts[2] == "rollouts" and parts[4].isdigit():
            names[RolloutName(parts[1], parts[3], int(parts[4]))] = None
    return list(names)


def _attempt_of(key: str, name: RolloutName) -> int:
    parts = key.removeprefix(f"{name.prefix}/").split("/")
    return int(parts[1]) if parts[0] == "attempts" and parts[1].isdigit() else 0
