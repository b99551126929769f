"""What the gateway promises: sessions, their control calls, and the engine seam.

A session belongs to one attempt of one rollout. Its key is the bearer token the agent sends; it is
derived (`session_key`), never stored, so any gateway process accepts it and a re-attached worker
finds it again. Control calls carry the control token and are not reachable with a session key.

    PUT  /sessions/{session_id}        SessionSpec    -> SessionSummary   open; repeating is joining
    GET  /sessions/{session_id}                       -> SessionSummary
    POST /sessions/{session_id}/close                 -> SessionSummary   seal, write turns to the store
    POST /v1/messages, /v1/messages/count_tokens      (Authorization: Bearer, or x-api-key:
    POST /v1/chat/completions, /v1/responses           the session key)
    GET  /v1/models
    GET  /engines ...                                 engines at run time: `engine_routes`
    GET  /healthz, GET /metrics
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field, StringConstraints

from perdure.errors import Boundary, PerdureError
from perdure.gateway.engines.salvage import Salvage
from perdure.types import EngineSpan, FinishReason, Frozen, Purpose, Sampling, VersionSpan

SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,239}$"
SessionId = Annotated[str, StringConstraints(pattern=SESSION_ID)]
"""Names a folder of the journal and a path of the control API: no slashes."""


MAIN = "main"
"""The chain of the agent itself; a sub-agent's is named by its harness's agent id."""
DEFAULT_MODEL = "policy"
"""What a served policy is called when nobody named it."""
TOO_STALE = "policy_too_stale"
"""Code of a refusal: every engine has weights that the session's group may not be sampled by."""


class SessionSpec(Frozen):
    """One attempt's sampling rules and where its turns go when it is closed."""

    session_id: SessionId
    model: str = DEFAULT_MODEL
    sampling: Sampling = Sampling()
    turns_key: str
    """Store key of the turns (parquet, `perdure.episodes.turns`), written at close."""
    labels: dict[str, str] = Field(default_factory=dict)
    replay_of: SessionId | None = None
    """Session of the rollout's earlier, lost attempt: its recorded completions answer requests that
    match, without the engine, until the first that differs."""


class Wait(Frozen):
    """A call that no engine has taken yet, or whose last try no engine answered."""

    since: float
    """Unix seconds."""
    reason: str
    """What the engines lack, for people."""


class SessionSummary(Frozen):
    session_id: str
    open: bool
    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    trainable: bool = True
    engine_seconds: float = 0.0
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    bridge_misses: dict[str, int] = Field(default_factory=dict)
    chains: int = 0
    too_stale: str = ""
    """Why no engine may sample it any more, where one of its calls was refused for that."""
    replayed_turns: int = 0
    """Turns answered from the earlier attempt's recording."""
    replayed_tokens: int = 0
    waits: Wait | None = None
    """For an engine, at this moment; known to the gateway process that has the call, and no other."""


def session_key(secret: bytes, session_id: str) -> str:
    """`<session_id>.<hmac>`: verified in constant time by any process that has the secret."""
    mac = hmac.new(secret, f"session:{session_id}".encode(), hashlib.sha256).hexdigest()
    return f"{session_id}.{mac}"


def control_token(secret: bytes) -> str:
    return hmac.new(secret, b"control", hashlib.sha256).hexdigest()


class Refused(PerdureError):
    """A call we answer with an error of the dialect; repeating it unchanged fails the same way.

    Example:
        Refused(400, "context_length_exceeded", "This model's maximum context length is ...")
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class ContextExhausted(Refused):
    """No token of the context budget is left; each dialect says it in the words its clients know.

    `prompt_tokens` and `limit` are counts of tokens.
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


@dataclass(frozen=True)
class ModelRequest:
    """One model call in the gateway's own message form, whatever dialect it came in.

    `messages`: dicts with role (system, user, assistant, tool), content (text) and, where given,
    reasoning_content, tool_calls, tool_call_id, name. System messages may stand anywhere and are
    rendered where they stand. `tools`: OpenAI function tools. `body` is the request as an OpenAI
    Chat Completions body, for hosted engines. `chain`, `parent_chain` and `purpose` are what the
    dialect read from the client's own marks (headers, forms of the request), never from guesses.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    max_tokens: int | None
    body: dict[str, Any]
    chain: str = MAIN
    parent_chain: str = ""
    purpose: Purpose = Purpose.STEP


@dataclass(frozen=True)
class Answer:
    """What the agent gets, dialect-neutral enough to be framed as one JSON or as a stream.

    Example:
        Answer("chatcmpl-...", 1763700000, "policy",
               {"role": "assistant", "content": "...", "tool_calls": [...]}, "tool_calls",
               {"prompt_tokens": 812, "completion_tokens": 64, "total_tokens": 876})
    """

    id: str
    created: int
    model: str
    message: dict[str, Any]
    finish_reason: str
    usage: dict[str, Any]


class Completion(NamedTuple):
    """What an engine sampled. Shapes: token_ids [C], logprobs [C]."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    versions: Sequence[VersionSpan]
    engine: str
    engines: Sequence[EngineSpan] = ()


NO_LABELS: Mapping[str, str] = MappingProxyType({})


class TokenEngine(Protocol):
    """An engine that takes token ids and gives token ids."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        session_id: str,
        request_id: str,
        labels: Mapping[str, str] = NO_LABELS,
        salvage: Salvage | None = None,
        last: EngineSpan | None = None,
    ) -> Completion:
        """`labels`: those of the session; `group` and `run` decide where it is placed and queued.
        `salvage`: where the completion grows, with what an earlier try had of it. `last`: where
        another process had the session.

        Raises: GatewayUnavailable (nothing usable came back; ask again), Refused.
        """
        ...


class ChatEngine(Protocol):
    """A hosted API without token ids: good for evaluation, `trainable: false`."""

    async def chat(self, request: dict[str, Any], *, session_id: str) -> dict[str, Any]:
        """One OpenAI chat completion object, not streamed. Raises: GatewayUnavailable, Refused."""
        ...


class Overtaken(PerdureError):
    """Another gateway process committed to this session first: read on, then decide anew."""

    boundary = Boundary.GATEWAY


class Journal(Protocol):
    """The durable, ordered records of every session; shared by all gateway processes of a pool.

    Records are numbered 0, 1, ... per session. Committing names the number a record is to get, so
    of two processes that answer one session at once exactly one wins and the other learns of it.
    """

    async def read(self, session_id: str, after: int = 0) -> list[dict[str, Any]]:
        """The records from number `after` on; [] when there are none (or no such session).

        Raises: JournalDamaged, StoreUnavailable.
        """
        ...

    async def append(self, session_id: str, record: dict[str, Any], *, position: int) -> None:
        """Durable when it returns. Raises: Overtaken when number `position` is already taken;
        GatewayUnavailable when it cannot be written (disk full, store away): nothing was."""
        ...

    async def aclose(self) -> None:
        """Write what is queued."""
        ...


@dataclass(frozen=True)
class Engine:
    """The engine a gateway talks to: exactly one of `tokens` and `chat` is set."""

    name: str
    tokens: TokenEngine | None = None
    chat: ChatEngine | None = None
