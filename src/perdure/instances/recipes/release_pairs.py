"""Makes instances from consecutive releases: release N is the base, and release N+1 has the gold
patch and the tests.

This module makes everything except the FAIL_TO_PASS and PASS_TO_PASS lists. Calibration in
`graders` computes those by running the tests.
"""

import asyncio
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from perdure.errors import InstanceError
from perdure.instances import base_trees, host_git
from perdure.instances.recipes import changelog, declared_dependencies, path_purpose
from perdure.instances.recipes.dataset_recipe import Pair
from perdure.instances.scratch_folders import scratch
from perdure.storage.base import Store, put_blob
from perdure.types import Environment, Grading, Instance, Source, SourceKind

MAX_GOLD_LINES = 2000


class Split(NamedTuple):
    """The changed paths of a release, by purpose."""

    gold: list[str]
    tests: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class ReleasePair:
    """The row of one pair."""

    pair: Pair

    @property
    def instance_id(self) -> str:
        return self.pair.instance_id

    @property
    def facts(self) -> str:
        return self.pair.model_dump_json(exclude={"demo"})

    async def make(self, dataset: str, store: Store) -> Instance:
        """Download both releases and make the instance.

        Raises: InstanceError (no such release, nothing to fix or to test), RetryHere (index unreachable).
        """
        pair = self.pair
        before, after = await asyncio.gather(
            asyncio.to_thread(base_trees.download_sdist, f"{pair.package}=={pair.before}"),
            asyncio.to_thread(base_trees.download_sdist, f"{pair.package}=={pair.after}"),
        )
        made = await asyncio.to_thread(difference, pair, before.data, after.data, after.uploaded)
        key = await put_blob(store, made.base)
        return Instance(
            instance_id=pair.instance_id,
            dataset=dataset,
            data_source="release-pair",
            repo=pair.package,
            problem_statement=made.statement,
            source=Source(kind=SourceKind.BLOB, key=key),
            environment=made.environment,
            grading=Grading(test_patch=made.tests, test_cmd=made.test_cmd),
            gold_patch=made.gold,
            created_at=made.day,
            metadata={
                "package": pair.package,
                "from": pair.before,
                "to": pair.after,
                "demo": pair.demo,
            },
        )


def environment_of(pair: Pair, tree: Path, moment: datetime.datetime) -> Environment:
    """An editable install of the base, with packages as of `exclude_newer` or `moment`."""
    if pair.requires is None or pair.exclude_newer is None:
        found = declared_dependencies.environment_at(
            tree, moment, pair.before, requires=pair.requires
        )
        return found if pair.python is None else found.model_copy(update={"python": pair.python})
    requires = " ".join(f'"{requirement}"' for requirement in pair.requires)
    python = pair.python or declared_dependencies.PREFERRED
    return Environment(
        python=python,
        install=(
            f"uv venv -q --python python{python} $VENV",
            f"uv pip install -q --exclude-newer {pair.exclude_newer} {requires} -e .",
        ),
        env={"SETUPTOOLS_SCM_PRETEND_VERSION": pair.before},
    )


def split_paths(changed: list[str], before: Path, after: Path, pair: Pair) -> Split:
    """Sort changed paths into gold, tests, and files that change at every release."""
    split = Split([], [], [])
    for path in changed:
        if path_purpose.is_test(path):
            split.tests.append(path)
        elif path_purpose.is_metadata(path) or _only_version(before / path, after / path, pair):
            split.left_out.append(path)
        else:
            split.gold.append(path)
    return split


class Difference(NamedTuple):
    """The comparison of two releases."""

    base: bytes
    """tar.gz of the earlier release's tree."""
    gold: bytes
    tests: bytes
    statement: str
    test_cmd: str
    environment: Environment
    day: str
    """The date of the environment's packages."""


def difference(
    pair: Pair, before: bytes, after: bytes, uploaded: datetime.datetime | None = None
) -> Difference:
    """Compare two sdists, given as bytes; `uploaded` is the time of the later one.

    Raises: InstanceError when they cannot become an instance.
    """
    moment = _moment(pair, uploaded)
    with scratch("pair") as folder:
        old, new = folder / "before", folder / "after"
        base_trees.unpack(before, old, strip=1)
        base_trees.unpack(after, new, strip=1)
        base = base_trees.pack(old)
        host_git.commit_all(old)
        split = split_paths(host_git.changed_paths(old, new), old, new, pair)
        gold = host_git.diff(old, new, split.gold)
        tests = host_git.diff(old, new, split.tests)
        _check(pair, gold, tests)
        return Difference(
            base,
            gold,
            tests,
            statement(pair, new, split.gold),
            pair.test_cmd or _test_cmd(pair, split.tests, new),
            environment_of(pair, old, moment),
            moment.date().isoformat(),
        )


def _moment(pair: Pair, uploaded: datetime.datetime | None) -> datetime.datetime:
    """The day that the pair names; otherwise the day after the later release."""
    if pair.exclude_newer is not None:
        return datetime.datetime.combine(pair.exclude_newer, datetime.time(), datetime.UTC)
    if uploaded is None:
        raise InstanceError(
            f"the index does not say when {pair.package} {pair.after} was published: give the pair an "
            "`exclude_newer`"
        )
    return uploaded + datetime.timedelta(days=1)


def _test_cmd(pair: Pair, tests: list[str], after: Path) -> str:
    command = path_purpose.pytest_command(path for path in tests if (after / path).is_file())
    if not command:
        raise InstanceError(
            f"{pair.package} {pair.before} -> {pair.after} changes no test module; choose another pair"
        )
    return command


def _check(pair: Pair, gold: bytes, tests: bytes) -> None:
    name = f"{pair.package} {pair.before} -> {pair.after}"
    if not gold:
        raise InstanceError(f"{name} changes no code outside its tests; choose another pair")
    if not tests:
        raise InstanceError(f"{name} changes no tests that its sdist ships; choose another pair")
    lines = gold.count(b"\n")
    if lines > MAX_GOLD_LINES:
        raise InstanceError(
            f"{name} changes {lines} lines; the limit is {MAX_GOLD_LINES}; choose another pair"
        )


def statement(pair: Pair, after: Path, gold: list[str]) -> str:
    """The changelog entry of the later release; without one, the names of the changed files."""
    entry = changelog.entry(after, pair.after)
    head = f"This repository is {pair.package} {pair.before}."
    if entry:
        return (
            f"{head} Make the changes that the changelog of its next release describes, as far as "
            f"they concern code. Leave version numbers alone.\n\n{entry}\n"
        )
    files = "\n".join(f"- {path}" for path in gold)
    return (
        f"{head} Its next release ({pair.after}) has no changelog entry. Find and fix the defects in "
        f"the code that it changed:\n\n{files}\n"
    )


def _only_version(before: Path, after: Path, pair: Pair) -> bool:
    """The file changed only in its version number."""
    if not (before.is_file() and after.is_file()):
        return False
    renamed = before.read_bytes().replace(pair.before.encode(), pair.after.encode())
    return renamed == after.read_bytes()
