"""Converts episodes to the fields of slime, SkyRL, TorchTitan, verl and TRL.

Maps segments to each trainer's fields, as plain dicts; `perdure.integrations` makes the trainers'
own objects from them. Ids, masks and logprobs are copied, never computed. The fields are those of
slime 624b824a8 and of PyPI's skyrl 0.4.0, torchtitan 0.3.0, verl 0.9.1 and trl 1.16.0.

Experts, for router replay, are numpy arrays [tokens - 1, layers, top_k] of prompt and response, uint8 or
int16; None if they were not read, or if engines did not return all of them. The trainers expect
this form: slime asserts `tokens - 1` rows (`prepare_routed_experts_for_routing_replay`); verl and
SkyRL place the rows at the start of the sequence and mask the rest.

Kept sets, for a trainer that normalises over the tokens that top-p and top-k left, are read by slime
(`rollout_top_p_token_ids` and `..._offsets`), by SkyRL (`rollout_sample_support`) and, through
verifiers 0.4.0 (`sampling_mask`), by prime-rl. verl, TorchTitan and TRL of the versions above do not
read them.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from perdure.episodes.episode import Episode, EpisodeSegments
from perdure.episodes.segment_kept_tokens import KeptSets
from perdure.types import ExpertRows, FinishReason, Outcome, Segment, SegmentKind

T = TypeVar("T")
Row = dict[str, Any]
NO_VERSION = -1
EPSILON = 1e-6
"""The same as in slime's `_post_process_rewards` and verl's `compute_grpo_outcome_advantage`."""
MASKED = Segment(
    kind=SegmentKind.FINAL,
    index=0,
    chain="main",
    prompt_ids=(0,),
    response_ids=(0,),
    loss_mask=(0,),
    logprobs=(0.0,),
    versions=(NO_VERSION,),
    finish_reason=FinishReason.STOP,
    turns=(),
)
"""A masked segment, for trainers that need a row for a rollout without segments."""


# --- slime -----------------------------------------------------------------------------------


def slime_samples(found: EpisodeSegments, *, index: int, group_index: int) -> list[Row]:
    """Dicts for `Sample.from_dict`, one per segment, all with the `rollout_id` of the input sample.

    A rollout without a segment or a verdict gives slime's own aborted sample: one masked token with
    reward 0.0, because slime's step raises a TypeError for None. `metadata["rollout_reward"]` is
    null if there is no verdict; `integrations.slime.rewards` leaves such a sample out of its group.
    A rollout that is too stale keeps its reward, and slime masks its samples (`remove_sample`).
    """
    if found.episode.reward is None or not found.segments:
        return [_slime_placeholder(found, index, group_index)]
    return [_slime_sample(found, segment, index, group_index) for segment in found.segments]


def _slime_sample(found: EpisodeSegments, segment: Segment, index: int, group_index: int) -> Row:
    truncated = segment.finish_reason is FinishReason.LENGTH
    return _slime_base(found.episode, index, group_index) | {
        "tokens": [*segment.prompt_ids, *segment.response_ids],
        "response_length": len(segment.response_ids),
        "reward": found.reward_of(segment),
        "loss_mask": list(segment.loss_mask),
        "weight_versions": [str(version) for version in _versions(segment)],
        "rollout_log_probs": list(segment.logprobs),
        "rollout_routed_experts": found.experts_of(segment),
        **_slime_kept(found.kept_of(segment)),
        "status": "truncated" if truncated else "completed",
        "metadata": _facts(found, segment),
    }


def _slime_kept(kept: KeptSets | None) -> Row:
    return {
        "rollout_top_p_token_ids": None if kept is None else kept.ids,
        "rollout_top_p_token_offsets": None if kept is None else kept.offsets,
    }


def _slime_placeholder(found: EpisodeSegments, index: int, group_index: int) -> Row:
    return _slime_base(found.episode, index, group_index) | {
        **slime_abort(index, group_index, ""),
        "reward": found.episode.reward or 0.0,
        "metadata": _episode_facts(found.episode) | {"num_segments": len(found.segments)},
    }


def slime_abort(index: int, group_index: int, reason: str) -> Row:
    """The sample of a rollout without data, as slime's own examples return it."""
    return {
        "group_index": group_index,
        "index": index,
        "rollout_id": index,
        "tokens": [0, 0],
        "response": "",
        "response_length": 1,
        "reward": 0.0,
        "loss_mask": [0],
        "weight_versions": [],
        "rollout_log_probs": [0.0],
        "remove_sample": True,
        "status": "aborted",
        "metadata": {"rollout_reward": None, "abort_reason": reason},
    }


def _slime_base(episode: Episode, index: int, group_index: int) -> Row:
    return {
        "group_index": group_index,
        "index": index,
        "rollout_id": index,
        "prompt": "",
        "response": "",
        "label": episode.instance_id,
        "remove_sample": bool(episode.too_stale),
        "session_id": episode.rollout_id,
    }


# --- SkyRL -----------------------------------------------------------------------------------


def skyrl_output(
    found: Sequence[EpisodeSegments | None],
    *,
    names: Sequence[Row] | None = None,
    step_wise: bool = True,
    top_k: int = 0,
    masks: bool = False,
) -> Row:
    """One `GeneratorOutput`. Each row repeats the rollout's times.

    Step-wise, it has one row per segment, with the rows of a rollout together. The last token of
    the last row has the whole reward, and SkyRL gives its advantage to all. Otherwise it has one
    row per rollout, its last segment. `names`: SkyRL's `TrajectoryID` of each; needed if one has no
    episode. SkyRL has no missing rewards, so a rollout without a verdict or segments has no row if
    another rollout has one. If each needs a row (not step-wise, none is graded, or `masks`), it
    gets one masked token, with the mean reward of its instance's rollouts. The rows of a rollout
    that is too stale have its reward and no trained token. `top_k`: the width of the kept sets, the
    same for all outputs of a step; 0 if SkyRL does not replay them.
    """
    named = names or [_trajectory(one.episode) for one in found if one is not None]
    rows = _skyrl_rows(list(zip(found, named, strict=True)), step_wise=step_wise, masks=masks)
    episodes = [None if row.rollout is None else row.rollout.episode for row in rows]
    return {
        "prompt_token_ids": [list(row.segment.prompt_ids) for row in rows],
        "response_ids": [list(row.segment.response_ids) for row in rows],
        "rewards": [_at_the_end(row) for row in rows],
        "loss_masks": [list(row.segment.loss_mask) for row in rows],
        "stop_reasons": [row.segment.finish_reason.value for row in rows],
        "rollout_metrics": _metrics(found, rows),
        "rollout_logprobs": [list(row.segment.logprobs) for row in rows],
        "trajectory_ids": [row.name for row in rows],
        "trajectory_generation_times": [one.seconds if one else 0.0 for one in episodes],
        "trajectory_time_splits": {
            "llm": [one.engine_seconds if one else 0.0 for one in episodes],
            "env": [one.environment_seconds if one else 0.0 for one in episodes],
        },
        "rollout_expert_indices": _skyrl_experts(rows),
        "rollout_sample_support": _skyrl_support(rows, top_k) if top_k > 0 else None,
        "is_last_step": [row.is_last for row in rows],
        "env_metrics": [_facts(row.rollout, row.segment) if row.rollout else {} for row in rows],
        "pixel_values": None,
        "image_grid_thw": None,
    }


class _SkyrlRow(NamedTuple):
    name: Row
    rollout: EpisodeSegments | None
    segment: Segment
    reward: float
    is_last: bool = True


def _trajectory(episode: Episode) -> Row:
    return {"instance_id": episode.instance_id, "repetition_id": episode.sample_index}


def _skyrl_rows(
    found: Sequence[tuple[EpisodeSegments | None, Row]], *, step_wise: bool, masks: bool
) -> list[_SkyrlRow]:
    rewards: dict[str, list[float]] = {}
    for one, name in found:
        if one is not None and graded([one]):
            rewards.setdefault(name["instance_id"], []).append(one.episode.reward or 0.0)
    rows = []
    for one, name in found:
        if one is not None and graded([one]):
            reward = one.episode.reward or 0.0
            for segment in one.segments if step_wise else one.segments[-1:]:
                last = segment is one.segments[-1]
                rows.append(_SkyrlRow(name, one, segment, reward if last else 0.0, last))
        elif masks or not (step_wise and rewards):
            known = rewards.get(name["instance_id"])
            rows.append(_SkyrlRow(name, one, MASKED, statistics.fmean(known) if known else 0.0))
    return rows


def _skyrl_support(rows: Sequence[_SkyrlRow], top_k: int) -> list[Any] | None:
    """The kept sets as SkyRL reads them: for each row, int32 [response tokens, top_k], padded with -1.
    A token that is not trained has only padding. None if a trained token has no set."""
    import numpy

    kept = [None if one.rollout is None else one.rollout.kept_of(one.segment) for one in rows]
    if any(k is None and any(one.segment.loss_mask) for k, one in zip(kept, rows, strict=True)):
        return None
    sizes: list[Any] = [numpy.zeros(1, int) if k is None else numpy.diff(k.offsets) for k in kept]
    width = max(top_k, *(int(one.max(initial=0)) for one in sizes))
    found = []
    for one, sets, counts in zip(rows, kept, sizes, strict=True):
        table = numpy.full((len(one.segment.response_ids), width), -1, numpy.int32)
        if sets is not None:
            table[numpy.arange(width) < counts[:, None]] = sets.ids
        found.append(table)
    return found


def _skyrl_experts(rows: Sequence[_SkyrlRow]) -> list[ExpertRows] | None:
    """One array for each row, as SkyRL requires. None if some are missing, because SkyRL would
    replay zeros for them. A masked token, which no engine sampled, gets the experts of a real
    one."""
    masked = [one.rollout is None or one.segment is MASKED for one in rows]
    real = [
        one.rollout.experts_of(one.segment)
        for one, is_masked in zip(rows, masked, strict=True)
        if one.rollout is not None and not is_masked
    ]
    known = [experts for experts in real if experts is not None]
    if not known or len(known) < len(real):
        return None
    following = iter(known)
    return [known[0][:1] if is_masked else next(following) for is_masked in masked]


def _at_the_end(row: _SkyrlRow) -> list[float]:
    return [0.0] * (len(row.segment.response_ids) - 1) + [row.reward]


def _metrics(
    found: Sequence[EpisodeSegments | None], rows: Sequence[_SkyrlRow]
) -> dict[str, float]:
    """Counts of the batch, including rollouts without rows."""
    kept = graded([one for one in found if one is not None])
    outcomes = Counter(one.episode.outcome for one in kept if one.episode.outcome)
    segments = sum(len(one.segments) for one in kept)
    return {
        "perdure/rollouts": len(found),
        "perdure/left_out": len(found) - len(kept),
        "perdure/too_stale": sum(bool(one.episode.too_stale) for one in kept),
        "perdure/segments": segments,
        "perdure/untrained_segments": segments - sum(any(row.segment.loss_mask) for row in rows),
        **{f"perdure/{outcome.value}": n for outcome, n in sorted(outcomes.items())},
    }


# --- TorchTitan ------------------------------------------------------------------------------


def torchtitan_samples(found: EpisodeSegments, *, group_id: int, advantage: float) -> list[Row]:
    """`TrainingSample` fields, one sample per segment, packed into one sequence [L]. `metadata` is
    an extra key, because TorchTitan has no field for it.

    Every sample gets the rollout's whole advantage. Empty without a verdict or segments, and if the
    rollout is too stale to train.
    """
    if found.episode.reward is None or found.episode.too_stale:
        return []
    return [_training_sample(found, segment, group_id, advantage) for segment in found.segments]


def _training_sample(
    found: EpisodeSegments, segment: Segment, group_id: int, advantage: float
) -> Row:
    prompt = len(segment.prompt_ids)
    mask = [False] * prompt + [bool(one) for one in segment.loss_mask]
    oldest, newest = segment.policy_version_min, segment.policy_version_max
    return {
        "min_policy_version": NO_VERSION if oldest is None else oldest,
        "max_policy_version": NO_VERSION if newest is None else newest,
        "rollout_id": {
            "group_id": group_id,
            "rollout_id": found.episode.sample_index,
            "turn_id": segment.turns[0] if segment.turns else 0,
        },
        "token_ids": [*segment.prompt_ids, *segment.response_ids],
        "loss_mask": mask,
        "logprobs": [0.0] * prompt + list(segment.logprobs),
        "advantage": [advantage if trained else 0.0 for trained in mask],
        "metadata": _facts(found, segment),
    }


def group_advantages(
    episodes: Iterable[Episode], *, std_normalization: bool = False
) -> dict[str, float]:
    """`rollout_id` -> its advantage among its group's graded rollouts, by `normalized`."""
    groups: dict[str, dict[str, float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            groups.setdefault(episode.group_id, {})[episode.rollout_id] = episode.reward
    found: dict[str, float] = {}
    for rewards in groups.values():
        found |= normalized(rewards, std_normalization=std_normalization)
    return found


def normalized(rewards: Mapping[T, float], *, std_normalization: bool) -> dict[T, float]:
    """Each rollout's reward minus the mean of its group. With `std_normalization`, it is divided by
    the sample standard deviation + EPSILON: GRPO (arXiv 2402.03300, 4.1.2). Without, it is Dr. GRPO
    (arXiv 2503.20783). Equal rewards give exact zeros."""
    mean = statistics.mean(rewards.values())
    spread = statistics.stdev(rewards.values()) if std_normalization and len(rewards) > 1 else 0.0
    scale = spread + EPSILON if std_normalization else 1.0
    return {rollout: (reward - mean) / scale for rollout, reward in rewards.items()}


# --- verl ------------------------------------------------------------------------------------


def verl_outputs(found: EpisodeSegments) -> list[Row]:
    """`AgentLoopOutput` fields, one per segment; empty without a verdict, because verl would
    compute a reward for a `reward_score` of None. Each has the whole reward whatever its share:
    verl uses the last one's for all of them, and its baseline counts each rollout once. Those of a
    rollout that is too stale have no trained token."""
    if found.episode.reward is None:
        return []
    return [_agent_loop_output(found, segment) for segment in found.segments]


def _agent_loop_output(found: EpisodeSegments, segment: Segment) -> Row:
    episode = found.episode
    return {
        "prompt_ids": list(segment.prompt_ids),
        "response_ids": list(segment.response_ids),
        "response_mask": list(segment.loss_mask),
        "response_logprobs": list(segment.logprobs),
        "routed_experts": found.experts_of(segment),
        "multi_modal_data": None,
        "reward_score": episode.reward,
        "num_turns": 2 * len(segment.turns),
        "metrics": {
            "generate_sequences": episode.engine_seconds,
            "tool_calls": episode.environment_seconds,
            "compute_score": episode.stage_seconds.get("grade", 0.0),
            "num_preempted": -1 if episode.preemptions is None else episode.preemptions,
        },
        "extra_fields": _facts(found, segment)
        | _weight_steps(segment)
        | {"reward_extra_info": _reward_facts(episode)},
        "mm_processor_kwargs": None,
    }


def _weight_steps(segment: Segment) -> Row:
    """The versions that sampled it, as the steps in which verl's trainer counts staleness. None if
    they are unknown: `verl_agent_loop` then gives the row's own step, because verl's trainer needs
    a
    number."""
    oldest, newest = segment.policy_version_min, segment.policy_version_max
    known = oldest is not None and oldest != NO_VERSION
    return {
        "min_global_steps": oldest if known else None,
        "max_global_steps": newest if known else None,
    }


def _reward_facts(episode: Episode) -> dict[str, float]:
    """Values that verl reads from every output with a reward, and whose means it reports."""
    return {"resolved": float(episode.outcome is Outcome.RESOLVED)}


# --- TRL -------------------------------------------------------------------------------------


def trl_output(found: Sequence[EpisodeSegments | None]) -> Row:
    """The return value of a `rollout_func` of `GRPOTrainer`: one row per rollout, its last segment.

    A rollout without trainable segments has one masked token and reward None. One that is too
    stale has its reward and no trained token.
    """
    rows = [_trl_row(one) for one in found]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _trl_row(found: EpisodeSegments | None) -> Row:
    reward = None if found is None else found.episode.reward
    if found is None or reward is None or not found.segments:
        nothing: Row = {
            "prompt_ids": [0],
            "completion_ids": [0],
            "logprobs": [0.0],
            "env_mask": [0],
        }
        known = {} if found is None else _episode_facts(found.episode)
        return nothing | {
            "perdure_reward": reward,
            "perdure_segments": 0,
            "perdure_metadata": known,
        }
    segment = found.segments[-1]
    return {
        "prompt_ids": list(segment.prompt_ids),
        "completion_ids": list(segment.response_ids),
        "logprobs": list(segment.logprobs),
        "env_mask": list(segment.loss_mask),
        "perdure_reward": reward,
        "perdure_segments": len(found.segments),
        "perdure_metadata": _facts(found, segment),
    }


def graded(found: Sequence[EpisodeSegments]) -> list[EpisodeSegments]:
    """Those with a verdict and segments."""
    return [one for one in found if one.episode.reward is not None and one.segments]


# --- common ----------------------------------------------------------------------------------


def _facts(found: EpisodeSegments, segment: Segment) -> Row:
    """A segment's metadata, under slime's documented names, and the facts of its rollout."""
    return _episode_facts(found.episode) | {
        "segment_kind": segment.kind.value,
        "finish_reason": segment.finish_reason.value,
        "segment_idx": segment.index,
        "num_segments": len(found.segments),
        "reward_share": segment.reward_share,
        "chain": segment.chain,
        "turns": list(segment.turns),
        "policy_version_min": segment.policy_version_min,
        "policy_version_max": segment.policy_version_max,
        **sampling_facts(segment),
    }


def sampling_facts(segment: Segment) -> Row:
    """How its tokens were sampled: the common temperature, and each turn's span of the response."""
    return {
        "temperature": segment.temperature,
        "sampling": [span.model_dump(mode="json") for span in segment.sampling],
    }


def _episode_facts(episode: Episode) -> Row:
    return {
        "instance_id": episode.instance_id,
        "sample_index": episode.sample_index,
        "group_id": episode.group_id,
        "rollout": episode.rollout_id,
        "rollout_reward": episode.reward,
        "status": episode.status.value,
        "outcome": episode.outcome.value if episode.outcome else None,
        "agent_end": episode.agent_end.value if episode.agent_end else None,
        "failure": episode.failure.message if episode.failure else None,
        "too_stale": episode.too_stale,
        **episode.audit(),
        "named_rewards": episode.named_rewards,
    }


def _versions(segment: Segment) -> list[int]:
    """The policy versions of the trained tokens, in order of appearance, each once."""
    return list(dict.fromkeys(version for version in segment.versions if version != NO_VERSION))
