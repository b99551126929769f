"""A home's weights for a training loop: publish a version, know what is served, bring back the old.

Owns what is remembered of the version that is served, so that a restarted trainer, a late engine and
a failed canary all find it in the store. How engines take weights is in `weights`; the sync twin is
`publishing_sync`.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from perdure.engines.proxy import engine_keys
from perdure.engines.roster import StoredRoster, roster_key
from perdure.engines.weights.update import (
    BY_DEFAULT,
    NOTICE_S,
    Canaries,
    Canary,
    Checkpoint,
    FromDisk,
    FromStore,
    Policy,
    Transfer,
    Updated,
    WeightUpdates,
    downloaded,
)
from perdure.errors import ConfigurationError, NotFound
from perdure.home import load_secret
from perdure.settings.tree import Settings
from perdure.storage.base import Store, open_store
from perdure.types import Frozen

Source = str | Path | Transfer
"""A folder that the engines can read (`/ckpt/8`), a prefix of the store (`checkpoints/8`) or of any
bucket (`s3://bucket/checkpoints/8`), or a trainer's own transfer."""


class Published(Frozen):
    """The version that a home's engines serve, and how to give it to another engine."""

    version: int
    source: str = ""
    """Empty where the trainer's own transfer brought it: nobody else can bring it again."""
    canaries: tuple[Canary, ...] = ()


class Weights:
    """The weights of a home's engines. One trainer process publishes.

    Example:
        async with Weights() as weights:
            await weights.publish(8, "/shared/checkpoints/8", canaries)
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        into: Path | None = None,
        notice_s: float = NOTICE_S,
    ) -> None:
        """`into`: where checkpoints of a store are put for engines to read: a folder that their hosts
        share; a temporary one of this host when absent. `notice_s`: seconds that gateways are given
        to read the announcement.

        Raises: ConfigurationError.
        """
        self._settings = settings or Settings()
        self._store = open_store(self._settings)
        secret = load_secret(self._settings)
        roster = roster_key(secret)
        self._key = published_key(roster)
        self._into = into
        self._publishing = asyncio.Lock()
        """Two updates at once would take the engines from each other."""
        self._client = httpx.AsyncClient(trust_env=False)
        self._updates = WeightUpdates(
            StoredRoster(self._store, roster),
            self._client,
            api_key=os.environ.get(self._settings.engine.api_key_env, ""),
            control_key=engine_keys(secret).control,
            notice_s=notice_s,
        )

    async def __aenter__(self) -> "Weights":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def published(self) -> Published | None:
        """What was published last; None before the first. Raises: StoreUnavailable."""
        return await read_published(self._store, self._key)

    async def publish(
        self,
        version: int,
        source: Source,
        canaries: Canaries,
        policy: Policy = BY_DEFAULT,
        *,
        previous: Checkpoint | None = None,
    ) -> list[Updated]:
        """Give every engine that serves this version; repeating it brings only those that lack it.

        When an engine's canary fails, or its load, it gets `previous`: by default the version that
        was published before, from where it came. Engines that were updated keep the new version,
        those not reached yet the old one, which counts as published still.
        Raises: UpdateRefused, ConfigurationError, StoreUnavailable.
        """
        if version < 0:
            raise ConfigurationError(f"version {version}: policy versions count from 0")
        async with self._publishing:
            return await self._publish(version, source, canaries, policy, previous)

    async def _publish(
        self,
        version: int,
        source: Source,
        canaries: Canaries,
        policy: Policy,
        previous: Checkpoint | None,
    ) -> list[Updated]:
        before = await self.published()
        if before is not None and version < before.version:
            raise ConfigurationError(f"version {version} is older than {before.version}")
        if previous is None and before is not None and before.version != version:
            previous = self._checkpoint(before)
        async with fetched(source, self._settings, self._store, self._into) as transfer:
            done = await self._updates.update(
                version, transfer, canaries, policy, previous=previous
            )
        found = Published(version=version, source=_name(source), canaries=tuple(canaries))
        await self._store.put(self._key, found.model_dump_json(indent=1).encode())
        return done

    async def catch_up(self, policy: Policy = BY_DEFAULT) -> list[Updated]:
        """Give the published version to engines that lack it: replicas that joined since, or restarted.

        Raises: UpdateRefused, ConfigurationError (nothing was published, its source is gone, or no
        engine serves), StoreUnavailable.
        """
        async with self._publishing:
            published = await self.published()
            if published is None:
                raise ConfigurationError(
                    "nothing was published yet, so there is nothing to catch up with"
                )
            version, source = published.version, published.source
            if not source:
                raise ConfigurationError(
                    f"version {version} came by the trainer's own transfer: publish it again"
                )
            async with fetched(source, self._settings, self._store, self._into) as transfer:
                return await self._updates.update(version, transfer, published.canaries, policy)

    def _checkpoint(self, published: Published) -> Checkpoint | None:
        """What is loaded when a newer version fails; fetched only then."""
        source = published.source
        if not source:
            return None
        folder = _folder(source)
        if folder is not None:
            return Checkpoint(published.version, FromDisk(folder), published.canaries)
        store, prefix = _place(source, self._settings, self._store)
        transfer = FromStore(store, prefix, into=self._into)
        return Checkpoint(published.version, transfer, published.canaries)


def published_key(roster_key: str) -> str:
    """Where a home keeps what was published, in its store."""
    return f"{roster_key.removesuffix('.json')}.weights.json"


async def read_published(store: Store, key: str) -> Published | None:
    """None before the first. Raises: StoreUnavailable."""
    try:
        return Published.model_validate_json((await store.get(key)).data)
    except NotFound:
        return None


@asynccontextmanager
async def fetched(
    source: Source, settings: Settings, store: Store, into: Path | None = None
) -> AsyncIterator[Transfer]:
    """Ready to load: what must be fetched is fetched before an engine is paused.

    Raises: ConfigurationError, StoreUnavailable.
    """
    if not isinstance(source, str | Path):
        yield source
        return
    if (folder := _folder(source)) is not None:
        yield FromDisk(folder)
        return
    async with downloaded(*_place(str(source), settings, store), into=into) as found:
        yield found


def _place(source: str, settings: Settings, store: Store) -> tuple[Store, str]:
    """The store and the prefix that a source names."""
    if not source.startswith("s3://"):
        return store, source
    return open_store(settings.model_copy(update={"store": source})), ""


def _folder(source: str | Path) -> Path | None:
    """The folder that a source names; None when it names a place in a store."""
    path = Path(str(source).removeprefix("file://"))
    return path if path.is_absolute() else None


def _name(source: Source) -> str:
    return str(source) if isinstance(source, str | Path) else ""
