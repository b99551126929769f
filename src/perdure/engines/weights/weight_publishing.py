"""A home's weights for a training loop: publish a version, read the published version, restore the old.

Owns the record of the published version in the store. A restarted trainer, an engine that joins later
and a failed update read it. `update` loads weights into engines; `publishing_sync` is the sync version.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from perdure.engines.auth_proxy import engine_keys
from perdure.engines.engine_roster import StoredRoster, roster_key
from perdure.engines.model_choice import chosen_model, engines_of
from perdure.engines.weights.weight_update import (
    DEFAULT_POLICY,
    NOTICE_S,
    Canaries,
    Checkpoint,
    FromDisk,
    FromStore,
    Transfer,
    Updated,
    UpdatePolicy,
    WeightCanary,
    WeightUpdates,
    downloaded,
)
from perdure.errors import ConfigurationError, NotFound
from perdure.home_folder import load_secret
from perdure.settings import process_environment
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.types import DEFAULT_MODEL, Frozen

WeightSource = str | Path | Transfer
"""A folder that the engines can read (`/ckpt/8`), a prefix in the store (`checkpoints/8`) or in any
bucket (`s3://bucket/checkpoints/8`), or a trainer's own transfer."""


class Published(Frozen):
    """The version that the engines of a model serve, and how to load it into another engine."""

    version: int
    source: str = ""
    """Empty if the trainer's own transfer sent it; then only the trainer can send it again."""
    canaries: tuple[WeightCanary, ...] = ()


class Weights:
    """The weights that a home's engines of one model load. One trainer process publishes them.

    Example:
        async with Weights() as weights:
            await weights.publish(8, "/shared/checkpoints/8", canaries)
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        model: str = DEFAULT_MODEL,
        into: Path | None = None,
        notice_s: float = NOTICE_S,
    ) -> None:
        """`model`: the model whose engines get the weights. `into`: the folder into which checkpoints
        from a store are downloaded. The engines' hosts must share it; by default it is a temporary folder
        of this host. `notice_s`: seconds that gateways get to read the announcement.

        Raises: ConfigurationError.
        """
        self._settings = settings or load_settings()
        self._store = open_store(self._settings)
        secret = load_secret(self._settings)
        self._roster_key = roster_key(secret)
        self._roster = StoredRoster(self._store, self._roster_key)
        self._model = model
        self._default = self._settings.engine.model or DEFAULT_MODEL
        self._into = into
        self._publishing = asyncio.Lock()
        """Serializes updates, because two at once would take engines from each other."""
        self._client = httpx.AsyncClient(trust_env=False)
        self._updates = WeightUpdates(
            self._roster,
            self._client,
            api_key=process_environment.named(self._settings.engine.api_key_env),
            control_key=engine_keys(secret).control,
            notice_s=notice_s,
            default=self._default,
        )

    async def __aenter__(self) -> "Weights":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def published(self) -> Published | None:
        """The version that was published last; None before the first one.

        Raises: ConfigurationError if no engine has the model; StoreUnavailable.
        """
        return await self._published(await self._chosen())

    async def _published(self, model: str) -> Published | None:
        return await read_published(self._store, published_key(self._roster_key, model))

    async def _names(self, model: str) -> set[str]:
        """The names under which the model's engines serve it. The settings of a replica manager may
        name it differently."""
        engines = (await self._roster.read()).engines
        return {model, *(one.model for one in engines_of(engines, model, "", self._default))}

    async def _chosen(self) -> str:
        """The model to publish for. Raises: ConfigurationError, which lists the available
        models."""
        return chosen_model(
            await self._roster.read(),
            self._model,
            default=self._default,
            configured=bool(self._settings.engine.url),
        )

    async def publish(
        self,
        version: int,
        source: WeightSource,
        canaries: Canaries,
        policy: UpdatePolicy = DEFAULT_POLICY,
        *,
        previous: Checkpoint | None = None,
    ) -> list[Updated]:
        """Load this version into the model's serving engines. A repeated call updates only those
        that lack it.

        If an engine's load or canary fails, `previous` is loaded into it. By default, that is the version
        published before, from its own source. Updated engines keep the new version. The others keep the
        old one, which remains the published version.
        Raises: UpdateRefused, ConfigurationError, StoreUnavailable.
        """
        if version < 0:
            raise ConfigurationError(f"version {version}: policy versions start at 0")
        async with self._publishing:
            return await self._publish(version, source, canaries, policy, previous)

    async def _publish(
        self,
        version: int,
        source: WeightSource,
        canaries: Canaries,
        policy: UpdatePolicy,
        previous: Checkpoint | None,
    ) -> list[Updated]:
        model = await self._chosen()
        before = await self._published(model)
        if before is not None and version < before.version:
            raise ConfigurationError(
                f"version {version} is older than the published version {before.version}"
            )
        if previous is None and before is not None and before.version != version:
            previous = self._checkpoint(before)
        async with fetched(source, self._settings, self._store, self._into) as transfer:
            done = await self._updates.update(
                version, transfer, canaries, policy, previous=previous, model=model
            )
        found = Published(version=version, source=_name(source), canaries=tuple(canaries))
        data = found.model_dump_json(indent=1).encode()
        for name in await self._names(model):
            await self._store.put(published_key(self._roster_key, name), data)
        return done

    async def catch_up(self, policy: UpdatePolicy = DEFAULT_POLICY) -> list[Updated]:
        """Load the published version into engines that lack it because they joined or restarted later.

        Raises: UpdateRefused; ConfigurationError if nothing was published, its source is gone, or no
        engine serves; StoreUnavailable.
        """
        async with self._publishing:
            model = await self._chosen()
            published = await self._published(model)
            if published is None:
                raise ConfigurationError(
                    "no version has been published yet, so there is none to load"
                )
            version, source = published.version, published.source
            if not source:
                raise ConfigurationError(
                    f"the trainer sent version {version} by its own transfer, so only the trainer can "
                    "publish it again"
                )
            async with fetched(source, self._settings, self._store, self._into) as transfer:
                return await self._updates.update(
                    version, transfer, published.canaries, policy, model=model
                )

    def _checkpoint(self, published: Published) -> Checkpoint | None:
        """The checkpoint to load if a newer one fails. It is downloaded only then."""
        source = published.source
        if not source:
            return None
        folder = _folder(source)
        if folder is not None:
            return Checkpoint(published.version, FromDisk(folder), published.canaries)
        store, prefix = _store_of(source, self._settings, self._store)
        transfer = FromStore(store, prefix, into=self._into)
        return Checkpoint(published.version, transfer, published.canaries)


def published_key(roster_key: str, model: str) -> str:
    """The store key of the record of a model's published version."""
    digest = hashlib.sha256(model.encode()).hexdigest()[:12]
    return f"{roster_key.removesuffix('.json')}.weights-{digest}.json"


async def read_published(store: Store, key: str) -> Published | None:
    """The published version; None before the first one. Raises: StoreUnavailable."""
    try:
        return Published.model_validate_json((await store.get(key)).data)
    except NotFound:
        return None


@asynccontextmanager
async def fetched(
    source: WeightSource, settings: Settings, store: Store, into: Path | None = None
) -> AsyncIterator[Transfer]:
    """A source that is ready to load. If it must be downloaded, this happens before an engine is paused.

    Raises: ConfigurationError, StoreUnavailable.
    """
    if not isinstance(source, str | Path):
        yield source
        return
    if (folder := _folder(source)) is not None:
        yield FromDisk(folder)
        return
    async with downloaded(*_store_of(str(source), settings, store), into=into) as found:
        yield found


def _store_of(source: str, settings: Settings, store: Store) -> tuple[Store, str]:
    """The store and the prefix that a source names."""
    if not source.startswith("s3://"):
        return store, source
    return open_store(settings.model_copy(update={"store": source})), ""


def _folder(source: str | Path) -> Path | None:
    """The folder that a source names; None if it names a prefix of a store."""
    path = Path(str(source).removeprefix("file://"))
    return path if path.is_absolute() else None


def _name(source: WeightSource) -> str:
    return str(source) if isinstance(source, str | Path) else ""
