"""slime: hooks for its launcher, and segments as `slime.utils.types.Sample`.

    --custom-generate-function-path perdure.integrations.slime.generate
    --custom-reward-post-process-path perdure.integrations.slime.rewards
    --dynamic-sampling-filter-path perdure.integrations.slime.has_signal
    --custom-config-path perdure.yaml      # perdure: {run_id: try-1, dataset: my-set, agent: claude_code}

slime gives each sample its rollout's whole reward. If rollouts have different numbers of samples, slime
takes one mean over all samples of the batch; `rewards` takes it over the rollouts of each group.
"""

import asyncio
import base64
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perdure.dialects.base import Refused
from perdure.engines.clients.sglang import ACCEPTED, new_tokens, sampling_params
from perdure.engines.clients.token_endpoint import experts_of_int32
from perdure.engines.clients.vllm_control import version_number
from perdure.engines.function_engine import Ask, Sampled
from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainer_formats import normalized, slime_abort, slime_samples
from perdure.errors import ConfigurationError
from perdure.instances.rows.row_conversion import dataset_name
from perdure.integrations import trainer_engine, trainer_hooks, trainer_imports
from perdure.settings import process_environment
from perdure.settings.settings_loader import load_settings
from perdure.types import FinishReason, RolloutRequest

GROUP_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
DIVIDED_BY_STD = ("grpo", "gspo", "cispo")
ABORTED = "aborted"
NO_KEPT_SETS = {"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": [0, 0]}
"""For a masked sample with one token: slime refuses a step in which a sample lacks the fields."""
RUN_ID = trainer_hooks.new_run_id("slime")
"""For a training that names none. One is enough, because slime calls `generate` in one process."""
REFUSED = {"short": "slime reads a sample of each member"}
FILTER = "perdure.integrations.slime.has_signal"
STEP_POLL_S = 0.2
"""Seconds between checks whether a step is running."""

_awaited: set[str] = set()
"""Workflow ids of the rollouts for which slime waits now."""


def samples(found: EpisodeSegments, *, index: int = 0, group_index: int = 0) -> list[Any]:
    """One `Sample` per segment (a dict if slime is not installed), or a placeholder.

    `index` and `group_index` come from the input sample; all siblings have that index as `rollout_id`.
    A rollout without a verdict becomes slime's aborted sample; `rewards` leaves it out of its group.
    """
    rows = [
        _with_experts(row) for row in slime_samples(found, index=index, group_index=group_index)
    ]
    sample = trainer_imports.find("slime.utils.types", "Sample")
    return rows if sample is None else [sample.from_dict(row) for row in rows]


# --- generate --------------------------------------------------------------------------------


async def generate(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """The samples of one rollout: one per segment, or a single one for an evaluation.

    `sample.metadata` names the `instance`, a row of the imported `dataset`, or is a row itself.
    `args.perdure` holds fields of a RolloutRequest; without them, the variables of slime's
    coding-agent example apply. slime's SGLang router samples, unless they have `engine: perdure`. An
    aborted step cancels its rollouts. With `--use-rollout-routing-replay`, segments without experts are left
    out. With `--rollout-top-p` below 1, which slime replays too, so are segments without kept sets.
    `without_verdict`: `mask` by default, with slime's aborted sample; `drop` needs the filter
    `has_signal`. Raises: ConfigurationError, also if engines returned no kept set at all.
    """
    given, choice = _options(args)
    root = str(getattr(args, "hf_checkpoint", ""))
    fields, engine = trainer_engine.engine_of_run(given, ACCEPTED, root=root)
    request = _request(args, fields, sample, sampling_params, evaluation)
    replays = _replays(args) and not evaluation
    keeps = _needs_kept_sets(args) and not evaluation
    _awaited.add(request.workflow_id)
    try:
        if engine is not None:
            await engine.use(lambda ask: _sample(args, ask))
        found = await trainer_hooks.finished(
            request,
            lambda: _is_aborted(args),
            routed_experts=replays,
            kept_tokens=keeps,
            replaces=choice == "replace",
        )
    finally:
        _awaited.discard(request.workflow_id)
    if keeps and found is not None:
        _check_kept(found)
    if found is None:
        rows = [slime_abort(sample.index, sample.group_index, "no episode")]
    else:
        rows = slime_samples(found, index=sample.index, group_index=sample.group_index)
    if replays:
        rows = [_with_experts(row, args) for row in rows]
    if keeps:
        rows = [
            row | (NO_KEPT_SETS if row.get("rollout_top_p_token_ids") is None else {})
            for row in rows
        ]
    return [_like(sample, row) for row in (rows[-1:] if evaluation else rows)]


def _options(args: Any) -> tuple[dict[str, Any], str]:
    """The fields of the rollouts, and what to do without a verdict. A launcher without
    `args.perdure` gets defaults: the agent of `SWE_AGENT`, the sandboxes of
    `SWE_SANDBOX_METADATA_FILE`, the rows' file, and a new run id.

    Example: ({"run_id": "slime-261129013000-9f2c11", "dataset": "swe_train", "agent": "claude_code"},
    "mask"). Raises: ConfigurationError.
    """
    given = dict(getattr(args, "perdure", None) or {})
    given.setdefault("run_id", RUN_ID)
    given.setdefault("agent", process_environment.named("SWE_AGENT") or "claude_code")
    if "sandbox" not in given and load_settings().e2b.metadata_file:
        given["sandbox"] = "e2b"
    if "dataset" not in given and getattr(args, "prompt_data", None):
        given["dataset"] = dataset_name(str(args.prompt_data))
    fields, choice = trainer_hooks.split_without_verdict(given, "slime", "mask", REFUSED)
    if choice == "drop" and getattr(args, "dynamic_sampling_filter_path", None) != FILTER:
        raise ConfigurationError(
            f"without_verdict is 'drop': slime drops groups with --dynamic-sampling-filter-path {FILTER}"
        )
    if getattr(args, "partial_rollout", False):
        raise ConfigurationError(
            "--partial-rollout: slime carries over one sample for each member, and a rollout has one "
            "for each segment. Leave the flag out: the step then cancels its open rollouts"
        )
    return fields, choice


async def _sample(args: Any, ask: Ask) -> Sampled:
    """One completion of slime's SGLang router, which keeps the calls of a session on one engine.

    A call waits while no step runs: between steps, slime may train on the engines' GPUs, and a cancelled
    rollout may still call.
    """
    while not _awaited or _is_aborted(args):
        await asyncio.sleep(STEP_POLL_S)
    post = trainer_imports.find("slime.utils.http_utils", "post")
    assert post is not None  # slime has called `generate`
    params = sampling_params("of slime", ask.sampling)
    if _needs_kept_sets(args):
        params["custom_params"] = {"return_top_p_token_ids": True}
    answer = await _response(
        post(
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
            {
                "input_ids": ask.prompt_ids,
                "sampling_params": params,
                "return_logprob": True,
                "return_routed_experts": _replays(args),
            },
            max_retries=1,  # the gateway repeats the call
            headers={"X-SMG-Routing-Key": ask.session_id},
        )
    )
    about = answer["meta_info"]
    new = new_tokens(about, 0) if about.get("output_token_logprobs") else ()
    spans = about.get("weight_versions") or [{"version": about.get("weight_version")}]
    rows = len(ask.prompt_ids) + len(new) - 1
    experts = about.get("routed_experts")
    return Sampled(
        [entry[1] for entry in new],
        [float(entry[0]) for entry in new],
        FinishReason(about["finish_reason"]["type"]),
        version_number(spans[0]["version"]),
        version_number(spans[-1]["version"]),
        experts_of_int32(experts, rows) if experts else None,
        kept=_kept_of(about),
    )


def _kept_of(about: Mapping[str, Any]) -> list[list[int]] | None:
    """The kept sets that slime's patch of SGLang returns: two int32 arrays in base64, ids and offsets.
    SGLang 0.5.23 itself returns other fields (`output_token_sampling_mask`), which slime does not
    read."""
    ids, offsets = about.get("top_p_token_ids"), about.get("top_p_token_offsets")
    if ids is None or offsets is None:
        return None
    flat = _int32(ids)
    return [flat[start:end] for start, end in itertools.pairwise(_int32(offsets))]


def _int32(value: Any) -> list[int]:
    import numpy

    if isinstance(value, str):
        value = numpy.frombuffer(base64.b64decode(value), "<i4").tolist()
    return list(value)


def _needs_kept_sets(args: Any) -> bool:
    """Whether slime normalises over the top-p set of each token (`loss.py`, `_build_topp_keep_mask`)."""
    return getattr(args, "rollout_top_p", 1.0) != 1.0


def _check_kept(found: EpisodeSegments) -> None:
    """Raises: ConfigurationError if the engines returned no kept set of the whole rollout."""
    if found.episode.segments and not any(found.kept):
        raise ConfigurationError(
            "--rollout-top-p must be 1.0: slime trains on the top-p set of each token, and the engines "
            f"of {found.episode.rollout_id} returned none. SGLang needs slime's patch, and vLLM "
            "--return-sampling-mask"
        )


async def _response(answer: Any) -> Any:
    """Raises: Refused if SGLang refuses the content of the request, and the errors of slime's client."""
    import httpx

    try:
        return await answer
    except httpx.HTTPStatusError as error:
        raise Refused(error.response.status_code, "engine_refused", error.response.text) from None


def _replays(args: Any) -> bool:
    return bool(getattr(args, "use_rollout_routing_replay", False))


def _with_experts(row: dict[str, Any], args: Any = None) -> dict[str, Any]:
    """The row with its experts as slime reads them: int32 of shape [tokens - 1, layers, top_k].

    `args`: slime's arguments if it replays experts. A masked sample, which no engine sampled, then
    gets placeholder experts, because slime refuses a step in which a sample has none, or only
    zeros.
    """
    experts = row.get("rollout_routed_experts")
    if experts is None and args is None:
        return row
    import numpy

    if experts is None:
        rows, layers = len(row["tokens"]) - 1, args.num_layers
        experts = numpy.tile(numpy.arange(args.moe_router_topk), (rows, layers, 1))
    elif args is not None:  # SGLang returns both in one dimension
        experts = experts.reshape(len(experts), args.num_layers, args.moe_router_topk)
    return row | {"rollout_routed_experts": experts.astype(numpy.int32)}


def _request(
    args: Any,
    fields: dict[str, Any],
    sample: Any,
    sampling_params: dict[str, Any],
    evaluation: bool,
) -> RolloutRequest:
    name = "eval_max_context_len" if evaluation else "rollout_max_context_len"
    sampling = trainer_hooks.sampling_of(sampling_params)
    if getattr(args, name, None):
        sampling["max_context_tokens"] = getattr(args, name)
    return trainer_hooks.request_of(
        fields,
        step=f"{'eval-' if evaluation else ''}{_step()}",
        instance=_row(sample),
        sample_index=sample.index,
        sampling=sampling,
    )


def _row(sample: Any) -> dict[str, Any]:
    """slime's row, with the id that an import of its file gives: the metadata's own, or the label."""
    metadata = sample.metadata or {}
    known = {**(metadata.get("remote_env_info") or {}), **metadata}
    named = {"instance": metadata["instance"]} if metadata.get("instance") else {}
    name = known.get("instance_id") or sample.label
    own = {"prompt": sample.prompt, "label": sample.label, "metadata": metadata}
    return {**own, "instance_id": name, **named} if name else {**own, **named}


def _step() -> int:
    """slime's number of the rollout step."""
    number = trainer_imports.find("slime.rollout.sample_hooks", "_current_rollout_id")
    return 0 if number is None else int(number)


def _is_aborted(args: Any) -> bool:
    """Whether slime has enough samples for its step and only waits for the others to end."""
    state = trainer_imports.find("slime.rollout.sglang_rollout", "GenerateState")
    made = None if state is None else getattr(type(state), "_instances", {}).get(state)
    return made is not None and bool(made.aborted)


def _like(sample: Any, row: dict[str, Any]) -> Any:
    """A sample with the input's own fields (prompt, label, paths) and the row's fields."""
    row = {name: value for name, value in row.items() if name not in ("prompt", "label")}
    metadata = {**(sample.metadata or {}), **row["metadata"]}
    return type(sample).from_dict({**sample.to_dict(), **row, "metadata": metadata})


# --- rewards ---------------------------------------------------------------------------------


def rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Each sample's raw and normalized reward. Each rollout counts once in its group.

    A rollout without a verdict gets 0.0 and does not count in the mean. Otherwise this is slime's own
    normalization.
    """
    raw = [float(sample.reward or 0.0) for sample in samples]
    if args.advantage_estimator not in GROUP_NORMALISED or not args.rewards_normalization:
        return raw, [_verdict(sample) or 0.0 for sample in samples]
    by_std = args.advantage_estimator in DIVIDED_BY_STD and args.grpo_std_normalization
    groups: dict[Any, dict[Any, float]] = {}
    for sample in samples:
        if (reward := _verdict(sample)) is not None:
            groups.setdefault(sample.group_index, {})[_rollout(sample)] = reward
    found = {group: normalized(known, std_normalization=by_std) for group, known in groups.items()}
    return raw, [found.get(one.group_index, {}).get(_rollout(one), 0.0) for one in samples]


def has_signal(args: Any, samples: Iterable[Any], **_: Any) -> bool:
    """Whether the graded rollouts of a group have different rewards (dynamic sampling). With
    `without_verdict: drop`, false if a member has no verdict."""
    group = list(_flat(samples))
    if _options(args)[1] == "drop" and any(_lacks_verdict(sample) for sample in group):
        return False
    return len({_verdict(sample) for sample in group} - {None}) > 1


def _lacks_verdict(sample: Any) -> bool:
    """A rollout with a withheld reward was graded, so it has a verdict."""
    return _verdict(sample) is None and not (sample.metadata or {}).get("withheld")


def _verdict(sample: Any) -> float | None:
    """The rollout's whole reward; None if it was not graded."""
    known = sample.metadata or {}
    if "rollout_reward" in known:
        return None if known["rollout_reward"] is None else float(known["rollout_reward"])
    return None if sample.status.value == ABORTED or sample.reward is None else sample.reward


def _rollout(sample: Any) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    for one in samples:
        if isinstance(one, list):
            yield from _flat(one)
        else:
            yield one
