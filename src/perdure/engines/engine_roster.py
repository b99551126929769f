"""The roster: the engines of a home, in one small object in the store that all its processes share.

Owns the document, its compare-and-swap, and the changes that users make: add, drain, remove. The roster
is the source of truth about an engine; no process keeps its own.
"""

import asyncio
import hashlib
import hmac
import random
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState, name_of, root_of
from perdure.errors import ConfigurationError, NotFound, PreconditionFailed
from perdure.storage.base import Store, Stored
from perdure.types import DEFAULT_MODEL, Frozen

DRAIN_S = 300.0
"""Seconds until the calls of a draining engine move to another one, unless the user sets a deadline."""


class ModelFormat(Frozen):
    """A model's tokenizer and tool-call parser, as in the engine settings of the same names."""

    tokenizer: str
    tool_call_parser: str = "auto"


class Roster(Frozen):
    """All engines, and the generation for the next start of an engine."""

    engines: tuple[EngineRecord, ...] = ()
    next_generation: int = 1
    formats: dict[str, ModelFormat] = Field(default_factory=dict)
    """By model. A model without an entry has the format of the settings."""

    def get(self, name: str) -> EngineRecord | None:
        return next((engine for engine in self.engines if engine.name == name), None)

    def used_with(self, own: Collection[str]) -> "Roster":
        """A copy without the engines that only other gateways' settings name. `own`: the names in
        this gateway's settings."""
        used = (one for one in self.engines if not one.from_settings or one.name in own)
        return self.model_copy(update={"engines": tuple(used)})

    def having(self, record: EngineRecord) -> "Roster":
        """A copy in which this record replaces the engine's old one, or is added at the end."""
        engines = {engine.name: engine for engine in self.engines} | {record.name: record}
        following = max(self.next_generation, record.generation + 1)
        update = {"engines": tuple(engines.values()), "next_generation": following}
        return self.model_copy(update=update)

    def without(self, name: str) -> "Roster":
        kept = tuple(engine for engine in self.engines if engine.name != name)
        return self.model_copy(update={"engines": kept})


Change = Callable[[Roster], Roster]


class SharedRoster(Protocol):
    """A roster that other processes also read and change."""

    async def read(self) -> Roster:
        """Raises: StoreUnavailable."""
        ...

    async def change(self, change: Change) -> Roster:
        """Apply a pure function to the newest roster, and repeat it if another process wrote first.

        Raises: StoreUnavailable, and any error of `change`.
        """
        ...


def roster_key(secret: bytes) -> str:
    """The roster's key in the store. Processes that share a secret share sessions and engines."""
    name = hmac.new(secret, b"engines", hashlib.sha256).hexdigest()[:16]
    return f"engines/{name}.json"


class _Found(NamedTuple):
    roster: Roster
    stored: Stored | None


class StoredRoster:
    """The roster as an object in the store."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    async def read(self) -> Roster:
        return (await self._find()).roster

    async def change(self, change: Change) -> Roster:
        while True:
            found = await self._find()
            wanted = change(found.roster)
            if wanted == found.roster or await self._write(wanted, found.stored):
                return wanted
            await asyncio.sleep(random.uniform(0.005, 0.05))  # another process wrote first

    async def _find(self) -> _Found:
        try:
            stored = await self._store.get(self._key)
        except NotFound:
            return _Found(Roster(), None)
        if not stored.data:  # emptied by a power failure: the settings fill it again
            return _Found(Roster(), stored)
        try:
            return _Found(Roster.model_validate_json(stored.data), stored)
        except ValueError as error:
            raise ConfigurationError(
                f"the list of engines in the store, {self._key}, is damaged: delete it, then add "
                "engines that are not in the settings with `perdure engines add`"
            ) from error

    async def _write(self, roster: Roster, stored: Stored | None) -> bool:
        data = roster.model_dump_json(indent=1).encode()
        if stored is None:
            return await self._store.put_if_absent(self._key, data)
        try:
            await self._store.put(self._key, data, if_match=stored.etag)
        except PreconditionFailed:
            return False
        return True


class InMemoryRoster:
    """The roster of a single process without a store, for scripts and benchmarks."""

    def __init__(self) -> None:
        self._roster = Roster()

    async def read(self) -> Roster:
        return self._roster

    async def change(self, change: Change) -> Roster:
        self._roster = change(self._roster)
        return self._roster


# --- changes that users make, with or without a running gateway ----------------------------------


async def add_engine(
    roster: SharedRoster,
    spec: EngineSpec,
    model: str | None = None,
    *,
    default: str = DEFAULT_MODEL,
    model_format: ModelFormat | None = None,
    run: str | None = None,
) -> EngineRecord:
    """Register a running engine, or change the weight, kind, model and run of a known one.

    `model`, `run`: None keeps the values of a known engine; a new engine gets the model `default`,
    which the settings name, and samples for every run. `run` is a glob of run ids. `model_format`:
    required once for each model except the default one, whose format is in the settings. An engine
    gets a new generation if it was removed, is draining, is dead, or gets another model.

    Raises: ValueError, which names the URL; ConfigurationError, which names the option; StoreUnavailable.
    """
    name = name_of(spec.url)

    def added(now: Roster) -> Roster:
        known = now.get(name)
        named = model or (known.model if known is not None else default)
        now = _with_format(now, named, model_format, name, (default, DEFAULT_MODEL))
        told: dict[str, Any] = {"weight": spec.weight, "kind": spec.kind}
        if run is not None:
            told["run"] = run
        leaving = (EngineState.DRAINING, EngineState.DEAD)
        stays = known is not None and not known.removed and known.state not in leaving
        if known is not None and stays and known.model == named:
            return now.having(known.model_copy(update={**told, "from_settings": False}))
        record = EngineRecord(
            name=name,
            url=root_of(spec.url),
            model=named,
            generation=now.next_generation,
            since=time.time(),
            **{"run": known.run if known is not None else "", **told},
        )
        return now.having(record)

    return _known(await roster.change(added), name)


async def add_model(
    roster: SharedRoster, model: str, model_format: ModelFormat | None, *, default: str
) -> None:
    """Register a model before it has an engine. Raises: as `add_engine`."""
    defaults = (default, DEFAULT_MODEL)
    await roster.change(lambda now: _with_format(now, model, model_format, "", defaults))


def _with_format(
    roster: Roster,
    model: str,
    wanted: ModelFormat | None,
    engine: str,
    defaults: tuple[str, ...],
) -> Roster:
    """The roster with the format of the model that this engine gets. Raises: ConfigurationError."""
    known = roster.formats.get(model)
    if model in defaults:
        if wanted is not None:
            raise ConfigurationError(
                f"the settings define the tokenizer of the model {model}: set PERDURE_ENGINE__TOKENIZER, "
                "or name another model with --model"
            )
        return roster
    if wanted is None:
        if known is None:
            raise ConfigurationError(
                f"the model {model} is new: give its tokenizer with --tokenizer (qwen3, or a folder "
                "that has tokenizer.json)"
            )
        return roster
    others = [
        one.name
        for one in roster.engines
        if one.model == model and one.name != engine and not one.removed
    ]
    if known is not None and known != wanted and others:
        raise ConfigurationError(
            f"engine {others[0]} has the model {model} with the tokenizer {known.tokenizer!r} and the "
            f"tool-call parser {known.tool_call_parser!r}: give the same ones, or another --model"
        )
    return roster.model_copy(update={"formats": {**roster.formats, model: wanted}})


async def drain_engine(
    roster: SharedRoster, name: str, deadline_s: float = DRAIN_S
) -> EngineRecord:
    """Send no new calls to an engine. Calls that still run at the deadline move to other engines.

    Raises: NotFound, StoreUnavailable.
    """
    by = time.time() + deadline_s

    def drained(now: Roster) -> Roster:
        record = _known(now, name)
        if record.state is EngineState.DEAD:
            return now.having(record.model_copy(update={"removed": True}))
        to = record.to(EngineState.DRAINING, "a drain was requested", drain_by=by, held_by="")
        return now.having(to)

    return _known(await roster.change(drained), name, gone_too=True)


async def remove_engine(roster: SharedRoster, name: str) -> None:
    """Remove an engine now; its calls move to other engines. Raises: NotFound, StoreUnavailable."""
    await roster.change(lambda now: now.having(_known(now, name).as_removed()))


def _known(roster: Roster, name: str, *, gone_too: bool = False) -> EngineRecord:
    record = roster.get(name)
    if record is None or (record.removed and not gone_too):
        raise NotFound(f"no engine {name!r}: `perdure engines list` shows the engines")
    return record
