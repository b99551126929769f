"""The store contract: durable, conditional, content-addressed. Keys are in `storage/store_keys.py`.

Every implementation passes `perdure.testing.store_contract`.
"""

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from perdure.errors import ConfigurationError

MAX_KEY, MAX_NAME = 1024, 255
"""Bytes of a whole key (S3's limit) and of one `/`-separated part (a file system's limit)."""


class Stored(NamedTuple):
    """An object's bytes, and the etag that identifies this version in a conditional write."""

    data: bytes
    etag: str


class Reads(Protocol):
    """The part of a store that reading episodes needs."""

    async def get(self, key: str) -> Stored: ...


class Store(Protocol):
    """Objects under `/`-separated keys.

    All methods raise `StoreUnavailable` if the store cannot be reached or refuses for a reason that
    may pass (credentials, a missing bucket, a full disk): retry the call. `preflight` finds stores
    that have never worked. They raise `ConfigurationError` if the call can never succeed.
    """

    url: str
    """`file:///...` or `s3://bucket/prefix`. Users see `url + "/" + key`."""

    @property
    def worked(self) -> bool:
        """Whether a call of this object has succeeded."""
        ...

    async def get(self, key: str) -> Stored:
        """Raises: NotFound."""
        ...

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes of the object from byte `start` on. Raises: NotFound."""
        ...

    async def put(self, key: str, data: bytes, *, if_match: str | None = None) -> str:
        """Write atomically. Returns the new etag.

        `if_match`: overwrite only the version with this etag.
        Raises: PreconditionFailed if the key has another version, or does not exist.
        """
        ...

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write unless the key exists. Returns whether it wrote."""
        ...

    async def exists(self, key: str) -> bool: ...

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[str]:
        """Keys that start with `prefix` and come after the key `after`, in lexical order."""
        ...

    def sizes(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """The keys that start with `prefix`, each with its bytes, in lexical order."""
        ...

    async def delete(self, key: str) -> None:
        """Delete the object. Succeeds if the key does not exist."""
        ...

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete the objects in as few requests as possible, in any order. After an error, some may
        be deleted."""
        ...


def check_key(key: str) -> str:
    """Return the key if all stores treat it the same way.

    Raises: ConfigurationError, which names the key.
    """
    parts = key.split("/")
    fits = len(key.encode()) <= MAX_KEY and all(len(part.encode()) <= MAX_NAME for part in parts)
    if not fits or any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise ConfigurationError(
            f"store key {key[:80]!r} is not usable: parts separated by single slashes, "
            f"none of them '.' or '..', each at most {MAX_NAME} bytes and {MAX_KEY} in all"
        )
    return key


async def put_blob(store: Store, data: bytes) -> str:
    """Store bytes under their own digest. Returns the key. Idempotent."""
    digest = hashlib.sha256(data).hexdigest()
    key = f"blobs/sha256/{digest[:2]}/{digest}"
    await store.put_if_absent(key, data)
    return key
