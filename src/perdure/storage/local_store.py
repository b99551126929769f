"""The store in a local folder: one file per key, written atomically.

Many processes may share it on one file system with hard links and locks. Its own files are in
`.perdure/` under the root: unfinished writes in `tmp`, write locks in `locks`.
"""

import asyncio
import errno
import fcntl
import hashlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from perdure.errors import ConfigurationError, NotFound, PreconditionFailed, StoreUnavailable
from perdure.storage.base import Stored, check_key

OWN = ".perdure"
INLINE_READ = 1 << 18
"""Bytes below which a read on the event loop (about 0.05 ms) is cheaper than a thread."""
LIST_BATCH = 1000
STALE_TMP_S = 86_400.0
"""Seconds after which a file in `tmp` counts as a leftover of a killed writer."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
ABSENT = {errno.ENOENT}
IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}


class LocalStore:
    """Objects as files under `root`. An object's etag is the sha256 of its bytes.

    A write is durable when it returns: it fsyncs the file and its folder entries. Unlike in S3, a
    key cannot extend another object's key (`a` and `a/b`).
    """

    def __init__(self, root: str | Path) -> None:
        """Raises: ConfigurationError if the folder cannot be created."""
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()
        self._tmp = self.root / OWN / "tmp"
        self._locks = self.root / OWN / "locks"
        self.worked = False
        with self._readable_errors(str(self.root)):
            for folder in (self._tmp, self._locks):
                self._make(folder)
            self._sweep()

    def _make(self, folder: Path) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (self.root / OWN, folder):
                path.mkdir(mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigurationError(
                f"store {self.root}: a file is in the way; name a folder, or s3://bucket/prefix"
            ) from None

    async def get(self, key: str) -> Stored:
        path = self._path(key)
        with self._readable_errors(key):
            try:
                inline = path.stat().st_size < INLINE_READ
                return _read(path) if inline else await asyncio.to_thread(_read, path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._check_mounted()
                raise NotFound(f"no {key!r} in {self.url}") from None

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return (await self.get(key)).data[start : start + length]

    async def exists(self, key: str) -> bool:
        path = self._path(key)
        with self._readable_errors(key):
            found = path.is_file()
            if not found:
                self._check_mounted()
        return found

    async def put(self, key: str, data: bytes, *, if_match: str | None = None) -> str:
        etag = await asyncio.to_thread(self._put, key, data, if_match)
        self.worked = True
        return etag

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        written = await asyncio.to_thread(self._put_if_absent, key, data)
        self.worked = True
        return written

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._delete, key)

    async def delete_many(self, keys: Sequence[str]) -> None:
        await asyncio.to_thread(self._delete_many, keys)

    async def sizes(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for key in self.list(prefix):
            with suppress(FileNotFoundError):
                yield key, self._path(key).stat().st_size

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[str]:
        keys = (key for key in self._walk(prefix, after) if key > after)
        while batch := await asyncio.to_thread(lambda: [*itertools.islice(keys, LIST_BATCH)]):
            for key in batch:
                yield key

    # -- one object on the disk ----------------------------------------------------------------

    def _put(self, key: str, data: bytes, if_match: str | None) -> str:
        path = self._path(key)
        with self._readable_errors(key), self._written(data) as temporary, self._locked(key):
            if if_match is not None and self._etag(path) != if_match:
                raise PreconditionFailed(f"{key!r} was changed by another writer")
            _make_parents(path, self.root)
            temporary.rename(path)
            _sync_folder(path.parent)
        return hashlib.sha256(data).hexdigest()

    def _put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._readable_errors(key):
            if path.is_file():  # repeated writes are common, so check before the draft is written
                return False
        with self._readable_errors(key), self._written(data) as temporary:
            _make_parents(path, self.root)
            try:
                os.link(temporary, path)
            except FileExistsError:
                if path.is_file():
                    return False
                raise
            _sync_folder(path.parent)
            return True

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with self._readable_errors(key), self._locked(key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            _sync_folder(path.parent)

    def _delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects, and folders that become empty."""
        paths = [self._path(key) for key in keys]
        with self._readable_errors(f"{keys[0]} and others" if keys else ""):
            for path in paths:
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    path.unlink()
            for folder in {path.parent for path in paths} - {self.root}:
                with suppress(FileNotFoundError, NotADirectoryError):
                    _sync_folder(folder)
                self._remove_empty(folder)

    def _remove_empty(self, folder: Path) -> None:
        """Remove the folder and those above it, if they are empty. Folders of the root stay, because
        other writers use them all the time."""
        with suppress(OSError):  # a folder is not empty, or another process removed it
            while len(folder.relative_to(self.root).parts) > 1:
                folder.rmdir()
                folder = folder.parent

    def _check_mounted(self) -> None:
        """Raises: StoreUnavailable if the whole folder is gone, so that an absent key proves
        nothing."""
        if not self._tmp.is_dir():
            raise StoreUnavailable(
                f"store {self.root} is gone", fix="mount or restore it, or correct PERDURE_STORE"
            )

    def _etag(self, path: Path) -> str | None:
        try:
            return _read(path).etag
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _path(self, key: str) -> Path:
        if check_key(key).split("/", 1)[0] == OWN:
            raise ConfigurationError(f"store key {key!r}: {OWN!r} is the store's own folder")
        return self.root / key

    # -- helpers -------------------------------------------------------------------------------

    @contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        """A complete, synced file in `tmp`. On exit it is deleted unless it was renamed."""
        path = self._tmp / uuid4().hex
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the key's lock, which admits one writer at a time across threads and processes. The
        kernel releases it if this process dies."""
        stripe = hashlib.sha256(key.encode()).hexdigest()[:2]
        with open(self._locks / stripe, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _walk(self, prefix: str, after: str = "") -> Iterator[str]:
        """Keys in lexical order, which is not the order of a depth-first walk."""
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(folder)
        with self._readable_errors(prefix):
            yield from self._walk_folder(f"{folder}/" if folder else "", prefix, after)

    def _walk_folder(self, base: str, prefix: str, after: str) -> Iterator[str]:
        """Walk one folder. Skips subfolders whose keys all come before `after`."""
        try:
            with os.scandir(self.root / base) as entries:
                names = sorted(e.name + "/" * e.is_dir() for e in entries)
        except (FileNotFoundError, NotADirectoryError):
            self._check_mounted()
            return
        for name in names:
            key = base + name
            if key == f"{OWN}/" or not (key.startswith(prefix) or prefix.startswith(key)):
                continue
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    yield from self._walk_folder(key, prefix, after)
            else:
                yield key

    def _sweep(self) -> None:
        """Delete files that killed writers left in `tmp` more than a day ago."""
        for entry in os.scandir(self._tmp):
            with suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > STALE_TMP_S:
                    os.unlink(entry)

    @contextmanager
    def _readable_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"store {self.root}, {what!r}: {error.strerror}"
            if error.errno in FULL:
                raise StoreUnavailable(
                    f"{reason}; {_what_to_free(self.root)}: the write is retried"
                ) from error
            if error.errno in REFUSED:
                fix = "give this user write access, or correct PERDURE_STORE"
                raise StoreUnavailable(reason, fix=fix) from error
            if error.errno in IN_THE_WAY:
                raise ConfigurationError(
                    f"{reason}; a key cannot extend another object's key"
                ) from error
            fix = "correct PERDURE_STORE, or PERDURE_HOME" if error.errno in ABSENT else ""
            raise StoreUnavailable(reason, fix=fix) from error


def _what_to_free(root: Path) -> str:
    disk = os.statvfs(root)
    if disk.f_files and not disk.f_ffree:
        return "it has no free inode, so remove files there"
    return "free space there"


def _read(path: Path) -> Stored:
    data = path.read_bytes()
    return Stored(data, hashlib.sha256(data).hexdigest())


def _make_parents(path: Path, root: Path) -> None:
    """Create missing folders below `root` durably, by an fsync of each new folder's parent."""
    below = itertools.takewhile(lambda folder: folder != root, path.parents)
    missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), below))
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
