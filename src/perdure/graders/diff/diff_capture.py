"""Takes the agent's change out of its sandbox as bytes.

It trusts nothing that the agent could write: not `.git`, its configuration or its index. It leaves
out and records what no diff can hold. If it can form no diff, it returns `refused`, and the caller
decides whose fault that is. The caller kills the agent first, and stores the bytes afterwards.
"""

import asyncio
import io
import os
import re
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from perdure.errors import DiskFull, InstanceError, SandboxLost
from perdure.graders.diff import diff_capture_script
from perdure.graders.diff.git_diff_parser import FileDiff, MalformedDiff, count_files, parse
from perdure.limited_process import Unparsable, read
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, Sandbox, check_host

CAPTURED_BYTES = 10 << 20
"""Default limit on the bytes of a captured diff; a setting can change it."""
MAX_FILES = 2000
BASE_GIT = "/opt/perdure/base.git"
"""Where a local sandbox mounts the pristine git directory of its base, read-only. With
`Mount(tree / ".git", BASE_GIT)` in its spec, `capture(sandbox, BASE_GIT)` uploads nothing."""

MODES = ("plain", "repair")
_LIMIT_S = 300.0
LONGEST_S = len(MODES) * _LIMIT_S
"""`capture` returns within this many seconds."""
_MOST_SAID = 100
"""Most entries of `CapturedPatch.dropped`."""


@dataclass(frozen=True)
class CapturedPatch:
    """What the agent changed, exactly as git wrote it. `data` is empty when `too_large` or `refused`."""

    data: bytes
    files: int = 0
    ignored_files: int = 0
    """Files that .gitignore excludes; counted, not captured."""
    too_large: bool = False
    dropped: tuple[str, ...] = ()
    """What no diff can hold, as `reason: path`; at most 100 entries."""
    refused: str = ""
    """Why no diff could be formed."""

    def with_data(self, data: bytes) -> "CapturedPatch":
        """The same capture, with the bytes that an earlier activity attempt already stored."""
        return replace(self, data=data)


async def prepare_capture(sandbox: Sandbox) -> str:
    """Copy `.git` before the agent starts, and return the copy's path: the `base_git` of `capture`.

    Only for sandboxes whose repository came with an image and is unknown to the host. An agent that
    destroys the copy on purpose loses only its own change.
    Raises: InstanceError when the image has no git, or no repository at the workdir.
    """
    argv = ["bash", "-c", diff_capture_script.PREPARE, "prepare", f".perdure-base-{uuid4().hex}"]
    result = await sandbox.exec(argv, cwd=sandbox.workdir)
    if not result.status.ok:
        said = result.stderr[-300:].decode("utf-8", "replace").strip()
        raise InstanceError(
            f"`environment.workdir`: no git repository to copy at {sandbox.workdir}: {said}"
        )
    return os.fsdecode(result.stdout)


async def capture(
    sandbox: Sandbox,
    base_git: Path | str | None,
    *,
    max_bytes: int = CAPTURED_BYTES,
    max_files: int = MAX_FILES,
    forced: str = "",
) -> CapturedPatch:
    """The difference between the base commit and the working tree.

    `base_git`: the pristine git directory of the base tree, as a `Path` on this host (uploaded
    now), or as a `str` inside the sandbox: a read-only mount (cheapest), or `prepare_capture`'s.
    None falls back to the objects and the HEAD of the sandbox's own repository. The diff is then
    wrong if the agent committed, or removed the repository.
    `forced`: a file in the sandbox with paths, each ended by NUL, that no .gitignore excludes.
    Raises: SandboxLost when the sandbox is gone, or the host's own base cannot be read; RetryHere
    when the host's disk is full.
    """
    upload = await asyncio.to_thread(_pack, base_git) if isinstance(base_git, Path) else None
    where = "" if upload is not None else str(base_git or f"{sandbox.workdir}/.git")
    order = _Order(where, upload, max_bytes, max_files, forced)
    first = ""
    for mode in MODES:
        try:
            taken = await _take(sandbox, order, mode)
        except DiskFull as error:  # there is no room to write the diff
            return CapturedPatch(b"", refused=str(error)[:500])
        if taken.base_is_unreadable and (upload is not None or where == BASE_GIT):
            raise SandboxLost(
                f"the diff cannot be captured from {sandbox.identity}: {taken.problem}"
            )
        if not taken.problem:
            found = await _looked_at(taken, max_files, may_drop=mode == "repair")
            if isinstance(found, CapturedPatch):
                return found
            taken = replace(taken, problem=found)
        first = first or taken.problem
    return CapturedPatch(b"", refused=first[:500], dropped=taken.dropped)


async def _looked_at(taken: "_Taken", max_files: int, *, may_drop: bool) -> CapturedPatch | str:
    """The capture, or why it cannot be used."""
    files = taken.changed if taken.too_large else count_files(taken.data)
    if taken.too_large or files > max_files:
        return CapturedPatch(b"", files, taken.ignored_files, True, taken.dropped)
    try:
        data, count, gitlinks = await read(_without_gitlinks, taken.data)
    except Unparsable as error:
        return str(error)
    if isinstance(data, str) or (gitlinks and not may_drop):
        return data if isinstance(data, str) else "nested repository"
    dropped = (*taken.dropped, *(f"a repository: {path}" for path in gitlinks))
    return CapturedPatch(data, count, taken.ignored_files, dropped=dropped[:_MOST_SAID])


_GITLINK = b"160000"


def _without_gitlinks(diff: bytes) -> tuple[bytes | str, int, tuple[str, ...]]:
    """The diff without gitlinks, or why it is malformed; its number of files; the gitlinks' paths.
    Call this through `read`. A diff cannot hold the content of a gitlink."""
    try:
        files = parse(diff)
    except MalformedDiff as error:
        return str(error), 0, ()
    links = [file for file in files if _GITLINK in file.modes]
    if not links:
        return diff, len(files), ()
    kept = [file for file in files if _GITLINK not in file.modes]
    return b"".join(file.raw for file in kept), len(kept), tuple(map(_shown, links))


def _shown(file: FileDiff) -> str:
    return file.new_path[:300].decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class _Order:
    base: str
    upload: bytes | None
    max_bytes: int
    max_files: int
    forced: str


@dataclass(frozen=True)
class _Taken:
    data: bytes = b""
    ignored_files: int = 0
    changed: int = 0
    """Files that `git status` reports as changed."""
    too_large: bool = False
    dropped: tuple[str, ...] = ()
    problem: str = ""
    base_is_unreadable: bool = False


async def _take(sandbox: Sandbox, order: _Order, mode: str) -> _Taken:
    """Raises: SandboxLost."""
    name = f".perdure-capture-{uuid4().hex}"
    limits = (str(order.max_bytes), str(order.max_files), order.forced)
    argv = ["bash", "-c", diff_capture_script.CAPTURE, "capture", sandbox.workdir, order.base, name, mode, diff_capture_script.RENAMED_GIT_DIR, *limits]  # fmt: skip
    # The cwd is not the workdir, because the agent may have removed its permissions.
    await sandbox.start(
        name[1:], Exec(argv, cwd="/", stdin=order.upload or b"", timeout_s=_LIMIT_S)
    )
    status = await sandbox.wait(name[1:])
    if status.state is ExecState.LOST or status.cause == "sandbox":
        raise SandboxLost(f"sandbox {sandbox.identity} died while its diff was captured")
    check_host(sandbox, status)
    if status.state is ExecState.KILLED and status.cause == "output":
        return _Taken(too_large=True)
    data = await sandbox.output(name[1:], "stdout", limit=order.max_bytes + 1)
    record = _read_record(await sandbox.output(name[1:], "stderr"), name)
    taken = _Taken(
        data,
        record.ignored_files,
        record.changed,
        too_large=len(data) > order.max_bytes or status.code == diff_capture_script.TOO_MUCH,
        dropped=record.dropped,
        base_is_unreadable=status.code == diff_capture_script.BASE_IS_UNREADABLE,
    )
    if status.ok or taken.too_large:
        return taken
    return replace(taken, problem=_why(status, record.said))


_LARGEST_RECORD = 1 << 20


@dataclass(frozen=True)
class _Record:
    """What the script prints at its end, after git's own output."""

    said: bytes
    ignored_files: int = 0
    changed: int = 0
    dropped: tuple[str, ...] = ()


def _read_record(stderr: bytes, name: str) -> _Record:
    """Accepts any bytes: in an image, the agent may have replaced git or bash."""
    said, mark, record = stderr.rpartition(f"\n{name}\n".encode())
    counts, _, entries = record[:_LARGEST_RECORD].partition(b"\0")
    if not mark or not (numbers := re.fullmatch(rb"(\d{1,9}) (\d{1,9})", counts)):
        return _Record(stderr)
    texts = (
        entry[:400].decode("utf-8", "backslashreplace")
        for entry in entries.split(b"\0")[:-1][:_MOST_SAID]
    )
    return _Record(said, int(numbers[1]), int(numbers[2]), tuple(texts))


def _why(status: ExecStatus, said: bytes) -> str:
    text = said[-500:].decode("utf-8", "replace").strip()
    if status.state is ExecState.KILLED:
        return f"the capture was killed ({status.cause} {status.signal or ''}): {text}"
    return text or str(status)


def _pack(git_dir: Path) -> bytes:
    """The parts of a git directory that define the base commit, as an uncompressed tar."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for part in ("HEAD", "packed-refs", "refs", "info", "index", "objects"):
            if (git_dir / part).exists():
                tar.add(git_dir / part, arcname=part)
    return packed.getvalue()
