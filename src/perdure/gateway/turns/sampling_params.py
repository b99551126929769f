"""One turn's sampling parameters, from the rollout's rules and the remaining context.

A trainer must know how its tokens were sampled, so the rules override the agent's request, unless they
say `decided_by: agent`. `constraints` adds the form that the request asks of the answer.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.dialects.base import ContextExhausted, ModelRequest
from perdure.engines.hosted_sampling import set_fields
from perdure.types import Sampling, TurnSampling

ALWAYS_SENT = ("temperature", "top_p")
SENT_IF_ON = (
    *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "stop",
)
AS_JSON = ("logit_bias", "structured_outputs")
SEED_DIGITS = 12
"""Hexadecimal digits of a seed: 48 bits, which every JSON parser represents exactly."""


def turn_cap(rules: Sampling, request: ModelRequest) -> int:
    """The most tokens that this turn may sample, apart from the context budget."""
    return min(rules.max_tokens_per_turn, request.max_tokens or rules.max_tokens_per_turn)


def token_sampling(
    rules: Sampling, request: ModelRequest, prompt_tokens: int, stop_token_ids: list[int]
) -> dict[str, Any]:
    """The sampling parameters of a token engine, without a seed.

    Raises: ContextExhausted if the prompt uses up the context budget.
    """
    room = rules.max_context_tokens - prompt_tokens
    if room <= 0:
        raise ContextExhausted(prompt_tokens, rules.max_context_tokens)
    decided = {name: getattr(rules, name) for name in (*ALWAYS_SENT, *SENT_IF_ON)}
    if rules.decided_by == "agent":
        decided |= {name: v for name, v in request.sampling.items() if name in decided}
    decided["top_k"] = decided["top_k"] or _off("top_k")  # SGLang refuses 0
    on = {name: decided[name] for name in SENT_IF_ON if decided[name] != _off(name)}
    return {
        **{name: decided[name] for name in ALWAYS_SENT},
        **{name: list(value) if name == "stop" else value for name, value in on.items()},
        "max_tokens": min(turn_cap(rules, request), room),
        "stop_token_ids": [*dict.fromkeys((*stop_token_ids, *rules.stop_token_ids))],
    }


def _off(name: str) -> Any:
    return TurnSampling.model_fields[name].default


def agents_stops(rules: Sampling, request: ModelRequest) -> Sequence[str]:
    """The stop texts of the agent's request, if the agent decides its sampling; otherwise none."""
    stops: Sequence[str] = request.sampling.get("stop", ())
    return stops if rules.decided_by == "agent" else ()


def base_seed(rules: Sampling, request: ModelRequest) -> int | None:
    """The seed from which the seeds of calls are derived; None: the engine samples without a seed."""
    asked: int | None = request.sampling.get("seed")
    return asked if rules.decided_by == "agent" and asked is not None else rules.seed


def call_seed(base: int, sample: str, chain: str, turn: int) -> int:
    """The seed of one call: the same when the call is repeated, different for every other call.

    `sample`: the instance and the sample's index; `turn`: how many turns the chain has.
    """
    place = json.dumps([base, sample, chain, turn]).encode()
    return int(hashlib.sha256(place).hexdigest()[:SEED_DIGITS], 16)


def as_recorded(sent: Mapping[str, Any]) -> TurnSampling:
    """A token engine's parameters in the form that a turn records."""
    said = {name: json.dumps(sent[name], sort_keys=True) for name in AS_JSON if name in sent}
    return TurnSampling.model_validate({**sent, **said})


def chat_request(rules: Sampling, request: ModelRequest, seed: int | None) -> dict[str, Any]:
    """The request for a hosted API. `seed`: the seed of this call.

    Some hosted models refuse `temperature` and `top_p` even at 1.0. So defaults are not sent, and the
    agent decides what the rules leave at its default.
    """
    said = {**set_fields(rules), "seed": seed}
    sent = {
        name: list(value) if name == "stop" else value
        for name, value in said.items()
        if value is not None
    }
    asked = request.body
    body = {**sent, **asked} if rules.decided_by == "agent" else {**asked, **sent}
    body.pop("max_completion_tokens", None)
    body["max_tokens"] = turn_cap(rules, request)
    return body
