"""Files of the sandbox, verified and put in place by rename, and files of the guest itself.

Runs inside a remote sandbox with `guest`. Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pwd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Answer = dict[str, Any]

STATE = os.path.dirname(os.path.abspath(__file__))
PASSING = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


FULL = (errno.EDQUOT, errno.ENOSPC)


class Refused(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def hold_room(size: int) -> None:
    """Reserve disk space for what runs after the commands. A fuller disk is accepted."""
    try:
        with open(state("room"), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        free_room()


def free_room() -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(state("room"))


# -- of the sandbox ------------------------------------------------------------------------------


def place(
    path: str,
    sha256: str,
    mode: int,
    data: str | None = None,
    staged: str | None = None,
    *,
    as_root: bool = False,
) -> Answer:
    """Put verified bytes at `path` by rename: the uploaded file `staged` or, without it, `data`."""
    path = os.path.join(meta()["workdir"] if os.path.exists(state("ready")) else "/", path)
    if staged is not None and not os.path.exists(staged):
        verify(path, sha256)  # an earlier call did it, and its answer was lost
        return {}
    make_folder(os.path.dirname(path), True)
    draft = os.path.join(os.path.dirname(path), ".perdure-" + os.urandom(8).hex())
    try:
        if staged is None:
            with open(draft, "wb") as file:
                file.write(base64.b64decode(data or ""))
            verify(draft, sha256)
        else:
            verify(staged, sha256)
            bring(staged, draft)
        give(draft, as_root)
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.unlink(draft)
        raise
    if staged is not None and os.path.exists(staged):
        os.unlink(staged)
    return {}


def bring(staged: str, draft: str) -> None:
    """Rename the file or, across file systems, copy it."""
    try:
        os.rename(staged, draft)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        import shutil

        shutil.copyfile(staged, draft)


def read(path: str, offset: int, limit: int) -> Answer:
    """A byte range with its digest, and the size of the whole file."""
    base = meta()["workdir"] if os.path.exists(state("ready")) else "/"
    fd = os.open(os.path.join(base, path), os.O_RDONLY | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not os.path.isfile(f"/proc/self/fd/{fd}"):
            raise Refused("missing", "not a regular file")
        file.seek(offset)
        data = file.read(limit)
        total = os.fstat(fd).st_size
    digest = hashlib.sha256(data).hexdigest()
    return {"data": base64.b64encode(data).decode(), "sha256": digest, "size": total}


def read_file(path: str, offset: int, limit: int) -> Answer:
    """Reports a file that cannot be opened as missing, because the agent may put anything there."""
    try:
        return read(path, offset, limit)
    except OSError as error:
        if error.errno in PASSING:
            raise
        raise Refused("missing", str(error)) from error


def verify(path: str, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
    except FileNotFoundError:
        raise Refused("short", "the upload did not arrive") from None
    if digest.hexdigest() != sha256:
        raise Refused("short", "the upload was damaged")


def owner() -> tuple[int, int]:
    """uid and gid of the agent: PERDURE_OWNER, or this process's own; for root, those of `user`."""
    said = os.environ.get("PERDURE_OWNER")
    if said:
        uid, _, gid = said.partition(":")
        return int(uid), int(gid)
    if os.geteuid() != 0:
        return os.getuid(), os.getgid()
    try:
        entry = pwd.getpwnam("user")
    except KeyError:
        return 1000, 1000
    return entry.pw_uid, entry.pw_gid


def give(path: str, as_root: bool = False) -> None:
    """Make the agent, or root, the owner of a file."""
    if os.geteuid() == 0:
        os.lchown(path, *((0, 0) if as_root else owner()))


def make_folder(path: str, agent_owned: bool) -> None:
    """Make it and its parents. `agent_owned`: new folders belong to the agent."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path), False if path.count("/") < 3 else agent_owned)
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        return
    if agent_owned:
        give(path)


# -- of the guest --------------------------------------------------------------------------------


def state(*parts: str) -> str:
    return os.path.join(STATE, *parts)


def meta() -> Answer:
    with open(state("ready")) as file:
        found: Answer = json.load(file)
    return found


def replace(path: str, data: bytes) -> None:
    """Write the whole file, by rename."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = path + "." + os.urandom(4).hex()
    with open(draft, "wb") as file:
        file.write(data)
    os.replace(draft, path)


class locked:
    """One set-up step at a time. The kernel frees the lock when its process dies."""

    def __init__(self, name: str) -> None:
        os.makedirs(STATE, exist_ok=True)
        self.file = open(state(name + ".lock"), "w")  # noqa: SIM115  held until leaving

    def __enter__(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()
