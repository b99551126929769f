"""The sync version of `perdure.engines.weights.weight_publishing`, for trainers without an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from perdure.engines.weights import weight_publishing
from perdure.engines.weights.weight_publishing import Published, WeightSource
from perdure.engines.weights.weight_update import (
    DEFAULT_POLICY,
    NOTICE_S,
    Canaries,
    Checkpoint,
    Updated,
    UpdatePolicy,
)
from perdure.settings.settings_tree import Settings
from perdure.types import DEFAULT_MODEL

Result = TypeVar("Result")


class Weights:
    """See `perdure.engines.weights.weight_publishing.Weights`."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        model: str = DEFAULT_MODEL,
        into: Path | None = None,
        notice_s: float = NOTICE_S,
    ) -> None:
        self._settings, self._model = settings, model
        self._into, self._notice_s = into, notice_s

    def published(self) -> Published | None:
        return self._do(lambda weights: weights.published())

    def publish(
        self,
        version: int,
        source: WeightSource,
        canaries: Canaries,
        policy: UpdatePolicy = DEFAULT_POLICY,
        *,
        previous: Checkpoint | None = None,
    ) -> list[Updated]:
        return self._do(
            lambda weights: weights.publish(version, source, canaries, policy, previous=previous)
        )

    def catch_up(self, policy: UpdatePolicy = DEFAULT_POLICY) -> list[Updated]:
        return self._do(lambda weights: weights.catch_up(policy))

    def _do(self, call: Callable[[weight_publishing.Weights], Awaitable[Result]]) -> Result:
        async def whole() -> Result:
            async with weight_publishing.Weights(
                self._settings, model=self._model, into=self._into, notice_s=self._notice_s
            ) as weights:
                return await call(weights)

        return asyncio.run(whole())
