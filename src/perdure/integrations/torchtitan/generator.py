"""Samples with the controller's `generate_fn`, through the engine that all hooks share."""

import dataclasses
from typing import Any

from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout.types import GenerateFn

from perdure.engines.function_engine import Ask, Sampled
from perdure.types import FinishReason

ACCEPTED = frozenset({"temperature", "top_p", "max_tokens", "seed", "stop_token_ids"})
"""The fields of TorchTitan's `SamplingConfig`."""


class Generator:
    """Samples with a `generate_fn`, and keeps the metrics of its completions."""

    def __init__(self) -> None:
        self._metrics: list[m.Metric] = []

    def take_metrics(self) -> list[m.Metric]:
        """The generator's metrics since the last call: latencies by completion."""
        taken, self._metrics = self._metrics, []
        return taken

    async def sample(self, generate_fn: GenerateFn, sampling: Any, ask: Ask) -> Sampled:
        """`sampling`: the `SamplingConfig` to copy."""
        completion = await generate_fn(
            ask.prompt_ids,
            request_id=ask.request_id,
            routing_session_id=ask.session_id or None,
            sampling_config=dataclasses.replace(sampling, **{"seed": None, **ask.sampling}),
        )
        if completion is None:
            raise RuntimeError("the trainer's generator returned no completion")
        self._metrics += completion.metrics
        return Sampled(
            completion.token_ids,
            completion.token_logprobs,
            FinishReason(completion.finish_reason or FinishReason.STOP),
            completion.min_policy_version,
            completion.max_policy_version,
        )
