"""Folders of this host as archives for sandboxes elsewhere: packed once, kept by what they hold."""

import gzip
import hashlib
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4


@dataclass(frozen=True)
class Pack:
    path: Path
    sha256: str


def pack(folder: Path, cache: Path) -> Pack:
    """A gzipped tar of `folder`, without owners; blocking. A killed packer leaves only a draft."""
    key = _fingerprint(folder)
    for found in cache.glob(f"{key}-*.tgz"):
        os.utime(found)  # used now: what an age-based clean-up goes by
        return Pack(found, found.stem.partition("-")[2])
    cache.mkdir(parents=True, exist_ok=True)
    draft = cache / f".{uuid4().hex}"
    try:
        _write(folder, draft)
        with draft.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        path = draft.rename(cache / f"{key}-{sha256}.tgz")
    finally:
        draft.unlink(missing_ok=True)
    return Pack(path, sha256)


def _write(folder: Path, target: Path) -> None:
    with (
        target.open("wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        tar.add(folder, arcname=".", filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None  # sockets and devices mean nothing elsewhere
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _fingerprint(folder: Path) -> str:
    """Digest of names, kinds, sizes, modes and times below the folder."""
    digest = hashlib.sha256(str(folder).encode())
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        what = f"{path}\0{stat.st_size}\0{stat.st_mode}\0{stat.st_mtime_ns}\n"
        digest.update(os.fsencode(what))
    return digest.hexdigest()[:32]
