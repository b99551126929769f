"""A session's trajectory as a tree of turns, in chains.

Owns which turn a request continues (it looks up the answer that the agent sends back), why it continues
none, and the recorded ids. `canonical` compares requests; `journal.turn_record` has the stored form.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perdure.dialects.base import ModelRequest
from perdure.gateway.journal.turn_record import TurnRecord
from perdure.gateway.turns.canonical_request import (
    Digests,
    Message,
    RunningDigests,
    ToolDigests,
    compare_echo,
    digests_of,
    roll,
    same_messages,
    visible,
)
from perdure.gateway.turns.identical_calls import sibling_digest

MOST_REPEATS = 12
"""How often a recorded answer is repeated. Clients retry ten times; an agent in a loop would retry
forever."""
ID_BYTES = 8
"""Bytes per id: one copy in its turn's record, and at most one in the tree's `Continued`."""
NODE_BYTES = 6144
"""Approximate bytes of a turn in memory, without its ids and its text."""


@dataclass(slots=True, eq=False)
class Node:
    """One committed turn in memory, with links to the turns that its record names."""

    record: TurnRecord
    """Without its experts: only the journal keeps them."""
    parent: "Node | None"
    base: "Node | None"
    rolled: RunningDigests
    """The digests of its whole request, which later requests continue."""
    routed: int = 0
    """How many leading positions of its prompt + completion have recorded experts."""
    acknowledged: bool = False
    repeats: int = 0
    children: int = 0

    def request_messages(self) -> list[Message]:
        """The whole request as it was sent, collected along the tree."""
        parts: list[list[Message]] = []
        node: Node | None = self
        need = self.record.length
        while node is not None and need > 0:
            kept = node.record.kept_messages
            parts.append(node.record.messages[: max(0, need - kept)])
            need, node = min(need, kept), node.base
        return [message for part in reversed(parts) for message in part]

    @property
    def total_length(self) -> int:
        """Number of ids in its whole prompt and its completion."""
        return self.record.prompt_length + len(self.record.completion)

    def ids(self) -> "array[int]":
        """Prompt + completion. Shape [P + C]."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.base if node.record.kept_ids else None
        whole = array("i")
        for node in reversed(path):
            del whole[node.record.kept_ids :]
            whole.extend(node.record.prompt)
            whole.extend(node.record.completion)
        return whole


class Continued:
    """Caches the whole request and the ids of the turn that was continued last. The next turn extends them
    a little, while a walk along the tree costs time in proportion to the history."""

    def __init__(self) -> None:
        self._requested: Node | None = None
        self._messages: list[Message] = []
        self._sampled: Node | None = None
        self._ids = array("i")

    def messages_of(self, node: Node) -> list[Message]:
        """Equals `node.request_messages()`. Callers must not change it."""
        if self._requested is not node:
            record = node.record
            if self._requested is not None and self._requested is node.base:
                self._messages = [*self._messages[: record.kept_messages], *record.messages]
            else:
                self._messages = node.request_messages()
            self._requested = node
        return self._messages

    def ids_of(self, node: Node) -> "array[int]":
        """A copy that equals `node.ids()`."""
        if self._sampled is not node:
            record, last = node.record, self._sampled
            self._sampled = None  # until the ids are whole again
            if last is not None and last is node.base:
                del self._ids[record.kept_ids :]
                self._ids.extend(record.prompt)
                self._ids.extend(record.completion)
            else:
                self._ids = node.ids()
            self._sampled = node
        return self._ids[:]


@dataclass(frozen=True)
class Location:
    """Where a request continues the tree, and the digests that show whether it is a retry."""

    digests: Digests
    rolled: RunningDigests
    tools_sha256: str
    echo_of: Node | None
    """The turn whose answer the request's newest assistant message repeats."""
    parent: Node | None
    """The turn whose ids the prompt may extend: `echo_of`, if nothing else changed."""
    new: int
    """Index of the first message that the parent's prompt and completion do not contain."""
    changes: tuple[str, ...]
    miss: str | None
    base: Node | None
    kept_messages: int
    sibling: int = 0
    """Its number among identical concurrent requests."""

    def of_sibling(self, number: int) -> "Location":
        """The same location for the sibling with this number."""
        exact = sibling_digest(self.digests.exact, number)
        return replace(self, digests=self.digests._replace(exact=exact), sibling=number)


@dataclass
class Tree:
    """All committed turns of a session, and indexes to find them."""

    tool_digests: ToolDigests
    continued: Continued = field(default_factory=Continued)
    nodes: list[Node] = field(default_factory=list)
    weight: int = 0
    """Approximate bytes in memory."""
    tool_lists: set[str] = field(default_factory=set)
    """Digests of the tool lists that a turn records."""
    _calls: dict[str, Node] = field(default_factory=dict)
    """By the tool-call ids that this gateway gave out."""
    _texts: dict[tuple[str, bytes], list[Node]] = field(default_factory=dict)
    """By chain and visible text, for answers without calls."""
    _requests: dict[tuple[str, str], Node] = field(default_factory=dict)
    """The newest turn by chain and request digest."""
    _alike: dict[tuple[str, str], list[Node]] = field(default_factory=dict)
    """The turns of equal requests, by chain and the digest `across`."""
    _newest: dict[str, Node] = field(default_factory=dict)
    """The newest turn, by chain."""

    # --- finding -------------------------------------------------------------------------------

    def locate(self, request: ModelRequest) -> Location:
        """Find the turn that a request continues. The cost grows with its new messages, not its history."""
        messages = request.messages
        at = _newest_assistant(messages)
        echo_of = self._echoed(request.chain, messages[at]) if at is not None else None
        match = self._match(request.chain, messages, at, echo_of)
        echo_of = match or echo_of
        base: Node | None
        if match is not None:
            base, rolled, kept = match, match.rolled, match.record.length
        else:
            newest = self.nodes[-1] if self.nodes else None
            base = self._newest.get(request.chain, newest)
            rolled, kept = RunningDigests(), _common(base, messages)
        rolled = roll(rolled, messages[match.record.length if match else 0 :], self._calls)
        tools = self.tool_digests.of(request.tools)
        reason, changes = self._judge(request, at, echo_of, match, tools)
        return Location(
            digests=digests_of(request, rolled, tools),
            rolled=rolled,
            tools_sha256=tools,
            echo_of=echo_of,
            parent=match if reason is None else None,
            new=at + 1 if at is not None else 0,
            changes=changes,
            miss=reason,
            base=base,
            kept_messages=kept,
        )

    def _echoed(self, chain: str, message: Message) -> Node | None:
        """The turn of this chain that gave this answer, even if its request differs."""
        calls = message.get("tool_calls") or ()
        found = [self._calls[call["id"]] for call in calls if call["id"] in self._calls]
        found = [node for node in found if node.record.chain == chain]
        if calls:
            return max(found, key=lambda node: node.record.index) if found else None
        texts = self._texts.get((chain, _text_key(message["content"])))
        return texts[-1] if texts else None

    def _match(
        self, chain: str, messages: list[Message], at: int | None, echo_of: Node | None
    ) -> Node | None:
        """The echoed turn whose request is exactly the messages before its answer."""
        if at is None or echo_of is None:
            return None
        candidates = [echo_of]
        if not messages[at].get("tool_calls"):
            candidates = self._texts[(chain, _text_key(messages[at]["content"]))][::-1]
        before = messages[:at]
        return next((node for node in candidates if self._same(node, before)), None)

    def _same(self, node: Node, before: list[Message]) -> bool:
        return node.record.length == len(before) and same_messages(
            self.continued.messages_of(node), before, self._calls
        )

    def _judge(
        self,
        request: ModelRequest,
        at: int | None,
        echo_of: Node | None,
        match: Node | None,
        tools: str,
    ) -> tuple[str | None, tuple[str, ...]]:
        """Why the request extends no turn (None: it does), and how the echoed answer changed."""
        if request.chain not in self._newest:
            return "first", ()
        if at is None:
            return self._without_answer(request), ()
        if echo_of is None:
            return self._stranger(request, at), ()
        echo = compare_echo((match or echo_of).record.answer.message, request.messages[at])
        if match is None:
            return "prefix_changed", echo.changes
        if echo.edited:
            return "echo_edited", echo.changes
        if tools != match.record.tools_sha256:
            return "tools_changed", echo.changes
        if at + 1 == len(request.messages):
            return "no_new_messages", echo.changes
        return None, echo.changes

    def _without_answer(self, request: ModelRequest) -> str:
        newest = self._newest[request.chain]
        again = _common(newest, request.messages) == newest.record.length
        return "answer_dropped" if again else "restart"

    def _stranger(self, request: ModelRequest, at: int) -> str:
        """Why an answer is unknown: the agent edited one, or it is not from this gateway."""
        before = request.messages[:at]
        for node in reversed(self.nodes):
            if node.record.chain == request.chain and self._same(node, before):
                return "echo_edited"
        return "foreign_assistant"

    def recorded(self, chain: str, digest: str, since: int | None = None) -> Node | None:
        """The turn that answered this exact request and whose answer has not been used yet.

        `since`: a turn with this index or a later one counts even if its answer was used, because another
        process has answered the same call since then, and the agent has continued.
        """
        node = self._requests.get((chain, digest))
        if node is None or (since is not None and node.record.index >= since):
            return node
        return None if node.acknowledged or node.repeats >= MOST_REPEATS else node

    def newest(self, chain: str, digest: str) -> int:
        """Index of the newest turn that answered this exact request; -1 if none did."""
        node = self._requests.get((chain, digest))
        return -1 if node is None else node.record.index

    def turns_of(self, chain: str) -> int:
        return sum(node.record.chain == chain for node in self.nodes)

    def knows_call(self, call_id: str) -> bool:
        """Whether one of the turns has this tool call."""
        return call_id in self._calls

    @property
    def chains(self) -> int:
        return len(self._newest)

    # --- growing -------------------------------------------------------------------------------

    def apply(self, record: TurnRecord, rolled: RunningDigests | None = None) -> Node:
        """Add a committed turn. `rolled`: the digests of its request, known only for a live turn."""
        base = self._node(record.base)
        continued = rolled or self._rolled(base, record)
        parent = self._node(record.parent)
        routed = _positions_with_experts(record, parent)
        if record.routed_experts is not None or record.kept_tokens is not None:
            record = record.model_copy(update={"routed_experts": None, "kept_tokens": None})
        node = Node(record, parent, base, continued, routed)
        self.nodes.append(node)
        self._index(node)
        if record.tools:
            self.tool_lists.add(record.tools_sha256)
        if (echoed := self._node(record.echo_of)) is not None:
            for sibling in self._alike[echoed.record.chain, echoed.record.across_sha256]:
                sibling.acknowledged = True  # the agent chose one of them
        if node.parent is not None:
            node.parent.children += 1
        self.weight += _weight(record)
        return node

    def _rolled(self, base: Node | None, record: TurnRecord) -> RunningDigests:
        if (
            base is not None
            and record.kept_messages == base.record.length
            and record.base == record.echo_of
        ):
            return roll(base.rolled, record.messages, self._calls)
        kept = base.request_messages()[: record.kept_messages] if base is not None else []
        return roll(RunningDigests(), [*kept, *record.messages], self._calls)

    def _node(self, index: int | None) -> Node | None:
        return None if index is None else self.nodes[index]

    def _index(self, node: Node) -> None:
        record = node.record
        message = record.answer.message
        calls = message.get("tool_calls") or ()
        for call in calls:
            self._calls[call["id"]] = node
        if not calls:
            key = (record.chain, _text_key(message.get("content") or ""))
            self._texts.setdefault(key, []).append(node)
        self._requests[record.chain, record.request_sha256] = node
        self._alike.setdefault((record.chain, record.across_sha256), []).append(node)
        self._newest[record.chain] = node


def _positions_with_experts(record: TurnRecord, parent: Node | None) -> int:
    experts = record.routed_experts
    if experts is None or experts.start > (parent.routed if parent else 0):
        return 0
    return experts.end


def _common(base: Node | None, messages: list[Message]) -> int:
    held = base.request_messages() if base is not None else []
    pairs = enumerate(zip(held, messages, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(held), len(messages)))


def _newest_assistant(messages: Sequence[Message]) -> int | None:
    places = range(len(messages) - 1, -1, -1)
    return next((i for i in places if messages[i]["role"] == "assistant"), None)


def _text_key(text: str) -> bytes:
    return hashlib.sha256(visible(text).encode("utf-8", "surrogatepass")).digest()


def _weight(record: TurnRecord) -> int:
    ids = ID_BYTES * (len(record.prompt) + len(record.completion))
    logprobs = 8 * len(record.logprobs)
    text = sum(len(message["content"]) for message in record.messages)
    return NODE_BYTES + ids + logprobs + text + 512 * len(record.messages)
