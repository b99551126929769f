"""Fetches the base tree that a Source names, and unpacks it as plain files. `host_git` makes it a
git repository; `environment_builder` installs its dependencies.
"""

import asyncio
import datetime
import gzip
import hashlib
import io
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from perdure.errors import Boundary, InstanceError, RetryHere
from perdure.instances import git_source, uv_program
from perdure.storage.base import Store
from perdure.types import Source, SourceKind

DOWNLOAD_TIMEOUT_S = 60.0
DAMAGED = (
    *(tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile),
    *(FileExistsError, IsADirectoryError, NotADirectoryError),  # one name for a file and a folder
)


async def fetch(source: Source, tree: Path, store: Store) -> None:
    """Fill the folder `tree`. A blob contains the tree itself; an sdist contains it in one folder.


    Raises: InstanceError (no such release, unsafe archive), NotFound (no such blob), RetryHere.
    """
    if source.kind is SourceKind.PYPI_SDIST:
        sdist = await asyncio.to_thread(download_sdist, _given(source, "requirement"))
        await asyncio.to_thread(unpack, sdist.data, tree, strip=1)
    elif source.kind is SourceKind.BLOB:
        archive = (await store.get(_given(source, "key"))).data
        await asyncio.to_thread(unpack, archive, tree)
    elif source.kind is SourceKind.EMPTY:
        tree.mkdir(parents=True, exist_ok=True)
    elif source.kind is SourceKind.DIRECTORY:
        await asyncio.to_thread(_copy, Path(_given(source, "path")), tree)
    elif source.kind is SourceKind.GIT:
        url, commit = _given(source, "url"), _given(source, "commit")
        await asyncio.to_thread(git_source.export, url, commit, tree)
    else:
        raise InstanceError(f"a source of kind {source.kind.value!r} has no tree to fetch")


class Downloaded(NamedTuple):
    """A released source distribution."""

    data: bytes
    uploaded: datetime.datetime | None


def download_sdist(requirement: str) -> Downloaded:
    """Download a released source distribution and verify it against the index's digest.

    Raises: InstanceError, RetryHere.
    """
    if "==" not in requirement:
        raise InstanceError(
            f"`source.requirement` {requirement!r} is not pinned: write name==version"
        )
    sdist = uv_program.locate_sdist(requirement)
    return Downloaded(download(sdist.url, sdist.sha256), sdist.uploaded)


def download(url: str, sha256: str) -> bytes:
    """Raises: RetryHere if the download fails or has another digest."""
    data = _download(url)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise RetryHere(f"the download of {url} is damaged", boundary=Boundary.INSTANCE)
    return data


def unpack(archive: bytes, tree: Path, strip: int = 0) -> None:
    """Write the archive's files, folders and symlinks below `tree`, and nowhere else.

    `strip`: leading path parts to drop. Owners and times are dropped; of the mode, only the
    executable bit is kept. (It cannot use tarfile's data filter, which Debian 12's Python 3.11.2
    lacks.)
    Raises: InstanceError when the archive is damaged or reaches outside.
    """
    tree.mkdir(parents=True, exist_ok=True)
    links = []
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                path = _inside(tree, member.name, strip)
                if path is None or member.isdir():
                    (path or tree).mkdir(parents=True, exist_ok=True)
                elif member.issym():
                    links.append((path, member.linkname))
                else:
                    _write_member(tar, member, path)
        for path, target in links:  # last, so that no member is written through a link
            _link(tree, path, target)
    except DAMAGED as error:
        raise InstanceError(f"the source archive cannot be unpacked: {error}") from error


def pack(tree: Path) -> bytes:
    """A tar.gz of the folder's content; equal content gives equal bytes."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(tree.rglob("*")):
            tar.add(path, path.relative_to(tree).as_posix(), recursive=False, filter=_anonymous)
    return buffer.getvalue()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


def _given(source: Source, name: str) -> str:
    value: str | None = getattr(source, name)
    if not value:
        raise InstanceError(f"a source of kind {source.kind.value!r} needs `source.{name}`")
    return value


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:
            data: bytes = answer.read()
            return data
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise RetryHere(f"cannot download {url}: {error}", boundary=Boundary.INSTANCE) from error


def _inside(tree: Path, name: str, strip: int) -> Path | None:
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/"):
        raise InstanceError(f"the source archive reaches outside its folder: {name!r}")
    kept = parts[strip:]
    return tree.joinpath(*kept) if kept else None


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    file = tar.extractfile(member) if member.isfile() or member.islnk() else None
    if file is None:
        raise InstanceError(f"the source archive contains a special file: {member.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.read())
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _link(tree: Path, path: Path, target: str) -> None:
    resolved = (path.parent / target).resolve()
    if not resolved.is_relative_to(tree.resolve()):
        raise InstanceError(
            f"the source archive links outside its folder: {path.name!r} -> {target!r}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _copy(source: Path, tree: Path) -> None:
    if not source.is_dir():
        raise InstanceError(f"`source.path` {str(source)!r} is not a folder on this host")
    shutil.copytree(
        source, tree, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git")
    )
