"""One turn's sampling parameters, from the session's rules, the request, and the context left."""

from typing import Any

from perdure.dialects.base import ContextExhausted, ModelRequest
from perdure.types import Sampling


def turn_cap(rules: Sampling, request: ModelRequest) -> int:
    """The most tokens this turn may sample, apart from the context budget."""
    return min(rules.max_tokens_per_turn, request.max_tokens or rules.max_tokens_per_turn)


def token_sampling(
    rules: Sampling, request: ModelRequest, prompt_tokens: int, stop_token_ids: list[int]
) -> dict[str, Any]:
    """The sampling parameters of a token engine.

    Raises: ContextExhausted when no token of the budget is left.
    """
    room = rules.max_context_tokens - prompt_tokens
    if room <= 0:
        raise ContextExhausted(prompt_tokens, rules.max_context_tokens)
    return {
        "temperature": rules.temperature,
        "top_p": rules.top_p,
        **request.sampling,
        "max_tokens": min(turn_cap(rules, request), room),
        "stop_token_ids": stop_token_ids,
    }


def chat_request(rules: Sampling, request: ModelRequest) -> dict[str, Any]:
    """The request as passed on to a hosted API.

    Some hosted models refuse `temperature` and `top_p` even at 1.0, so a rule of 1.0 is not sent.
    """
    said = {name: getattr(rules, name) for name in ("temperature", "top_p")}
    body = {name: value for name, value in said.items() if value != 1.0}
    body.update(request.body)
    body.pop("max_completion_tokens", None)
    body["max_tokens"] = turn_cap(rules, request)
    return body
