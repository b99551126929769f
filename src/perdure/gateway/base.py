"""The gateway's contract: sessions and the calls that control them.

A session belongs to one attempt of one rollout. Its key is the bearer token that the agent sends. The
key is derived (`session_key`) and never stored, so any gateway process accepts it and a re-attached
worker can derive it again. Control calls need the control token; a session key does not open them.

    PUT  /sessions/{session_id}        SessionSpec    -> SessionSummary   open, or join an open one
    GET  /sessions/{session_id}                       -> SessionSummary
    POST /sessions                     [session_id]   -> [SessionSummary]   of those that exist
    POST /sessions/{session_id}/stop                  -> SessionSummary   refuse its next calls
    POST /sessions/{session_id}/close                 -> SessionSummary   seal, write turns to the store
    POST /sessions/{session_id}/turns                 -> SessionSummary   write the turns again
    DELETE /sessions/{session_id}                     -> (nothing)        close, delete its journal
    POST /v1/messages, /v1/messages/count_tokens      (Authorization: Bearer, x-api-key,
    POST /v1/chat/completions, /v1/responses           or x-goog-api-key: the session key)
    POST /v1beta/models/{model}:generateContent, :streamGenerateContent?alt=sse, :countTokens
    GET  /v1/models, /v1beta/models
    POST, DELETE /v1/mcp/{name}                       an MCP server of the session (session key)
    GET  /engines ...                                 list and change engines: `engine_routes`
    GET  /episodes/{key}                              files of episodes: `episode_routes`
    GET  /healthz, GET /metrics
"""

import hashlib
import hmac
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter

from perdure.engines.base import Wait
from perdure.types import DEFAULT_MODEL, Caps, Frozen, McpServers, Sampling

STORE_UNAVAILABLE_CODE = "store_unavailable"
"""Error code: the gateway runs, but it cannot reach the store."""
SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,239}$"
SessionId = Annotated[str, StringConstraints(pattern=SESSION_ID)]
"""Names a folder of the journal and a path of the control API, so it has no slashes."""


PLACEHOLDER = "(no visible output)"
"""The text that an agent gets if neither text nor a tool call was sampled."""
STOPPED_OUTSIDE = "stopped from outside"
"""Why a stopped session takes no more calls: the run's budget, its time, or a cancellation."""
HOPELESS = 3
"""After this many refusals without an answer a session is hopeless. The first refused call may be a
side request."""


class SessionSpec(Frozen):
    """One attempt's sampling rules, and where its turns are written at close."""

    session_id: SessionId
    model: str = DEFAULT_MODEL
    models: dict[str, str] = Field(default_factory=dict)
    """Glob of the model name in the agent's calls -> the model that answers them instead. These
    turns are not trained."""
    sampling: Sampling = Sampling()
    caps: Caps = Caps()
    sample: str = ""
    """The instance and the sample's index. Seeds are derived from it, so that samples differ."""
    mcp_servers: McpServers = Field(default_factory=dict)
    """Servers that the gateway calls for the agent, by the name in the path."""
    turns_key: str
    """Store key of the turns (parquet, `perdure.episodes.turns_parquet`), written at close."""
    labels: dict[str, str] = Field(default_factory=dict)
    replay_of: SessionId | None = None
    """The session of the rollout's earlier, lost attempt. Its recorded completions answer matching
    requests without an engine, until the first request that differs."""

    @property
    def rollout(self) -> str:
        """The same for all attempts of one rollout, because they share the ids of replayed tool calls."""
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
    """How long its calls were on no engine, including calls that wait now."""
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    bridge_misses: dict[str, int] = Field(default_factory=dict)
    chains: int = 0
    too_stale: str = ""
    """Why no engine may sample for it any more. Empty until a call is refused for this reason."""
    tokenizer_changed: str = ""
    """Why no engine can read its ids any more: its model has another tokenizer now. Empty until a call is
    refused for this reason."""
    refused: str = ""
    """What the engine said when it refused a call before the first answer, and the fix."""
    refusals: int = 0
    """How often the engine did so. Only the gateway process that had the calls knows this."""
    capped: str = ""
    """Which cap is reached, with figures; empty until a call of the agent is refused for it."""
    stopped: bool = False
    """Whether its rollout has been stopped: the gateway refuses its next call."""
    unanswered: str = ""
    """Why the gateway could not answer a call. The next answer on the same chain clears it. A refusal of
    the request's content counts as an answer."""
    mcp_failed: str = ""
    """Why an MCP server could not answer a call. The attempt must then end without a verdict."""
    turns_sha256: str = ""
    """Digest of the turns file that closing wrote. Empty while the session is open."""
    damaged: str = ""
    """Why it records no more turns: its journal cannot be read, or lacks a turn that the agent has. The
    other fields then describe what could be read. Empty: the journal is whole."""
    replayed_turns: int = 0
    """Turns answered from the earlier attempt's recording."""
    replayed_tokens: int = 0
    waits: Wait | None = None
    """What a call waits for now. Only the gateway process that has the call knows this."""

    def waits_for_quota(self, now: float) -> bool:
        """Whether a call cannot be answered before a quota resets. `now`: Unix seconds."""
        return self.waits is not None and self.waits.until > now

    @property
    def ends_calls(self) -> bool:
        """Whether the gateway refuses every later call of the agent."""
        return bool(self.too_stale or self.tokenizer_changed or self.capped)

    @property
    def is_hopeless(self) -> bool:
        """Whether the engine refuses every call. Some agents keep calling for minutes all the same."""
        return self.refusals >= HOPELESS and not self.turns


SUMMARIES = TypeAdapter(list[SessionSummary])


def session_key(secret: bytes, session_id: str) -> str:
    """`<session_id>.<hmac>`. Any process that has the secret can verify it, in constant time."""
    mac = hmac.new(secret, f"session:{session_id}".encode(), hashlib.sha256).hexdigest()
    return f"{session_id}.{mac}"


def control_token(secret: bytes) -> str:
    return hmac.new(secret, b"control", hashlib.sha256).hexdigest()
