"""What the gateway promises: sessions and their control calls.

A session belongs to one attempt of one rollout. Its key is the bearer token the agent sends; it is
derived (`session_key`), never stored, so any gateway process accepts it and a re-attached worker
finds it again. Control calls carry the control token and are not reachable with a session key.

    PUT  /sessions/{session_id}        SessionSpec    -> SessionSummary   open; repeating is joining
    GET  /sessions/{session_id}                       -> SessionSummary
    POST /sessions                     [session_id]   -> [SessionSummary]   of those that exist
    POST /sessions/{session_id}/close                 -> SessionSummary   seal, write turns to the store
    POST /sessions/{session_id}/turns                 -> SessionSummary   write its turns once more
    DELETE /sessions/{session_id}                     -> (nothing)        close, delete its journal
    POST /v1/messages, /v1/messages/count_tokens      (Authorization: Bearer, or x-api-key:
    POST /v1/chat/completions, /v1/responses           the session key)
    GET  /v1/models
    GET  /engines ...                                 engines at run time: `engine_routes`
    GET  /episodes/{key}                              files of episodes: `episode_routes`
    GET  /healthz, GET /metrics
"""

import hashlib
import hmac
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter

from perdure.engines.base import Wait
from perdure.types import DEFAULT_MODEL, Frozen, Sampling

STORE_AWAY = "store_unavailable"
"""Code of an error answer: the store is away, and the gateway itself is not."""
SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,239}$"
SessionId = Annotated[str, StringConstraints(pattern=SESSION_ID)]
"""Names a folder of the journal and a path of the control API: no slashes."""


HOPELESS = 3
"""Refused calls without an answer. A first one may be a side request of the agent's."""


class SessionSpec(Frozen):
    """One attempt's sampling rules and where its turns go when it is closed."""

    session_id: SessionId
    model: str = DEFAULT_MODEL
    sampling: Sampling = Sampling()
    sample: str = ""
    """Which sample of which instance it is: seeds are derived from it, so that samples differ."""
    turns_key: str
    """Store key of the turns (parquet, `perdure.episodes.turns_parquet`), written at close."""
    labels: dict[str, str] = Field(default_factory=dict)
    replay_of: SessionId | None = None
    """Session of the rollout's earlier, lost attempt: its recorded completions answer requests that
    match, without the engine, until the first that differs."""

    @property
    def rollout(self) -> str:
        """Equal for all attempts of one rollout: they share the ids of replayed tool calls."""
        return self.labels.get("rollout", self.session_id)


class SessionSummary(Frozen):
    session_id: str
    open: bool
    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    trainable: bool = True
    engine_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """In which its calls were on no engine, those that wait now included."""
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    bridge_misses: dict[str, int] = Field(default_factory=dict)
    chains: int = 0
    too_stale: str = ""
    """Why no engine may sample it any more; empty unless one of its calls was refused for this."""
    refused: str = ""
    """What the engine said when it refused a call before the first answer, and the fix."""
    refusals: int = 0
    """How often it did. Only the gateway process that had the calls knows this."""
    unanswered: str = ""
    """Why the gateway could not answer a call. The next answer on the same chain clears it. A refusal of
    the request's content is an answer."""
    turns_sha256: str = ""
    """Of the file that was written when it was closed; empty: it is open."""
    damaged: str = ""
    """Why it records no more: its journal does not read back, or lacks a turn that its agent has. `turns`
    and all else is what is left. Empty: it is whole."""
    replayed_turns: int = 0
    """Turns answered from the earlier attempt's recording."""
    replayed_tokens: int = 0
    waits: Wait | None = None
    """What a call waits for at this moment. Only the gateway process that has the call knows this."""

    @property
    def is_hopeless(self) -> bool:
        """Whether its agent goes on asking an engine that refuses every call, some of them for minutes."""
        return self.refusals >= HOPELESS and not self.turns


SUMMARIES = TypeAdapter(list[SessionSummary])


def session_key(secret: bytes, session_id: str) -> str:
    """`<session_id>.<hmac>`: verified in constant time by any process that has the secret."""
    mac = hmac.new(secret, f"session:{session_id}".encode(), hashlib.sha256).hexdigest()
    return f"{session_id}.{mac}"


def control_token(secret: bytes) -> str:
    return hmac.new(secret, b"control", hashlib.sha256).hexdigest()
