"""A call of an MCP server as a journal record, and the file of a session's calls.

The record is stored next to the trajectory. It contains neither the session key nor the server's
credentials, because only headers carry them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

MCP_BEGUN, MCP_CALL, MCP_FAILED, MCP_ENDED = "mcp_begun", "mcp_call", "mcp_failed", "mcp_ended"
"""Kinds of journal records: a call is about to be sent; a call ended; a call got no answer through
no fault of the agent; the agent ended its session at a server."""
SHOWN = 16 << 10
"""Characters kept of the parameters and of the answer of one call."""
RECORDED = 32 << 20
"""Characters kept of all calls of a session. Further calls are recorded without their content."""
HANDSHAKE = {
    *("initialize", "ping", "logging/setLevel", "server/discover"),
    *("tools/list", "resources/list", "resources/templates/list", "prompts/list"),
}
"""Requests that the file leaves out: a client makes them by itself."""

Ended = Literal["answered", "took too long", "too large", "unanswered", "hung up"]
"""`hung up`: the agent did not wait for the answer."""


@dataclass(frozen=True)
class McpCall:
    """One line of `mcp.jsonl`.

    Example:
        McpCall("docs", "tools/call", "search", '{"query": "x"}', '{"content": [...]}', False,
                "answered", 1789.5, 0.021, 80, 412)
    """

    server: str
    method: str
    tool: str
    """Also the name of a prompt, or the URI of a resource."""
    params: str
    """JSON, cut after `SHOWN` characters."""
    answer: str
    """The result or the error as JSON, cut after `SHOWN` characters."""
    is_error: bool
    """Whether the tool or the server answered with an error, which the agent sees."""
    ended: Ended
    started_at: float
    """Unix seconds."""
    seconds: float
    request_bytes: int
    answer_bytes: int


def begun_record(call_id: str, place: str) -> dict[str, Any]:
    """`place`: the server, for messages to people."""
    return {"kind": MCP_BEGUN, "call": call_id, "place": place}


def call_record(call_id: str, call: McpCall) -> dict[str, Any]:
    record = {"kind": MCP_CALL, "call": call_id, **asdict(call)}
    return without_content(record) if call.method in HANDSHAKE else record


def content_size(record: dict[str, Any]) -> int:
    return len(record["params"]) + len(record["answer"])


def without_content(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "params": "", "answer": ""}


def calls_file(records: Sequence[dict[str, Any]]) -> bytes:
    """The calls among a journal's records as JSON lines; empty if there are none."""
    calls = [record for record in records if record["kind"] == MCP_CALL]
    shown_calls = [call for call in calls if call["method"] not in HANDSHAKE]
    lines = ({n: call[n] for n in call if n not in ("kind", "call")} for call in shown_calls)
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def calls_key(turns_key: str) -> str:
    """The store key of the file: next to the turns."""
    return turns_key.rpartition("/")[0] + "/mcp.jsonl"


def shown(value: Any) -> str:
    """The value as JSON, without the protocol's own `_meta`, cut after `SHOWN` characters."""
    if isinstance(value, dict):
        value = {name: one for name, one in value.items() if name != "_meta"}
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False)[:SHOWN]
    except RecursionError:  # an answer that nests deeper than it can be written
        return ""
