"""What an engine is to the gateway: token ids in, token ids and logprobs out; or a hosted chat API.

A new kind of engine is one client in `engines/clients` that implements one of these two protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perdure.types import EngineSpan, FinishReason, Frozen, Sampling, VersionSpan

if TYPE_CHECKING:
    from perdure.engines.pool.call import GenerateCall

TOO_STALE = "policy_too_stale"
"""Error code if every engine serves newer weights than the session's group accepts."""


class Wait(Frozen):
    """Why a call has no engine: it waits for one, or no engine answered its last try."""

    since: float
    """Unix seconds."""
    reason: str
    """What the engines lack, for people."""


class Completion(NamedTuple):
    """What an engine sampled. Shapes: token_ids [C], logprobs [C]."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    versions: Sequence[VersionSpan]
    engine: str
    engines: Sequence[EngineSpan] = ()
    waited_s: float = 0.0
    """Seconds in which it was on no engine."""
    asked_model: str = ""
    """The name in the request."""
    model: str = ""
    """The model that answered, as the engine names it."""


class TokenEngine(Protocol):
    """An engine that takes token ids and returns token ids."""

    async def generate(self, call: "GenerateCall") -> Completion:
        """Raises: GatewayUnavailable (nothing usable came back; repeat the call), Refused."""
        ...


class ChatEngine(Protocol):
    """A hosted API without token ids: usable for evaluation, `trainable: false`."""

    model: str
    """The name in every request; empty: the request's own."""

    def check(self, rules: Sampling) -> None:
        """Raises: Refused naming a sampling parameter that it does not have."""
        ...

    async def chat(self, request: dict[str, Any], *, session_id: str) -> dict[str, Any]:
        """One OpenAI chat completion object, not streamed. Raises: GatewayUnavailable, Refused."""
        ...

    def waits(self, session_id: str) -> Wait | None:
        """Since when a call of the session gets no usable answer, and what came instead."""
        ...


@dataclass(frozen=True)
class Engine:
    """An engine with token ids, as a gateway knows it."""

    name: str
    tokens: TokenEngine


@dataclass(frozen=True)
class HostedEngine:
    """A hosted API, as a gateway knows it."""

    name: str
    chat: ChatEngine
