"""TRL: `GRPOTrainer` with Perdure as its rollout. A row's `prompt` is the reference of an instance.

rows = Dataset.from_list([{"prompt": "first-steps/h11-0.14.0"}])
GRPOTrainer(model, trl.reward, config, rows, rollout_func=trl.Rollouts(run_id="try-1")).train()
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainers import trl_output
from perdure.integrations import hooks
from perdure.types import RolloutRequest


class Rollouts:
    """A `rollout_func`. TRL has one row for each prompt: of a rollout with several segments it trains the
    last one, and `perdure_segments` counts all."""

    def __init__(self, *, publish: bool = True, **fields: Any) -> None:
        """`fields`: of a RolloutRequest, with `run_id`. `publish`: the engines get the model before each
        step, only it samples, and TRL's loss corrects for the recorded logprobs, as with its own vLLM."""
        self._publish = publish
        self._fields = fields
        self._engines: Any = None
        self._calls: Counter[str] = Counter()

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Raises: ConfigurationError, UpdateRefused."""
        if self._publish and self._engines is None:
            from perdure.integrations.trl_weights import Engines  # needs perdure[weights]

            self._engines = Engines(trainer)
        return trl_output(asyncio.run(self._all(self._requests(prompts, trainer))))

    async def _all(self, requests: Sequence[RolloutRequest]) -> list[EpisodeSegments | None]:
        return list(await asyncio.gather(*(hooks.finished(request) for request in requests)))

    def _requests(self, prompts: Sequence[str], trainer: Any) -> list[RolloutRequest]:
        sampling = hooks.sampling_of(_parameters(trainer.args))
        fields = {**self._versions(), **self._fields}
        step, seen = self._step(trainer), Counter[str]()
        requests = []
        for prompt in prompts:
            requests.append(
                hooks.request_of(
                    fields,
                    step=step,
                    instance=prompt,
                    sample_index=seen[prompt],
                    sampling=sampling,
                )
            )
            seen[prompt] += 1
        return requests

    def _versions(self) -> dict[str, int]:
        if self._engines is None:
            return {}
        return {"policy_version": self._engines.version, "max_staleness": 0}

    def _step(self, trainer: Any) -> str:
        """Unique for each call of each process; a trainer that restarts from a checkpoint repeats it."""
        kind = "" if trainer.model.training else "eval-"
        step = f"{kind}{trainer.state.global_step}-{trainer.accelerator.process_index}"
        self._calls[step] += 1
        return f"{step}-{self._calls[step]}"


def _parameters(args: Any) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: getattr(args, name, None) for name in names}
    return {**found, "max_tokens": getattr(args, "max_completion_length", None)}


def reward(
    completions: Sequence[Any], perdure_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    """TRL's reward function: the rollout's own. None leaves a rollout without a verdict out of its
    group's baseline, and its advantage is 0."""
    return list(perdure_reward)
