"""Packs folders of this host as archives for sandboxes on other hosts. Each state of a folder is
packed once."""

import gzip
import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from perdure.durable_files import publish_file
from perdure.sandboxes.guest.base_python import is_interpreter

NOT_OF_AN_INTERPRETER = ("site-packages", "test", "__pycache__", "idlelib", "config-3")
"""Parts of an interpreter that are not packed: packages installed in it, tests, build files."""


@dataclass(frozen=True)
class Pack:
    path: Path
    sha256: str


def pack(folder: Path, cache: Path) -> Pack:
    """A gzipped tar of `folder`, without owners. Blocks. If it is killed, only a draft remains."""
    key = _fingerprint(folder)
    for found in cache.glob(f"{key}-*.tgz"):
        if not found.stat().st_size:  # damaged by a power cut
            continue
        os.utime(found)  # so that a clean-up by age sees that it is in use
        return Pack(found, found.stem.partition("-")[2])
    cache.mkdir(parents=True, exist_ok=True)
    draft = cache / f".{uuid4().hex}"
    try:
        _write(folder, draft)
        with draft.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        path = publish_file(draft, cache / f"{key}-{sha256}.tgz")
    finally:
        draft.unlink(missing_ok=True)
    return Pack(path, sha256)


def _write(folder: Path, target: Path) -> None:
    with (
        target.open("wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in (folder, *_contents(folder)):
            tar.add(path, path.relative_to(folder), recursive=False, filter=_without_owner)


def _contents(folder: Path) -> Iterator[Path]:
    """Everything below, in a fixed order. Of an interpreter, a fiftieth: what programs need."""
    skipped = NOT_OF_AN_INTERPRETER if is_interpreter(folder) else ()
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(skipped))
        yield from (Path(where, name) for name in sorted((*folders, *files)))


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None  # sockets and devices do not work elsewhere
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _fingerprint(folder: Path) -> str:
    """Digest of names, kinds, sizes, modes and times below the folder."""
    digest = hashlib.sha256(str(folder).encode())
    for path in _contents(folder):
        stat = path.lstat()
        what = f"{path}\0{stat.st_size}\0{stat.st_mode}\0{stat.st_mtime_ns}\n"
        digest.update(os.fsencode(what))
    return digest.hexdigest()[:32]
