"""Serves the controller's `generate_fn` as the engine of this home's gateways.

The trainer syncs weights into its generators itself, so this does not use Perdure's `Weights`.
"""

import asyncio
import contextlib
import dataclasses
from typing import Any

from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout.types import GenerateFn

from perdure.engines.engine_roster import StoredRoster, add_engine, remove_engine, roster_key
from perdure.engines.engine_state import EngineSpec, name_of
from perdure.engines.function_engine import Ask, Sampled, ServedFunction
from perdure.errors import NotFound, StoreUnavailable
from perdure.home_folder import load_secret
from perdure.settings.settings_loader import load_settings
from perdure.storage.store_url import open_store
from perdure.types import DEFAULT_MODEL, FinishReason

ACCEPTED = frozenset({"temperature", "top_p", "max_tokens", "seed", "stop_token_ids"})
"""The fields of TorchTitan's `SamplingConfig`."""


class GeneratorEngine:
    """An engine that registers itself with the home's gateways at its first use."""

    def __init__(self, host: str, port: int) -> None:
        """`host`: the address at which gateways reach this process."""
        self._address = (host, port)
        self._starting = asyncio.Lock()
        self._served: ServedFunction | None = None
        self._generate_fn: GenerateFn | None = None
        self._sampling: Any = None
        self._metrics: list[m.Metric] = []

    async def use(self, generate_fn: GenerateFn, sampling: Any) -> None:
        """Sample with this function from now on; `sampling` is the `SamplingConfig` to copy.

        Raises: OSError (the port is taken), ConfigurationError, StoreUnavailable.
        """
        self._generate_fn, self._sampling = generate_fn, sampling
        async with self._starting:
            if self._served is None:
                host, port = self._address
                served = ServedFunction(self._sample, accepts=ACCEPTED, host=host, port=port)
                await served.start()
                self._served = served
                await _register(served.url)

    async def stop(self) -> None:
        """Stop serving and remove the engine from the roster: the next one has another port."""
        if self._served is not None:
            with contextlib.suppress(NotFound, StoreUnavailable):
                await remove_engine(_roster(), name_of(self._served.url))
            await self._served.stop()

    def take_metrics(self) -> list[m.Metric]:
        """The generator's metrics since the last call: latencies by completion."""
        taken, self._metrics = self._metrics, []
        return taken

    async def _sample(self, ask: Ask) -> Sampled:
        assert self._generate_fn is not None  # the caller has called `use`
        completion = await self._generate_fn(
            ask.prompt_ids,
            request_id=ask.request_id,
            routing_session_id=ask.session_id or None,
            sampling_config=dataclasses.replace(self._sampling, **{"seed": None, **ask.sampling}),
        )
        if completion is None:
            raise RuntimeError("the trainer's generator returned no completion")
        self._metrics += completion.metrics
        return Sampled(
            completion.token_ids,
            completion.token_logprobs,
            FinishReason(completion.finish_reason or FinishReason.STOP),
            completion.min_policy_version,
        )


async def _register(url: str) -> None:
    model = load_settings().engine.model or DEFAULT_MODEL
    await add_engine(_roster(), EngineSpec(url), model, default=model)


def _roster() -> StoredRoster:
    settings = load_settings()
    return StoredRoster(open_store(settings), roster_key(load_secret(settings)))
