"""Decides on the host which files of a captured diff are graded."""

import os
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import dropwhile

from perdure.errors import InstanceError
from perdure.graders.diff.git_diff_parser import (
    EXECUTABLE,
    REGULAR,
    SYMLINK,
    FileDiff,
    MalformedDiff,
    count_files,
    parse,
    paths_of,
)
from perdure.limited_process import Unparsable, read
from perdure.types import Instance

MAX_BYTES = 64 << 20
"""Graders refuse a larger diff. No setting raises this limit."""
MAX_FILES = 2000
"""Graders refuse a diff of more files."""


@dataclass(frozen=True)
class FilteredPatch:
    """What may be graded, and what the filter dropped. `refused` and `tampered` end the grading."""

    data: bytes
    dropped_paths: tuple[str, ...] = ()
    flagged_paths: tuple[str, ...] = ()
    refused: str | None = None
    """Why `git apply` must not get the diff; the outcome is `apply_failed`."""
    unparsable: str | None = None
    """Why the diff could not be parsed."""
    tampered: str | None = None
    """Content that no capture produces, so the agent forged it; the outcome is `tampered`."""
    was_empty: bool = False
    """The agent changed nothing. If this is False and `data` is empty, the filter dropped every
    file."""


async def filtered(patch: bytes, instance: Instance) -> FilteredPatch:
    """`filter_patch` for a diff that an agent made. Raises: InstanceError; RetryHere."""
    try:
        return await read(filter_patch, patch, instance)
    except Unparsable as error:
        return FilteredPatch(b"", unparsable=str(error))


def filter_patch(patch: bytes, instance: Instance) -> FilteredPatch:
    """Drop whole files that would control the tests instead of passing them, and symlinks that
    point out of the tree.

    Raises: InstanceError when the row's own `patch` or `test_patch` is not a git diff.
    """
    rules = _rules_of(instance)
    if not patch:
        return FilteredPatch(b"", was_empty=True)
    if len(patch) > MAX_BYTES:
        return FilteredPatch(b"", refused=f"patch_too_large: {len(patch)} bytes")
    if (count := count_files(patch)) > MAX_FILES:
        return FilteredPatch(b"", refused=f"patch_too_large: {count} files")
    try:
        files = parse(patch)
    except MalformedDiff as error:
        return FilteredPatch(b"", refused=f"not a git diff: {error}")
    if tampered := next(filter(None, map(_forged, files)), None):
        return FilteredPatch(b"", tampered=tampered)
    kept: list[FileDiff] = []
    dropped: list[FileDiff] = []
    for file in files:
        (dropped if _is_dropped(file, rules) else kept).append(file)
    if refused := next(filter(None, map(_unfit, kept)), None):
        return FilteredPatch(b"", refused=refused)
    return FilteredPatch(
        data=b"".join(file.raw for file in kept),
        dropped_paths=_shown(path for file in dropped for path in file.paths),
        flagged_paths=_shown(
            path for file in kept for path in file.paths if _is_flagged(path, rules)
        ),
    )


@dataclass(frozen=True)
class _Rules:
    """The row's rules for which files of a diff are kept."""

    gold: frozenset[bytes]
    """Files of the reference fix; no rule about names drops them."""
    hidden: frozenset[bytes]
    """Files of the hidden tests."""
    listed: frozenset[bytes]
    """Test files that the row's lists name; the agent's version could weaken their tests."""
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @cached_property
    def scope(self) -> tuple[bytes, ...]:
        """The folders in which the reference fix changes files."""
        return tuple({posixpath.join(posixpath.dirname(path), b"") for path in self.gold})


def _rules_of(instance: Instance) -> _Rules:
    grading = instance.grading
    tests = (*grading.fail_to_pass, *grading.pass_to_pass)
    return _Rules(
        gold=_row_paths(instance.gold_patch, "patch"),
        hidden=_row_paths(grading.test_patch, "test_patch"),
        listed=frozenset(test.partition("::")[0].encode() for test in tests if "::" in test),
        include=grading.patch_include,
        exclude=grading.patch_exclude,
    )


def _row_paths(diff: bytes, field: str) -> frozenset[bytes]:
    try:
        return paths_of(diff)
    except MalformedDiff as error:
        raise InstanceError(f"`{field}` is not a git diff: {error}") from error


def _shown(paths: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(sorted({path.decode("utf-8", "backslashreplace") for path in paths}))


def _forged(file: FileDiff) -> str | None:
    """Why the file has a path that git never writes into a diff of its own tree."""
    for path in file.paths:
        shown = path.decode("utf-8", "backslashreplace")
        parts = path.lower().split(b"/")
        if b"\0" in path:
            return f"the diff names a path with a NUL byte: {shown!r}"
        if any(part in (b".git", b"git~1") for part in parts):
            return f"the diff writes into .git: {shown!r}"
        if any(part in (b"", b".", b"..") for part in parts):
            return f"the diff names a path outside the repository: {shown!r}"
    return None


def _unfit(file: FileDiff) -> str | None:
    """Why `git apply` should not be given this file."""
    shown = file.new_path.decode("utf-8", "backslashreplace")
    if odd := file.modes - {REGULAR, EXECUTABLE, SYMLINK}:
        return f"mode {min(odd).decode()} of {shown!r} is not a file or a symlink"
    if file.lacks_content:
        return f"the diff lacks the content of the binary file {shown!r}"
    return None


def _stays_inside(file: FileDiff) -> bool:
    """Whether a symlink points into the tree; each link is checked alone.

    Its own folder is no link, because git writes nothing through one, and this same rule keeps
    other links inside. So `..` may only come first: after a name that is itself a link, it would
    start from that link's target.
    """
    target = file.link_target
    if target is None:  # a moved link changes no content; any other target is unreadable
        return file.moved and not file.binary
    if target.startswith(b"/") or b"\0" in target or b"\n" in target:
        return False
    steps = [step for step in target.split(b"/") if step not in (b"", b".")]
    if _UP in dropwhile(_UP.__eq__, steps):
        return False
    landed = posixpath.normpath(posixpath.join(posixpath.dirname(file.new_path), target))
    return landed != b".." and not landed.startswith(b"../")


_UP = b".."

# Configuration that test runners (and `git apply`) read: dropped, unless gold changes the file.
_RUNNER_FILES = frozenset(
    b"conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml "
    b"sitecustomize.py usercustomize.py .gitattributes".split()
)
_RUNNER_SUFFIXES = (b".pth", b".egg-link")
_METADATA_SUFFIXES = (b".egg-info", b".dist-info")
# At the root of the repository, these shadow the test runner itself.
_RUNNER_MODULES = frozenset(b"pytest _pytest pluggy py unittest pytest.py pluggy.py py.py unittest.py".split())  # fmt: skip


def _is_dropped(file: FileDiff, rules: _Rules) -> bool:
    if file.makes_link and not _stays_inside(file):
        return True
    return any(
        _collides(path, rules.hidden)
        or not _is_wanted(path, rules)
        or (
            path not in rules.gold
            and (path in rules.listed or _steers_the_runner(path, file.added))
        )
        for path in file.paths
    )


def _is_wanted(path: bytes, rules: _Rules) -> bool:
    """Whether the row's globs keep the path. As in `git apply`, `*` also matches `/`."""
    name = os.fsdecode(path)
    if any(fnmatchcase(name, glob) for glob in rules.exclude):
        return False
    return not rules.include or any(fnmatchcase(name, glob) for glob in rules.include)


def _collides(path: bytes, tests: frozenset[bytes]) -> bool:
    """The path is a hidden test, or a parent or a child of one."""
    return any(
        path == test or test.startswith(path + b"/") or path.startswith(test + b"/")
        for test in tests
    )


def _steers_the_runner(path: bytes, added: bool) -> bool:
    parts = path.lower().split(b"/")
    return (
        parts[-1] in _RUNNER_FILES
        or parts[-1].endswith(_RUNNER_SUFFIXES)
        or b"__pycache__" in parts
        or any(part.endswith(_METADATA_SUFFIXES) for part in parts)
        or (added and parts[0] in _RUNNER_MODULES)
    )


_FLAGGED_NAMES = frozenset(b"setup.py noxfile.py makefile .gitignore".split())
_FLAGGED_SUFFIXES = (b".cfg", b".ini", b".toml", b".sh", b".so", b".pyd", b".pyc")


def _is_flagged(path: bytes, rules: _Rules) -> bool:
    """The file is applied, but a fix rarely touches it: configuration, build and compiled files,
    and folders in which the reference fix changes nothing."""
    if path in rules.gold:
        return False
    if rules.scope and not path.startswith(rules.scope):
        return True
    name = path.lower().rsplit(b"/", 1)[-1]
    return (
        name in _FLAGGED_NAMES
        or name.endswith(_FLAGGED_SUFFIXES)
        or name.startswith((b"requirements", b"pytest_"))
        or path.startswith(b".github/")
    )
