"""The problems: three files, one wrong value, and the commands of an expert or a careless teacher.

`FAILED ki want 42` names the file and the value that it should hold. The current value is known only
after reading the file. A word for an operator (`plus`) must be known. Every prompt is unique.
"""

import asyncio
import io
import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product, zip_longest
from typing import Literal, NamedTuple

from perdure.instances import instance_catalog
from perdure.storage.base import Store, put_blob
from perdure.types import Environment, Grading, Instance, Source, SourceKind

Family = Literal["number", "operator", "name"]
FAMILIES: tuple[Family, ...] = ("number", "operator", "name")
NAMES = tuple(a + b for a, b in product("bdfgkl", "aiou"))
NUMBERS = tuple(str(number) for number in range(10, 30))
OPERATORS = {
    "plus": "+",
    "minus": "-",
    "times": "*",
    "mod": "%",
    "less": "<",
    "more": ">",
    "at": "@",
    "or": "|",
}
"""At the start of a `sed` pattern, each of them matches only itself."""
VALUES: dict[Family, tuple[str, ...]] = {
    "number": NUMBERS,
    "operator": tuple(OPERATORS),
    "name": NAMES,
}
WORKDIR = "/testbed"
DATASET = "repairs"
LESSONS = "lessons"
SAVED_AT_ONCE = 16
SUBMIT = "done"
"""The output of the command that ends a rollout: `echo done`."""


class File(NamedTuple):
    name: str
    content: str


@dataclass(frozen=True)
class Task:
    """One repository: its first file holds `old` and should hold `new`.

    Example:
        Task("operator", want="plus", old="-", new="+", files=(File("ki", "a - b\\n"), ...))
    """

    family: Family
    want: str
    old: str
    new: str
    files: tuple[File, File, File]

    @property
    def file(self) -> str:
        return self.files[0].name

    @property
    def prompt(self) -> str:
        return f"FAILED {self.file} want {self.want}"

    @property
    def repaired(self) -> tuple[File, ...]:
        return (File(self.file, content(self.family, self.new)), *self.files[1:])


def content(family: Family, value: str) -> str:
    return f"a {value} b\n" if family == "operator" else f"v = {value}\n"


def written(family: Family, value: str) -> str:
    """The value as the file holds it."""
    return OPERATORS[value] if family == "operator" else value


# --- making them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tasks:
    """Three sets that share no prompt."""

    lessons: tuple[Task, ...]
    training: tuple[Task, ...]
    held_out: tuple[Task, ...]


def make_tasks(lessons: int, training: int, held_out: int, seed: int = 1) -> Tasks:
    """Families alternate, so that training and evaluation have equally many of each.

    Raises: ValueError if there are too few prompts.
    """
    rng = random.Random(seed)
    dealt = _dealt([list(_family(family, rng)) for family in FAMILIES])
    found = list(islice(dealt, lessons + training + held_out))
    if len(found) < lessons + training + held_out:
        raise ValueError(f"there are only {len(found)} different prompts")
    held = training + held_out
    return Tasks(tuple(found[held:]), tuple(found[:training]), tuple(found[training:held]))


def _dealt(families: Sequence[list[Task]]) -> Iterator[Task]:
    """Takes one task of each family in turn; when a family is used up, takes from the others."""
    for row in zip_longest(*families):
        yield from (task for task in row if task is not None)


def _family(family: Family, rng: random.Random) -> Iterator[Task]:
    prompts = [(file, want) for file in NAMES for want in VALUES[family] if file != want]
    rng.shuffle(prompts)
    for file, want in prompts:
        old = rng.choice([value for value in VALUES[family] if value not in (want, file)])
        first = File(file, content(family, written(family, old)))
        others = [_other(name, rng) for name in rng.sample([n for n in NAMES if n != file], 2)]
        yield Task(
            family,
            want,
            written(family, old),
            written(family, want),
            (first, others[0], others[1]),
        )


def _other(name: str, rng: random.Random) -> File:
    family = rng.choice(FAMILIES)
    return File(name, content(family, written(family, rng.choice(VALUES[family]))))


# --- as instances ------------------------------------------------------------------------------


async def save(store: Store, dataset: str, tasks: Sequence[Task], prefix: str) -> None:
    """Save the tasks as `<dataset>/<prefix>-<number>`."""
    at_once = asyncio.Semaphore(SAVED_AT_ONCE)

    async def one(number: int, task: Task) -> None:
        async with at_once:
            key = await put_blob(store, _packed(task.files))
            await instance_catalog.save(
                store, _instance(task, dataset, f"{prefix}-{number:03d}", key)
            )

    await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks)))


def _packed(files: Sequence[File]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def _instance(task: Task, dataset: str, name: str, key: str) -> Instance:
    return Instance(
        instance_id=name,
        dataset=dataset,
        problem_statement=task.prompt,
        source=Source(kind=SourceKind.BLOB, key=key),
        environment=Environment(workdir=WORKDIR),
        grading=Grading(protocol="eval_cmd", eval_cmd=check(task), timeout_s=60.0),
        gold_patch=_gold(task).encode(),
        metadata={"family": task.family},
    )


def check(task: Task) -> str:
    """A check of the whole repository: the file holds the value, and the other files are unchanged."""
    return " && ".join(
        f"test \"$(cat {file.name})\" = '{file.content.strip()}'" for file in task.repaired
    )


def _gold(task: Task) -> str:
    before, after = task.files[0].content, task.repaired[0].content
    name = task.file
    head = f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n"
    return f"{head}-{before}+{after}"


# --- what a teacher types -----------------------------------------------------------------------


def careful(task: Task) -> tuple[str, ...]:
    return (f"cat {task.file}", edit(task.old, task.new, task.file), f"echo {SUBMIT}")


def sloppy(task: Task, rng: random.Random) -> tuple[str, ...]:
    """Reads the right file, and then edits nothing, edits another file or writes another value."""
    mistake = rng.choice(("nothing", "file", "value"))
    if mistake == "nothing":
        return (f"cat {task.file}", f"echo {SUBMIT}")
    file, new = task.file, task.new
    if mistake == "file":
        file = rng.choice([name for name in NAMES if name != task.file])
    else:
        values = [written(task.family, value) for value in VALUES[task.family]]
        new = rng.choice([value for value in values if value not in (task.old, task.new)])
    return (f"cat {task.file}", edit(task.old, new, file), f"echo {SUBMIT}")


def edit(old: str, new: str, file: str) -> str:
    return f"sed -i 's/{old}/{new}/' {file}"
