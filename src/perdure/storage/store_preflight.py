"""Tries the store before a run starts, and refuses one that has never worked.

Nothing in the store can be read during an outage. So a home records in `run/stores/` which stores
have worked, and a process remembers it for its own store.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from perdure.errors import ConfigurationError, PerdureError, StoreUnavailable
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.store_url import open_store

LIMIT_S = 4.0
"""Seconds for all calls together. With the start of a command, the user waits about five."""


async def check_store(settings: Settings, opened: Callable[[], Store] | None = None) -> None:
    """Write, read, list and delete one small object. `opened`: returns the store that is in use.

    Raises: ConfigurationError, which names the fix, if the store refuses or does not answer and has
    never worked; StoreUnavailable if it has worked before or is only busy.
    """
    known = _memory(settings)
    store: Store | None = None
    try:
        store = opened() if opened is not None else open_store(settings)
        async with asyncio.timeout(LIMIT_S):
            await _try(store)
    except (StoreUnavailable, TimeoutError) as error:
        failure = error if isinstance(error, StoreUnavailable) else _silent(settings)
        worked = known.exists() or (store is not None and store.worked)
        if worked or not failure.fix:
            raise failure from error
        raise ConfigurationError(
            f"{failure.problem}: {failure.fix}", boundary=StoreUnavailable.boundary
        ) from error
    known.parent.mkdir(parents=True, exist_ok=True)
    known.touch()


async def _try(store: Store) -> None:
    key = f"preflight/{uuid4().hex}"
    await store.put_if_absent(key, b"preflight")
    try:
        await _read_back(store, key)
    except PerdureError:
        with contextlib.suppress(PerdureError):
            await store.delete(key)
        raise
    await store.delete(key)
    await store.exists(key)  # S3 refuses absent keys if the credentials may not list


async def _read_back(store: Store, key: str) -> None:
    if await store.put_if_absent(key, b"second"):
        raise ConfigurationError(
            f"{store.url} overwrites objects: PERDURE_STORE needs a server that honors"
            " `If-None-Match` on PutObject"
        )
    await store.get(key)
    if [found async for found in store.list(key)] != [key]:
        raise StoreUnavailable(f"{store.url} does not list what was written")


def _silent(settings: Settings) -> StoreUnavailable:
    named = "PERDURE_STORE"
    if settings.store_url.startswith("s3://"):
        named = f"PERDURE_S3_ENDPOINT_URL ({settings.s3_endpoint_url or 'AWS'})"
    return StoreUnavailable(
        f"{settings.store_url}: no answer within {LIMIT_S:g} s",
        fix=f"correct {named}, or start that server",
    )


def _memory(settings: Settings) -> Path:
    """The record of this store, named by URL and endpoint. Credentials are not part: they
    rotate."""
    place = f"{settings.store_url} {settings.s3_endpoint_url}"
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    return settings.home.absolute() / "run" / "stores" / name
