"""The models that answer a session's calls: the message format and engine of each, fixed when the
session opens.

They are recorded in the session's journal, so that every gateway process decodes recorded ids with
the same tokenizer, even after the roster changes.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from pydantic import Field

from perdure.engines.base import Engine, HostedEngine
from perdure.engines.configured_engine import ConfiguredEngine
from perdure.engines.model_choice import ChosenModel
from perdure.gateway.base import SessionSpec
from perdure.gateway.rendering.message_format import Format, load_format
from perdure.types import Frozen

KEPT_FORMATS = 8
"""Message formats kept in memory; each has a tokenizer."""


@dataclass(frozen=True)
class SessionModel:
    """A model that answers calls of a session."""

    name: str
    format: Format
    engine: Callable[[], Awaitable[Engine | HostedEngine]]
    """Raises: GatewayUnavailable."""
    is_reserved: bool = False
    """Whether only engines that are reserved for the session's run may sample."""
    tokenizer: str = ""
    """The digest of the canary of the tokenizer that encodes the session's ids."""


@dataclass(frozen=True)
class SessionModels:
    """The models of one session."""

    main: SessionModel
    others: Mapping[str, SessionModel]
    """Glob of the name in the agent's request -> the model that answers instead."""

    def of(self, asked: str) -> SessionModel:
        """The model that answers a request for `asked`."""
        matches = (model for glob, model in self.others.items() if fnmatchcase(asked, glob))
        return next(matches, self.main)

    @property
    def tokenizers(self) -> dict[str, str]:
        """By model, the digest of its tokenizer's canary."""
        return {one.name: one.tokenizer for one in (self.main, *self.others.values())}


class RecordedModels(Frozen):
    """The models of a session in its journal; None for the model of the settings."""

    main: ChosenModel | None = None
    others: dict[str, ChosenModel | None] = Field(default_factory=dict)
    """Glob of the name in the agent's request -> the model."""


class ModelLoader:
    """Finds the models that sessions name, and loads their formats."""

    def __init__(self, default: SessionModel, engine: ConfiguredEngine) -> None:
        """`default`: the model of the settings."""
        self._default = default
        self._engine = engine
        self._load = functools.lru_cache(KEPT_FORMATS)(load_format)

    async def chosen(self, spec: SessionSpec) -> RecordedModels:
        """The models that a new session names.

        Raises: ConfigurationError, which lists the available models; GatewayUnavailable,
        StoreUnavailable.
        """
        run, choose = spec.labels.get("run", ""), self._engine.choose
        others = {glob: await choose(name, run) for glob, name in spec.models.items()}
        return RecordedModels(main=await choose(spec.model, run), others=others)

    async def loaded(
        self, recorded: RecordedModels, tokenizers: Mapping[str, str] | None = None
    ) -> SessionModels:
        """`tokenizers`: those that encoded the session's ids in an earlier process, as in `SessionModels`.

        Raises: ConfigurationError if a tokenizer cannot be read on this host.
        """
        main = await self._model(recorded.main)
        others = {glob: await self._model(one) for glob, one in recorded.others.items()}
        return SessionModels(
            _with_tokenizer(main, tokenizers or {}),
            {glob: _with_tokenizer(one, tokenizers or {}) for glob, one in others.items()},
        )

    async def _model(self, recorded: ChosenModel | None) -> SessionModel:
        if recorded is None:
            return self._default
        model_format = self._default.format
        if (wanted := recorded.format) is not None:
            model_format = await asyncio.to_thread(
                self._load, wanted.tokenizer, wanted.tool_call_parser
            )
        engine = self._default.engine if recorded.is_hosted else self._engine.pool_engine
        return SessionModel(recorded.name, model_format, engine, recorded.is_reserved)


def _with_tokenizer(model: SessionModel, tokenizers: Mapping[str, str]) -> SessionModel:
    digest = tokenizers.get(model.name) or model.format.tokenizer.canary.digest
    return replace(model, tokenizer=digest)
