"""TRL: `GRPOTrainer` with Perdure's rollouts. A row's `prompt` is the reference of an instance.

from perdure.integrations import trl as perdure_trl

rows = Dataset.from_list([{"prompt": "first-steps/h11-0.14.0"}])
rollouts = perdure_trl.Rollouts(run_id="try-1")
GRPOTrainer(model, perdure_trl.reward, config, rows, rollout_func=rollouts).train()
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from perdure.client.sync_client import LoopThread
from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainer_formats import graded, trl_output
from perdure.errors import ConfigurationError
from perdure.integrations import trainer_engine, trainer_hooks
from perdure.integrations.trl_generation import ACCEPTED, COLOCATE, Generation, generation_of
from perdure.types import RolloutRequest

logger = logging.getLogger(__name__)

REFUSED = {"short": "it takes exactly one row for each prompt"}


class Rollouts:
    """A `rollout_func`. TRL takes exactly one row per prompt, so it trains only the last segment of a
    rollout. A warning names rollouts with several segments; `reward` logs the untrained ones."""

    def __init__(self, *, publish: bool = True, **fields: Any) -> None:
        """`fields`: fields of a RolloutRequest, with `run_id`. TRL's vLLM samples, unless they have
        `engine="perdure"`. `publish`: with that, Perdure's engines get the model before each step
        and sample only with it. Either way, TRL's loss corrects for the recorded logprobs.
        `without_verdict`: `mask` by default. `drop` masks the other members of the group too; a
        process must then have whole groups. Raises: ConfigurationError."""
        fields, self._without_verdict = trainer_hooks.split_without_verdict(
            fields, "TRL", "mask", REFUSED
        )
        self._fields, self._uses_trainers = trainer_engine.split_engine_option(fields)
        self._publish = publish
        self._trainer: Any = None
        self._engines: Any = None
        """Perdure's, if this publishes to them."""
        self._generation: Generation | None = None
        """TRL's, if this process samples."""
        self._calls: Counter[str] = Counter()

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Raises: ConfigurationError, UpdateRefused, StoreUnavailable, OSError."""
        drops = self._without_verdict == "drop"
        groups = _groups(prompts, trainer) if drops else []
        if self._trainer is not trainer:
            self._begin(trainer)
            self._trainer = trainer
        found = asyncio.run(self._all(self._requests(prompts, trainer)))
        if drops:
            found = _whole_groups(groups, found)
        _warn_of_untrained([one for one in found if one is not None])
        return trl_output(found)

    def _begin(self, trainer: Any) -> None:
        if self._uses_trainers:
            self._serve(trainer)
        elif self._publish:
            from perdure.integrations.trl_weights import Engines  # needs perdure[trainer]

            self._engines = Engines(trainer)

    def _serve(self, trainer: Any) -> None:
        """Register TRL's vLLM before any process starts a rollout. A colocated one samples only for the
        rollouts of its process."""
        self._generation = generation_of(trainer)
        if self._generation is not None:
            run_id = str(self._fields.get("run_id"))
            if trainer.vllm_generation.mode == COLOCATE:
                run_id = f"{run_id}-{trainer.accelerator.process_index}"
            root = str(trainer.model.name_or_path)
            _, engine = trainer_engine.engine_of_run(
                {**self._fields, "run_id": run_id}, ACCEPTED, root=root
            )
            assert engine is not None  # by default
            # In a loop that does not end with this call, because other processes may still sample.
            LoopThread().do(engine.use(self._generation.sample))
        trainer.accelerator.wait_for_everyone()

    async def _all(self, requests: Sequence[RolloutRequest]) -> list[EpisodeSegments | None]:
        replaces = self._without_verdict == "replace"
        rollouts = asyncio.gather(
            *(trainer_hooks.finished(request, replaces=replaces) for request in requests)
        )
        if self._generation is None:
            return list(await rollouts)
        return list(await self._generation.until(rollouts))

    def _requests(self, prompts: Sequence[str], trainer: Any) -> list[RolloutRequest]:
        sampling = trainer_hooks.sampling_of(_parameters(trainer.args))
        given = {name: v for name, v in self._fields.items() if name != "engine_host"}
        fields = {**self._versions(), **given}
        step, seen = self._step(trainer), Counter[str]()
        requests = []
        for prompt in prompts:
            requests.append(
                trainer_hooks.request_of(
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
        """Unique per call and process. A trainer that restarts from a checkpoint gets the same names."""
        kind = "" if trainer.model.training else "eval-"
        step = f"{trainer.accelerator.process_index}-{kind}{trainer.state.global_step}"
        self._calls[step] += 1
        return f"{step}-{self._calls[step]}"


def _groups(prompts: Sequence[str], trainer: Any) -> list[int]:
    """The number of each row's group. Raises: ConfigurationError if a group is split."""
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    whole = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    if any(len(group) < size or len(set(group)) > 1 for group in whole):
        raise ConfigurationError(
            f"without_verdict is 'drop', but this process has only a part of a group of {size}: make "
            "the rows of a process a multiple of num_generations"
        )
    return [row // size for row in range(len(prompts))]


def _whole_groups(
    groups: Sequence[int], found: Sequence[EpisodeSegments | None]
) -> list[EpisodeSegments | None]:
    """None for each member of a group in which one has no verdict."""
    rows = list(zip(groups, found, strict=True))
    short = {group for group, one in rows if trainer_hooks.lacks_verdict(one)}
    return [None if group in short else one for group, one in rows]


def _parameters(args: Any) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: getattr(args, name, None) for name in names}
    return {**found, "max_tokens": getattr(args, "max_completion_length", None)}


def _warn_of_untrained(found: Sequence[EpisodeSegments]) -> None:
    several = [one for one in graded(found) if len(one.segments) > 1]
    if several:
        logger.warning(
            "TRL trains the last segment of each rollout: %d segments of %s are not trained",
            sum(len(one.segments) - 1 for one in several),
            ", ".join(one.episode.rollout_id for one in several),
        )


def reward(
    completions: Sequence[Any],
    perdure_reward: Sequence[float | None],
    perdure_segments: Sequence[int],
    log_metric: Callable[[str, float], None],
    **_: Any,
) -> list[float | None]:
    """A reward function for TRL that returns the rollout's own reward.

    None leaves a rollout without a verdict out of its group's baseline; its advantage is 0. TRL logs
    untrained segments per rollout and the share of rollouts without a verdict.
    """
    known = max(1, len(perdure_reward))
    untrained = sum(max(0, segments - 1) for segments in perdure_segments)
    log_metric("perdure/untrained_segments", untrained / known)
    log_metric("perdure/left_out", sum(one is None for one in perdure_reward) / known)
    return list(perdure_reward)
