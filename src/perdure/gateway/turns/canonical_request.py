"""The canonical form in which requests are compared. It leaves out differences that clients introduce.

Owns when two messages are the same, the digests of requests, and how an agent changed an answer that it
sends back.
"""

import contextlib
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from perdure.dialects.base import ModelRequest

Message = dict[str, Any]

PASSING_FIELDS = frozenset(
    [
        "client_metadata",
        "messages",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "tools",
        "user",
    ]
)
"""Fields of a request body that do not affect the answer, or that other digests cover."""
VOLATILE = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|\b(?:127\.0\.0\.1|localhost|0\.0\.0\.0):\d{2,5}\b"
    r"|Chunk ID: [0-9a-f]{6}|Wall time: \d+\.\d+ seconds"
    r"|Process Group PGID: \d+|Background PIDs: \d+(?:, \d+)*"
)
"""Text that differs between attempts: session ids, server ports, and what codex, Gemini CLI and Qwen Code
write around the output of each command."""
KEPT_TOOL_LISTS = 32
UNPARSED = "__unparsedToolInput"
"""The key under which Claude Code sends back arguments that are not JSON."""


def canonical(message: Message, known_ids: Collection[str]) -> list[Any]:
    """The form that is equal for two messages that count as the same.

    A tool call that this gateway gave out is recognized by its id. So its arguments, which clients
    normalize, do not count; the visible text and the names of tools do.
    """
    role, text = message["role"], message["content"]
    if role == "assistant":
        calls = [_canonical_call(call, known_ids) for call in message.get("tool_calls") or ()]
        return [role, visible(text), sorted(calls, key=lambda call: str(call[0]))]
    if role == "tool":
        return [role, text.rstrip("\n"), message.get("tool_call_id", "")]
    return [role, text.rstrip("\n")]


def _canonical_call(call: dict[str, Any], known_ids: Collection[str]) -> list[Any]:
    name_and_id = [call["id"], call["function"]["name"]]
    if call["id"] in known_ids:
        return name_and_id
    return [*name_and_id, _arguments(call)]


def _arguments(call: dict[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: compare it as text
        arguments = json.loads(arguments)
    return arguments


def visible(text: str) -> str:
    """The text with normalized white space, which clients add and drop."""
    return " ".join(text.split())


def canonical_messages(
    messages: Iterable[Message], known_ids: Collection[str]
) -> Iterator[list[Any]]:
    """Canonical messages. Results of parallel calls may arrive in any order, so they are sorted by call."""
    results: list[list[Any]] = []
    for message in messages:
        form = canonical(message, known_ids)
        if form[0] == "tool":
            results.append(form)
            continue
        yield from sorted(results, key=lambda result: str(result[2]))
        results = []
        yield form
    yield from sorted(results, key=lambda result: str(result[2]))


def same_messages(these: list[Message], those: list[Message], known_ids: Collection[str]) -> bool:
    """Whether two histories are the same. Most are equal as sent, which is cheap to check."""
    if these == those:
        return True
    if len(these) != len(those):
        return False
    return list(canonical_messages(these, known_ids)) == list(canonical_messages(those, known_ids))


class RunningDigests(NamedTuple):
    """Two running digests of a history: one exact, one that ignores what differs between attempts."""

    exact: bytes = b""
    across: bytes = b""


def roll(
    state: RunningDigests, messages: Iterable[Message], known_ids: Collection[str]
) -> RunningDigests:
    """`state` continued over `messages`, so that only new text is hashed."""
    exact, across = state
    for form in canonical_messages(messages, known_ids):
        text = json.dumps(form, sort_keys=True)
        blind = VOLATILE.sub("*", text)
        exact = _hash(exact + text.encode())
        across = _hash(across + blind.encode())
    return RunningDigests(exact, across)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Digests(NamedTuple):
    """Hex digests of a whole request, without its chain."""

    exact: str
    """The same for a retry, streamed or not."""
    across: str
    """The same for the equal request of another attempt."""


def digests_of(request: ModelRequest, rolled: RunningDigests, tools_sha256: str) -> Digests:
    rest = {name: v for name, v in request.body.items() if name not in PASSING_FIELDS}
    rest |= {"sampling": request.sampling, "max_tokens": request.max_tokens}
    head = digest_of([tools_sha256, rest])
    exact, across = (hashlib.sha256(head.encode() + state).hexdigest() for state in rolled)
    return Digests(exact, across)


class ToolDigests:
    """Digests of tool lists. Comparing with a recent list is cheaper than hashing it again."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

    def of(self, tools: list[dict[str, Any]] | None) -> str:
        if not tools:
            return ""
        for digest, known in reversed(self._known.items()):
            if known == tools:
                self._known.move_to_end(digest)
                return digest
        digest = digest_of(tools)
        self._known[digest] = tools
        if len(self._known) > KEPT_TOOL_LISTS:
            self._known.popitem(last=False)
        return digest


class Echo(NamedTuple):
    """How an agent changed an answer that it sends back."""

    edited: bool
    """Whether it holds text or calls that the policy never sampled."""
    changes: tuple[str, ...]
    """`arguments_normalised`, `arguments_changed`, `reasoning_dropped`, `text_moved`; `text_changed`,
    `name_changed`, `calls_changed` are edits."""


def compare_echo(answer: Message, echo: Message) -> Echo:
    given = {call["id"]: call for call in answer.get("tool_calls") or ()}
    back = {call["id"]: call for call in echo.get("tool_calls") or ()}
    edits: list[str] = []
    harmless: list[str] = []
    if given.keys() != back.keys():
        edits.append("calls_changed")
    pairs = [(given[name], back[name]) for name in given.keys() & back.keys()]
    if any(a["function"]["name"] != b["function"]["name"] for a, b in pairs):
        edits.append("name_changed")
    text, echoed = answer.get("content") or "", echo["content"]
    if visible(text) != visible(echoed):
        edits.append("text_changed")
    elif text.strip() != echoed.strip():
        harmless.append("text_moved")
    harmless += sorted({change for a, b in pairs if (change := _arguments_change(a, b))})
    reasoning = answer.get("reasoning_content") or ""
    if visible(reasoning) != visible(echo.get("reasoning_content") or ""):
        harmless.append("reasoning_dropped")
    return Echo(bool(edits), (*edits, *harmless))


def _arguments_change(given: dict[str, Any], back: dict[str, Any]) -> str | None:
    """`arguments_normalised`: all sampled arguments are present, reordered or with defaults added.
    `arguments_changed`: the tool was called with other arguments than the policy sampled."""
    if given["function"]["arguments"] == back["function"]["arguments"]:
        return None
    one, other = _arguments(given), _arguments(back)
    if isinstance(other, dict) and UNPARSED in other:
        return "arguments_normalised"
    if not isinstance(one, dict) or not isinstance(other, dict):
        return None if one == other else "arguments_changed"
    if not one.items() <= other.items():
        return "arguments_changed"
    return "arguments_normalised" if list(one) != list(other) else None
