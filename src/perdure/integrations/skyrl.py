"""SkyRL: returns a batch of rollouts as the `GeneratorOutput` of a custom generator.

class Exp(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        engines = inference_engine_client
        return skyrl.generator(cfg.generator, engines, run_id="try-1", agent="mini_swe_agent")
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.engines.function_engine import Ask, Sample, Sampled
from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainer_formats import graded, skyrl_output
from perdure.errors import ConfigurationError, NoResult
from perdure.integrations import trainer_engine, trainer_hooks, trainer_imports
from perdure.integrations.trainer_engine import VLLM_SAMPLING
from perdure.sandboxes.base import identity_of
from perdure.types import FinishReason, RolloutRequest

BASE = "skyrl.train.generators.base"
REFUSED = {"short": "without step_wise_trajectories, SkyRL needs a row for each prompt"}


def generator_output(
    found: Sequence[EpisodeSegments | None],
    *,
    names: Sequence[dict[str, Any]] | None = None,
    step_wise: bool = True,
    top_k: int = 0,
    masks: bool = False,
) -> dict[str, Any]:
    """A `GeneratorOutput` (a TypedDict). `step_wise` must match `generator.step_wise_trajectories`.

    `trajectory_ids` are SkyRL's own objects if SkyRL is installed, with the fields of `names`. In the
    step-wise form, rollouts that failed or have nothing to train on have no row, unless `masks`;
    `rollout_metrics["perdure/left_out"]` counts them. See `trainer_formats.skyrl_output`.
    """
    output = skyrl_output(found, names=names, step_wise=step_wise, masks=masks, top_k=top_k)
    if (experts := output["rollout_expert_indices"]) is not None and not _takes_arrays():
        output["rollout_expert_indices"] = [rows.tolist() for rows in experts]
    trajectory_id = trainer_imports.find(BASE, "TrajectoryID")
    if trajectory_id is not None:
        output["trajectory_ids"] = [trajectory_id(**one) for one in output["trajectory_ids"]]
    return output


def _takes_arrays() -> bool:
    """SkyRL 0.3.0 reads experts as nested lists; 0.4.0 refuses them and reads arrays."""
    output = trainer_imports.find(BASE, "GeneratorOutput")
    return output is None or "ndarray" in str(output.__annotations__["rollout_expert_indices"])


def generator(
    config: Any,
    inference_engine_client: Any = None,
    policy_model_name: str | None = None,
    **fields: Any,
) -> Any:
    """A `GeneratorInterface` whose `generate` runs one rollout per prompt, all at once.

    `config`: SkyRL's `cfg.generator`. Without `step_wise_trajectories`, SkyRL trains only the last
    segment of a rollout. `inference_engine_client`: SkyRL's engines, which sample unless `fields` has
    `engine="perdure"`. `policy_model_name`: SkyRL's `resolve_policy_model_name(cfg)`, needed if it trains
    a LoRA adapter. `fields`: fields of a RolloutRequest, with `run_id`, and with `dataset` if
    `env_extras` has only an `instance_id`. With `inference_engine.enable_return_routed_experts` or
    `...enable_return_sample_support_set`, segments without experts, or without kept sets, are left
    out. `without_verdict`: step-wise, `short` by default, otherwise `mask`, because SkyRL then needs
    a row for each prompt. A masked row has the mean reward of its group. Raises: ConfigurationError.
    """
    base = trainer_imports.find(BASE, "GeneratorInterface")
    if base is None:
        raise ConfigurationError("skyrl is not installed")
    step_wise = bool(config.step_wise_trajectories)
    fields, choice = trainer_hooks.split_without_verdict(
        fields, "SkyRL", "short" if step_wise else "mask", {} if step_wise else REFUSED
    )
    client = inference_engine_client
    root = str(getattr(client, "model_name", ""))
    fields, engine = trainer_engine.engine_of_run(
        fields, VLLM_SAMPLING | {"structured_outputs"}, root=root
    )
    if engine is not None and client is None:
        raise ConfigurationError(
            "skyrl.generator needs SkyRL's `inference_engine_client` as its second argument, or "
            'engine="perdure"'
        )

    engines = getattr(config, "inference_engine", None)
    replays = bool(getattr(engines, "enable_return_routed_experts", False))
    keeps = bool(getattr(engines, "enable_return_sample_support_set", False))

    async def generate(_: Any, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        requests = _requests(input_batch, fields)
        if engine is not None:
            await engine.use(_sampler(client, policy_model_name, keeps=keeps))
        told = None if engine is None else client
        asked = (input_batch.get("sampling_params") or {}) if keeps else {}
        top_k = max(0, asked.get("top_k") or 0)
        found = await _finished(
            requests,
            told,
            routed_experts=replays,
            kept_tokens=top_k > 0,
            replaces=choice == "replace",
        )
        if choice == "drop":
            found = _whole_groups(input_batch, found)
        masks = choice == "mask"
        return _output(input_batch, requests, found, step_wise=step_wise, masks=masks, top_k=top_k)

    return type("PerdureGenerator", (base,), {"generate": generate})()


def _sampler(client: Any, model: str | None, *, keeps: bool = False) -> Sample:
    """A function that samples with SkyRL's client. Its engines keep running calls while they get
    new weights, so a call may begin with one version and end with a newer one. `keeps`: ask for the
    kept sets, which SkyRL's servers return only with a top-k above 1."""

    def version() -> int | None:
        return getattr(client, "weight_version", None)

    async def sample(ask: Ask) -> Sampled:
        oldest = version()
        output = await client.generate(
            {
                "prompt_token_ids": [ask.prompt_ids],
                "sampling_params": {**ask.sampling, "logprobs": 1},
                "session_ids": [ask.session_id or None],
                **({"return_sample_support": ask.sampling.get("top_k", 0) > 1} if keeps else {}),
            },
            model=model,
        )
        (ids,), (logprobs,) = output["response_ids"], output["response_logprobs"]
        reason = FinishReason(output["stop_reasons"][0])
        experts = (output.get("rollout_expert_indices") or [None])[0]
        (support,) = output.get("rollout_sample_support") or [None]
        kept = None if support is None else [row[row >= 0].tolist() for row in support]
        return Sampled(ids, logprobs or (), reason, oldest, version(), experts, kept=kept)

    return sample


async def _finished(
    requests: Sequence[RolloutRequest],
    client: Any,
    *,
    routed_experts: bool,
    kept_tokens: bool,
    replaces: bool,
) -> list[EpisodeSegments | None]:
    """Run all rollouts at once. `client`: is told about each ended session, so that SkyRL's router
    frees that session's place."""

    async def finished(request: RolloutRequest) -> EpisodeSegments | None:
        found = await trainer_hooks.finished(
            request, routed_experts=routed_experts, kept_tokens=kept_tokens, replaces=replaces
        )
        attempts = len(found.episode.attempts) if found is not None else 0
        for attempt in range(max(1, attempts) if client is not None else 0):
            session = identity_of(request.run_id, request.workflow_id, "agent", attempt + 1)
            await client.finish_session(session)
        return found

    return list(await asyncio.gather(*map(finished, requests)))


def _whole_groups(
    batch: Mapping[str, Any], found: Sequence[EpisodeSegments | None]
) -> list[EpisodeSegments | None]:
    """None for each member of a group in which one has no verdict."""
    groups = [name.instance_id for name in batch["trajectory_ids"]]
    short = {
        group for group, one in zip(groups, found, strict=True) if trainer_hooks.lacks_verdict(one)
    }
    return [None if group in short else one for group, one in zip(groups, found, strict=True)]


def _output(
    batch: Mapping[str, Any],
    requests: Sequence[RolloutRequest],
    found: Sequence[EpisodeSegments | None],
    *,
    step_wise: bool,
    top_k: int,
    masks: bool,
) -> dict[str, Any]:
    """The batch's rollouts in order, under SkyRL's ids.

    A single group may have no verdict: the fully asynchronous trainer asks for one group at a time, and
    an error would end its process. Raises: NoResult if no rollout of several groups can be trained.
    """
    names = [
        {"instance_id": name.instance_id, "repetition_id": name.repetition_id}
        for name in batch["trajectory_ids"]
    ]
    groups = {name["instance_id"] for name in names}
    fresh = [one for one in found if one is not None and not one.episode.too_stale]
    if len(groups) > 1 and not graded(fresh):
        raise NoResult(f"none of {len(requests)} rollouts of {requests[0].run_id} can be trained")
    return generator_output(found, names=names, step_wise=step_wise, masks=masks, top_k=top_k)


def _requests(batch: Mapping[str, Any], fields: Mapping[str, Any]) -> list[RolloutRequest]:
    about = batch["batch_metadata"]
    step = f"{about.training_phase}-{about.global_step}"
    sampling = trainer_hooks.sampling_of(batch.get("sampling_params") or {})
    return [
        trainer_hooks.request_of(
            fields,
            step=step,
            instance=extras,
            sample_index=name.repetition_id,
            sampling=sampling,
        )
        for extras, name in zip(batch["env_extras"], batch["trajectory_ids"], strict=True)
    ]
