"""Makes instances from a git history. The parent of a commit is the base; the commit gives the gold
patch, the tests and the problem statement.

A merge counts as one commit, compared with its first parent. Calibration computes FAIL_TO_PASS and
PASS_TO_PASS; `needs` reads most of the environment from the tree.
"""

import asyncio
import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from perdure.errors import InstanceError
from perdure.instances import base_trees, git_source, host_git
from perdure.instances.recipes import declared_dependencies, path_purpose, release_history
from perdure.instances.recipes.dataset_recipe import History
from perdure.instances.scratch_folders import scratch
from perdure.storage.base import Store, put_blob
from perdure.types import Grading, Instance, Source, SourceKind, slugify

MAX_GOLD_LINES = 1000
_FORMAT = "--format=%x1e%H%x1f%P%x1f%cI%x1f"
_TRAILER = re.compile(r"^[A-Z][A-Za-z]+(-[A-Za-z]+)+: .*$", re.MULTILINE)
_NUMBER = re.compile(r"\s*\(#\d+\)")
_MERGE = re.compile(r"^Merge (pull request|branch|remote-tracking branch) .*\n*")
_VERSION = re.compile(r"^\D*(\d+(\.\d+)*)$")


class Commit(NamedTuple):
    """A commit that changes both tests and code."""

    id: str
    parent: str
    moment: datetime.datetime
    gold: tuple[str, ...]
    tests: tuple[str, ...]


def candidates(history: History, folder: Path) -> "list[CommitRow]":
    """The newest commits that change both tests and code, at most `history.limit`.

    Relative paths start at `folder`. Raises: InstanceError (no such repository or revision),
    RetryHere (the server of its releases is unreachable).
    """
    if history.package is not None:
        clone, name = (
            release_history.repository_of(history.package, history.versions),
            history.package,
        )
    else:
        clone = (folder / (history.repository or "")).resolve()
        name = slugify(clone.name)
    found: list[CommitRow] = []
    for commit in _commits(clone, history.revision):
        if len(found) == history.limit:
            break
        found.append(CommitRow(clone, name, history, commit))
    return found


def _commits(clone: Path, revision: str) -> Iterator[Commit]:
    words = ("--first-parent", "-m", "--no-renames", "--name-only", "-z", _FORMAT)
    told = host_git.git(clone, "log", *words, "--end-of-options", revision, "--")
    for record in told.decode("utf-8", "surrogateescape").split("\x1e")[1:]:
        commit, parents, moment, changed = record.split("\x1f", 3)
        names = [name.strip("\n") for name in changed.split("\0") if name.strip("\n")]
        tests = tuple(name for name in names if path_purpose.is_test(name))
        gold = tuple(
            n for n in names if not path_purpose.is_test(n) and not path_purpose.is_metadata(n)
        )
        if parents and gold and any(path_purpose.is_test_module(name) for name in tests):
            when = datetime.datetime.fromisoformat(moment)
            yield Commit(commit, parents.split()[0], when, gold, tests)


@dataclass(frozen=True)
class CommitRow:
    """The row of one commit."""

    clone: Path
    name: str
    history: History
    commit: Commit

    @property
    def instance_id(self) -> str:
        return f"{self.name}-{self.commit.id[:12]}"

    @property
    def facts(self) -> str:
        return f"{self.commit.id} {self.history.requires}"

    async def make(self, dataset: str, store: Store) -> Instance:
        """Raises: InstanceError (no test module remains, too large, no message)."""
        made, base = await asyncio.to_thread(self._made, dataset)
        key = await put_blob(store, base)
        return made.model_copy(update={"source": Source(kind=SourceKind.BLOB, key=key)})

    def _made(self, dataset: str) -> tuple[Instance, bytes]:
        """The instance, and its base tree as tar.gz."""
        url, commit = str(self.clone), self.commit
        gold = git_source.difference(url, commit.parent, commit.id, list(commit.gold))
        if (lines := gold.count(b"\n")) > MAX_GOLD_LINES:
            raise InstanceError(f"{commit.id} changes {lines} lines; the limit is {MAX_GOLD_LINES}")
        left = git_source.list_existing_paths(url, commit.id, list(commit.tests))
        command = path_purpose.pytest_command(left)
        if not command:
            raise InstanceError(f"{commit.id} removes the test modules that it changes")
        version = self._version()
        with scratch("commit") as folder:
            tree = folder / "tree"
            git_source.export(url, commit.parent, tree)
            requires = self.history.requires
            environment = declared_dependencies.environment_at(
                tree, commit.moment, version, requires=requires
            )
            base = base_trees.pack(tree)
        tests = git_source.difference(url, commit.parent, commit.id, list(commit.tests))
        instance = Instance(
            instance_id=self.instance_id,
            dataset=dataset,
            data_source="git-history",
            repo=self.name,
            base_commit=commit.parent,
            problem_statement=statement(self.name, self._message()),
            source=Source(kind=SourceKind.BLOB),
            environment=environment,
            grading=Grading(test_patch=tests, test_cmd=command),
            gold_patch=gold,
            created_at=commit.moment.isoformat(),
            metadata={"commit": commit.id},
        )
        return instance, base

    def _message(self) -> str:
        told = host_git.git(self.clone, "show", "-s", "--format=%B", self.commit.id)
        return told.decode("utf-8", "replace")

    def _version(self) -> str:
        """The version of the last tag before the commit, for builds that ask git for it."""
        try:
            told = host_git.git(self.clone, "describe", "--tags", "--abbrev=0", self.commit.parent)
        except InstanceError:
            return "0"
        match = _VERSION.match(told.decode("utf-8", "replace").strip())
        return match[1] if match else "0"


def statement(name: str, message: str) -> str:
    """The commit message without trailers, merge lines and issue numbers. Raises: InstanceError if
    that is empty."""
    text = _NUMBER.sub("", _TRAILER.sub("", _MERGE.sub("", message))).strip()
    if not text:
        raise InstanceError("the commit message does not describe the change")
    return f"This repository is {name}. Make the change that this describes:\n\n{text}\n"
