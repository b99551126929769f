"""What the trainers' own code reads of the kept sets of two turns. Prints JSON.

Each token was sampled from a random distribution cut by top-p. For each trainer: the largest difference
between the recorded logprobs and those normalised over the sets that it reads.
"""

# mypy: ignore-errors

import contextlib
import itertools
import json
import sys
import typing
from types import SimpleNamespace

import absent
import torch
import typing_extensions

from perdure.episodes import trainer_formats
from perdure.episodes.episode import EpisodeParts, EpisodeSegments, build_episode
from perdure.episodes.recorded_messages import conversations
from perdure.episodes.segment_kept_tokens import segment_kept_tokens
from perdure.episodes.trajectory_segments import cut
from perdure.types import Grade, Outcome, Rewards, RolloutRequest, RolloutStatus, Turn
from perdure.types.kept_tokens import KeptTokens

WORDS, TOKENS, TOP_P, TOP_K = 40, 12, 0.8, 32


def sampled(logits):
    """Tokens, logprobs and kept sets, one for each row."""
    ids, logprobs, sets = [], [], []
    for row in logits:
        probs, order = row.softmax(-1).sort(descending=True)
        kept = order[: int((probs.cumsum(0) < TOP_P).sum()) + 1]
        token = kept[torch.multinomial(row[kept].softmax(-1), 1)].item()
        ids.append(token)
        logprobs.append(over(row, token, kept))
        sets.append(kept.tolist())
    return ids, logprobs, sets


def over(row, token, kept) -> float:
    return float(row[token] - row[kept].logsumexp(-1))


def turn(index, prompt, logits, parent=None):
    ids, logprobs, sets = sampled(logits)
    given = {"index": index, "prompt_ids": prompt, "completion_ids": ids, "logprobs": logprobs}
    return Turn(**given, parent=parent, bridged=parent is not None, kept_tokens=KeptTokens.of(sets))


def by_slime(found):
    from slime.utils.types import Sample

    (row,) = trainer_formats.slime_samples(found, index=0, group_index=0)
    sample = Sample.from_dict(row)
    sample._validate_response_metadata_lengths()
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


def by_skyrl(found):
    import transformers.modeling_utils  # noqa: F401  # it asks once for FlashAttention

    typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12
    absent.stand_in(absent.SKYRL)
    from skyrl.backends.skyrl_train.utils.sample_support import validate_sample_support
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    from perdure.integrations import skyrl

    out = skyrl.generator_output([found], top_k=TOP_K)
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    *_, support = convert_prompts_responses_to_batch_tensors(
        *(0, *(out[name] for name in names)), rollout_sample_support=out["rollout_sample_support"]
    )
    rows = validate_sample_support(support.values.numpy())
    return [row[row >= 0] for row in rows]


def by_verifiers(found, turns):
    from verifiers.v1.trace import Branch

    from perdure.integrations import verifiers

    (segment,) = found.segments
    trace = SimpleNamespace(nodes=[], calls=[])
    verifiers._add_branch(trace, turns, conversations(turns), None)
    mask = Branch.sampling_mask.fget(SimpleNamespace(nodes=trace.nodes))
    sets = torch.split(torch.as_tensor(mask.ids), torch.as_tensor(mask.counts).tolist())
    return sets[len(segment.prompt_ids) :]


def main() -> dict:
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, TOKENS, WORDS)
    first = turn(0, (1, 2, 3), logits[0])
    second = turn(1, (*first.prompt_ids, *first.completion_ids, 4, 5), logits[1], parent=0)
    turns = (first, second)
    segments = tuple(cut(turns))
    parts = EpisodeParts(
        request=RolloutRequest(run_id="r", instance="tests/kept"),
        status=RolloutStatus.GRADED,
        grade=Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0)),
        started_at=0.0,
        finished_at=1.0,
        turns=turns,
    )
    kept = tuple(segment_kept_tokens(turns, segments))
    found = EpisodeSegments(build_episode(parts, segments), segments, (), kept)
    (segment,) = segments
    rows = torch.cat([logits[0], torch.zeros(2, WORDS), logits[1]])

    def differs(sets) -> float:
        trained = zip(
            *(rows, segment.response_ids, segment.logprobs, segment.loss_mask, sets), strict=True
        )
        return max(
            abs(over(row, token, torch.as_tensor(ids).long()) - logprob)
            for row, token, logprob, is_trained, ids in trained
            if is_trained
        )

    return {
        "slime": differs(by_slime(found)) if "slime" in sys.argv else None,
        "skyrl": differs(by_skyrl(found)),
        "verifiers": differs(by_verifiers(found, turns)),
        "whole vocabulary": differs([torch.arange(WORDS)] * len(segment.response_ids)),
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        said = main()
    print(json.dumps(said))
