"""Takes the agent's change out of its sandbox as bytes, and decides on the host what may be graded.

`capture` trusts nothing that the agent could write: not its `.git`, its configuration, its index.
`filter_patch` decides which files of the diff enter grading. The caller kills the agent first, and
stores the bytes afterwards.
"""

import asyncio
import io
import os
import posixpath
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from perdure.errors import InstanceError, SandboxLost
from perdure.graders.git_diff import (
    EXECUTABLE,
    REGULAR,
    SYMLINK,
    FileDiff,
    MalformedDiff,
    parse,
    paths_of,
)
from perdure.sandboxes.base import ExecState, Sandbox
from perdure.types import Instance

CAPTURED_BYTES = 10 << 20
"""Largest diff that `capture` keeps, unless the settings give another number."""
MAX_BYTES = 64 << 20
"""Largest diff that is graded. No setting raises this limit."""
MAX_FILES = 2000
BASE_GIT = "/opt/perdure/base.git"
"""Where a local sandbox should see the pristine git directory of its base, read-only: with
`Mount(tree / ".git", BASE_GIT)` in its spec, `capture(sandbox, BASE_GIT)` uploads nothing."""

_CAPTURE_LIMIT_S = 300.0


# --- capture ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedPatch:
    """What the agent changed, exactly as git wrote it. `data` is empty when `too_large`."""

    data: bytes
    files: int = 0
    ignored_files: int = 0
    """Files that .gitignore kept out; counted, not captured."""
    too_large: bool = False

    def with_data(self, data: bytes) -> "CapturedPatch":
        """The same, with the bytes that an earlier writer already stored."""
        return replace(self, data=data)


async def prepare_capture(sandbox: Sandbox) -> str:
    """Copy `.git` aside before the agent starts, and return where: the `base_git` of `capture`.

    Only for sandboxes whose repository is not known on the host (it came with an image). The agent
    could still destroy the copy on purpose, but it would only lose its own change.
    Raises: InstanceError when the image has no repository at the workdir.
    """
    argv = ["bash", "-c", _PREPARE_SCRIPT, "prepare", f".perdure-base-{uuid4().hex}"]
    result = await sandbox.exec(argv, cwd=sandbox.workdir)
    if not result.status.ok:
        said = result.stderr[-300:].decode("utf-8", "replace").strip()
        raise InstanceError(
            f"`environment.workdir`: no git repository to copy at {sandbox.workdir}: {said}"
        )
    return os.fsdecode(result.stdout)


# Files in the sandbox's TMPDIR disappear with it, even if /tmp is the host's. The variable comes
# from the spec or the image, never from the agent. A folder inside the tree would be captured.
_TEMPORARY = """
temporary=${TMPDIR:-/tmp}
[[ $temporary = /* && $temporary/ != "$PWD"/* && -w $temporary ]] || temporary=/tmp
"""

_PREPARE_SCRIPT = (
    _TEMPORARY
    + r"""
copy=$temporary/$1
mkdir "$copy" && cp -a .git/. "$copy" && printf %s "$copy"
"""
)


async def capture(
    sandbox: Sandbox,
    base_git: Path | str | None,
    *,
    max_bytes: int = CAPTURED_BYTES,
    max_files: int = MAX_FILES,
) -> CapturedPatch:
    """The difference between the base commit and the working tree.

    `base_git`: the pristine git directory of the base tree, as a `Path` on this host (uploaded
    now), or as a `str` inside the sandbox: a read-only mount (cheapest), or `prepare_capture`'s.
    None falls back to the objects and the HEAD of the sandbox's own repository: an agent that
    commits, or removes it, is then misread.
    Raises: SandboxLost when git cannot read the tree at all (full disk, destroyed base).
    """
    upload = await asyncio.to_thread(_pack, base_git) if isinstance(base_git, Path) else None
    where = "" if upload is not None else str(base_git or f"{sandbox.workdir}/.git")
    problem = ""
    for mode in ("plain", "repair"):
        raw = await _run_capture(sandbox, where, upload, mode, max_bytes)
        if raw.too_large:
            return CapturedPatch(b"", too_large=True)
        try:
            files = parse(raw.data)
        except MalformedDiff as error:
            problem = problem or str(error)
            continue
        if raw.problem or any(_GITLINK in file.modes for file in files):
            problem = raw.problem or "nested repository"
            continue
        if len(files) > max_files:
            return CapturedPatch(b"", len(files), raw.ignored_files, too_large=True)
        return CapturedPatch(raw.data, len(files), raw.ignored_files)
    raise SandboxLost(f"the diff cannot be captured from {sandbox.identity}: {problem}")


_GITLINK = b"160000"
_ASIDE = ".git.perdure-aside"

# One exec, a few short processes. A private git directory with our own configuration: hooks,
# filters, fsmonitor and textconv of the agent's are never looked up. Starting from the pristine
# index spares re-hashing: a file is only taken as unchanged while its ctime is, and ctime cannot
# be set. `repair` is the second try: nested repositories move aside, oddities become readable.
_CAPTURE_SCRIPT = (
    _TEMPORARY
    + r"""
base=$1 own=$temporary/$2 mode=$3 aside=$4
trap 'rm -rf "$own"' EXIT
unset "${!GIT_@}"
mkdir -p "$own/objects" "$own/info" "$own/refs" || exit 3
if [ -z "$base" ]; then base=$own/base; mkdir "$base"; tar -xf - -C "$base" || exit 3; fi
cp -r --preserve=timestamps "$base/HEAD" "$base/refs" "$base/packed-refs" "$base/info" \
  "$base/index" "$own/" 2>/dev/null
printf '\n%s\n' "$aside" >>"$own/info/exclude"
printf '%s\n' '[core]' 'repositoryformatversion = 0' 'bare = false' 'fileMode = true' \
  'symlinks = true' 'autocrlf = false' 'hooksPath = /dev/null' 'fsmonitor = false' \
  'untrackedCache = false' 'excludesFile = /dev/null' 'attributesFile = /dev/null' \
  'protectNTFS = false' 'protectHFS = false' 'preloadIndex = false' 'looseCompression = 0' \
  >"$own/config"
export HOME=$own XDG_CONFIG_HOME=$own LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
export GIT_DIR=$own GIT_WORK_TREE=$PWD GIT_ALTERNATE_OBJECT_DIRECTORIES=$base/objects
[ -f "$own/index" ] || git read-tree HEAD || exit 3
if [ "$mode" = repair ]; then
  chmod -R u+rwX .
  find . -path ./.git -prune -o \( -type p -o -type s -o -type b -o -type c \) -exec rm -f {} +
  find . -path ./.git -prune -o -name .git -prune -exec bash -c \
    'for path; do rm -rf "${path%.git}$0" && mv -T "$path" "${path%.git}$0"; done' "$aside" {} +
fi
# Also refreshes the index by reading alone; `add` would store every file again that looks changed.
ignored=0
mapfile -t seen < <(git status --porcelain --ignored -uall --no-renames)
for line in "${seen[@]}"; do [[ $line != '!!'* ]] || ((++ignored)); done
git add -A --no-warn-embedded-repo >&2 || exit 3
git diff-index --cached -p --binary --full-index --no-color --no-ext-diff --no-textconv \
  --no-renames --src-prefix=a/ --dst-prefix=b/ HEAD || exit 3
printf '\nignored %d\n' "$ignored" >&2
"""
)


@dataclass(frozen=True)
class _Raw:
    data: bytes = b""
    ignored_files: int = 0
    too_large: bool = False
    problem: str = ""


async def _run_capture(
    sandbox: Sandbox, base: str, upload: bytes | None, mode: str, max_bytes: int
) -> _Raw:
    name = uuid4().hex
    own = f".perdure-capture-{name}"
    argv = ["bash", "-c", _CAPTURE_SCRIPT, "capture", base, own, mode, _ASIDE]
    exec_id = f"capture-{name}"
    await sandbox.start(
        exec_id, argv, cwd=sandbox.workdir, stdin=upload or b"", timeout_s=_CAPTURE_LIMIT_S
    )
    status = await sandbox.wait(exec_id)
    if status.state is ExecState.KILLED and status.cause in ("timeout", "oom", "output"):
        return _Raw(too_large=True)  # only a huge tree gets here; another try would end the same
    data = await sandbox.output(exec_id, "stdout", limit=max_bytes + 1)
    errors = await sandbox.output(exec_id, "stderr")
    if not status.ok:
        return _Raw(problem=errors[-500:].decode("utf-8", "replace").strip() or str(status))
    if len(data) > max_bytes:
        return _Raw(too_large=True)
    return _Raw(data, ignored_files=int(errors.rsplit(None, 1)[-1]))


def _pack(git_dir: Path) -> bytes:
    """The parts of a git directory that tell the base commit, as an uncompressed tar."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for part in ("HEAD", "packed-refs", "refs", "info", "index", "objects"):
            if (git_dir / part).exists():
                tar.add(git_dir / part, arcname=part)
    return packed.getvalue()


# --- filter ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilteredPatch:
    """What may be graded, and what was left out. `refused` and `tampered` end the grading."""

    data: bytes
    dropped_paths: tuple[str, ...] = ()
    flagged_paths: tuple[str, ...] = ()
    refused: str | None = None
    """Why `git apply` must not get it: an `apply_failed`."""
    tampered: str | None = None
    """Something that no capture produces, so the agent forged it: a `tampered`."""
    was_empty: bool = False
    """The agent changed nothing. If this is False and `data` is empty, the filter dropped every
    file."""


def filter_patch(patch: bytes, instance: Instance) -> FilteredPatch:
    """Drop whole files that would decide the tests instead of passing them.

    Raises: InstanceError when the row's own `patch` or `test_patch` is not a git diff.
    """
    gold = _row_paths(instance.gold_patch, "patch")
    tests = _row_paths(instance.grading.test_patch, "test_patch")
    if not patch:
        return FilteredPatch(b"", was_empty=True)
    if len(patch) > MAX_BYTES:
        return FilteredPatch(b"", refused=f"patch_too_large: {len(patch)} bytes")
    try:
        files = parse(patch)
    except MalformedDiff as error:
        return FilteredPatch(b"", refused=f"not a git diff: {error}")
    if tampered := next(filter(None, map(_forged, files)), None):
        return FilteredPatch(b"", tampered=tampered)
    if len(files) > MAX_FILES:
        return FilteredPatch(b"", refused=f"patch_too_large: {len(files)} files")
    kept: list[FileDiff] = []
    dropped: list[FileDiff] = []
    for file in files:
        (dropped if _is_dropped(file, tests, gold) else kept).append(file)
    if refused := next(filter(None, map(_unfit, kept)), None):
        return FilteredPatch(b"", refused=refused)
    return FilteredPatch(
        data=b"".join(file.raw for file in kept),
        dropped_paths=_shown(path for file in dropped for path in file.paths),
        flagged_paths=_shown(
            path for file in kept for path in file.paths if path not in gold and _is_flagged(path)
        ),
    )


def _row_paths(diff: bytes, field: str) -> frozenset[bytes]:
    try:
        return paths_of(diff)
    except MalformedDiff as error:
        raise InstanceError(f"`{field}` is not a git diff: {error}") from error


def _shown(paths: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(sorted({path.decode("utf-8", "backslashreplace") for path in paths}))


def _forged(file: FileDiff) -> str | None:
    """The path is one that git never writes into a diff of its own tree."""
    for path in file.paths:
        shown = path.decode("utf-8", "backslashreplace")
        parts = path.lower().split(b"/")
        if b"\0" in path:
            return f"the diff names a path with a NUL byte: {shown!r}"
        if any(part in (b".git", b"git~1") for part in parts):
            return f"the diff writes into .git: {shown!r}"
        if any(part in (b"", b".", b"..") for part in parts):
            return f"the diff leaves the repository: {shown!r}"
    return None


def _unfit(file: FileDiff) -> str | None:
    """Why `git apply` should not be given this file."""
    shown = file.new_path.decode("utf-8", "backslashreplace")
    if odd := file.modes - {REGULAR, EXECUTABLE, SYMLINK}:
        return f"mode {min(odd).decode()} of {shown!r} is not a file or a symlink"
    if file.lacks_content:
        return f"the diff lacks the content of the binary file {shown!r}"
    if file.makes_link and not _stays_inside(file):
        return f"symlink {shown!r} leaves the repository"
    return None


def _stays_inside(file: FileDiff) -> bool:
    target = file.link_target
    if target is None:  # a moved link changes no content; anything else we cannot read
        return file.moved and not file.binary
    if target.startswith(b"/") or b"\0" in target or b"\n" in target:
        return False
    landed = posixpath.normpath(posixpath.join(posixpath.dirname(file.new_path), target))
    return landed != b".." and not landed.startswith(b"../")


# Files that test runners (and `git apply`) read for themselves: dropped, unless gold changes them.
_RUNNER_FILES = frozenset(
    b"conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml "
    b"sitecustomize.py usercustomize.py .gitattributes".split()
)
_RUNNER_SUFFIXES = (b".pth", b".egg-link")
_METADATA_SUFFIXES = (b".egg-info", b".dist-info")
# At the root of the repository these shadow the test runner itself.
_RUNNER_MODULES = frozenset(b"pytest _pytest pluggy py unittest pytest.py pluggy.py py.py unittest.py".split())  # fmt: skip


def _is_dropped(file: FileDiff, tests: frozenset[bytes], gold: frozenset[bytes]) -> bool:
    return any(
        _collides(path, tests) or (path not in gold and _steers_the_runner(path, file.added))
        for path in file.paths
    )


def _collides(path: bytes, tests: frozenset[bytes]) -> bool:
    """The path is a hidden test, a parent folder of one, or below one."""
    return any(
        path == test or test.startswith(path + b"/") or path.startswith(test + b"/")
        for test in tests
    )


def _steers_the_runner(path: bytes, added: bool) -> bool:
    parts = path.lower().split(b"/")
    return (
        parts[-1] in _RUNNER_FILES
        or parts[-1].endswith(_RUNNER_SUFFIXES)
        or any(part.endswith(_METADATA_SUFFIXES) for part in parts)
        or (added and parts[0] in _RUNNER_MODULES)
    )


_FLAGGED_NAMES = frozenset(b"setup.py noxfile.py makefile .gitignore".split())
_FLAGGED_SUFFIXES = (b".cfg", b".ini", b".toml", b".sh", b".so", b".pyd", b".pyc")


def _is_flagged(path: bytes) -> bool:
    """Applied, but outside what a fix usually touches: configuration, build, compiled files."""
    name = path.lower().rsplit(b"/", 1)[-1]
    return (
        name in _FLAGGED_NAMES
        or name.endswith(_FLAGGED_SUFFIXES)
        or name.startswith((b"requirements", b"pytest_"))
        or path.startswith(b".github/")
    )
