"""The contract of an engine: token ids in, token ids and logprobs out; or a hosted chat API.

A new kind of engine is one client in `engines/clients` that implements one of these two protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perdure.types import (
    EngineSpan,
    FinishReason,
    Frozen,
    RoutedExperts,
    Sampling,
    VersionSpan,
)
from perdure.types.kept_tokens import KeptTokens

if TYPE_CHECKING:
    from perdure.engines.pool.completion_call import GenerateCall

TOO_STALE = "policy_too_stale"
"""Error code if every engine serves newer weights than the session's group accepts."""
OTHER_TOKENIZER = "tokenizer_changed"
"""Error code if the session's model now has another tokenizer than the session's prompts."""


class Wait(Frozen):
    """Why a call has no answer yet: it waits for an engine, or its last try got no usable answer."""

    since: float
    """Unix seconds."""
    reason: str
    """Why no engine can take the call, as text for people."""
    until: float = 0.0
    """Unix seconds at which an exhausted quota resets; 0 if nothing says when the wait ends."""


class Completion(NamedTuple):
    """A sampled completion. Shapes: token_ids [C], logprobs [C]."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    versions: Sequence[VersionSpan]
    engine: str
    engines: Sequence[EngineSpan] = ()
    waited_s: float = 0.0
    """Seconds in which the call was on no engine."""
    asked_model: str = ""
    """The model's name in the request."""
    model: str = ""
    """The model that answered, as the engine names it."""
    routed_experts: RoutedExperts | None = None
    """The experts from position `routed_from` on; None if an engine returned none for some
    tokens."""
    kept_tokens: KeptTokens | None = None
    """None if an engine returned none for some tokens."""
    preemptions: int | None = None
    """How often engines preempted the call; None if they do not tell."""


class ChatAnswer(NamedTuple):
    """A hosted API's answer to one call."""

    completion: dict[str, Any]
    """An OpenAI chat completion object, not streamed."""
    waited_s: float
    """Seconds before the try that got the answer."""


class TokenEngine(Protocol):
    """An engine that takes token ids and returns token ids."""

    async def generate(self, call: "GenerateCall") -> Completion:
        """Raises: GatewayUnavailable (no usable answer; repeat the call), Refused."""
        ...


class ChatEngine(Protocol):
    """A hosted API without token ids. It can be used for evaluation; its turns are not trainable."""

    model: str
    """The model's name in every request; empty to keep the name in the request."""

    def check(self, rules: Sampling) -> None:
        """Raises: Refused, which names a sampling parameter that the API does not have."""
        ...

    async def chat(self, request: dict[str, Any], *, session_id: str) -> ChatAnswer:
        """Raises: GatewayUnavailable, Refused; StoreUnavailable if the account has limits."""
        ...

    def waits(self, session_id: str) -> Wait | None:
        """Since when the session's oldest call has had no usable answer, and why."""
        ...


@dataclass(frozen=True)
class Engine:
    """An engine with token ids, by its name."""

    name: str
    tokens: TokenEngine


@dataclass(frozen=True)
class HostedEngine:
    """A hosted API, by its name."""

    name: str
    chat: ChatEngine
