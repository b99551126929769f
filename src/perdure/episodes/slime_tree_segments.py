"""slime's rule for cutting a trajectory, as of its commit 624b824a8 (`slime/agent/trajectory.py`).

Turns form a tree by their messages: a request is added where its messages stop matching. Each path
to a leaf gives one or more sequences. If a later prompt repeats an answer with other tokens, a
short next turn overwrites that answer, which is then not trained; a long one starts a new sequence.
Turns of Perdure's gateway are bridged from recorded ids, so these rules drop tokens only of turns
recorded elsewhere.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perdure.episodes.recorded_messages import Message
from perdure.types import Turn

FORK_THRESHOLD = 1024
"""A turn of this many sampled tokens or more neither overwrites another nor is overwritten."""


class TurnMessages(NamedTuple):
    """A turn with the messages of its prompt and its answer."""

    turn: Turn
    prompt: Sequence[Message]
    answer: Message | None


class Span(NamedTuple):
    """The tokens [start, end) of a sequence that are a turn's trained completion."""

    turn: Turn
    start: int
    end: int


@dataclass
class TokenSequence:
    """A growing sequence. Shapes: ids, loss_mask, logprobs, versions [L], with the first prompt."""

    prompt: int = 0
    """Number of tokens of its first prompt."""
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    first: Turn | None = None
    last: Turn | None = None
    _answered_at: int = 0
    """Where the newest completion starts."""

    def fits(self, turn: Turn, threshold: int) -> bool:
        """Whether the turn continues this sequence or overwrites its newest completion."""
        drift = self.count_shared_prefix(turn)
        if drift == len(self.ids):
            return True
        return drift >= self._answered_at and len(turn.completion_ids) < threshold

    def add(self, turn: Turn, versions: Sequence[int], *, trained: bool) -> None:
        if self.first is None:
            self.first, self.prompt = turn, len(turn.prompt_ids)
        elif self.count_shared_prefix(turn) < len(self.ids):
            self.drop_from(self._answered_at)
        self._context(turn.prompt_ids[len(self.ids) :])
        self._answered_at = len(self.ids)
        self.last = turn
        if not trained:
            return self._context(turn.completion_ids)
        self.ids += turn.completion_ids
        self.loss_mask += [1] * len(turn.completion_ids)
        self.logprobs += turn.logprobs
        self.versions += versions
        self.spans.append(Span(turn, self._answered_at, len(self.ids)))
        return None

    def _context(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def count_shared_prefix(self, turn: Turn) -> int:
        """Number of leading tokens that the turn's prompt repeats."""
        return _common(self.ids, turn.prompt_ids)

    def drop_from(self, start: int) -> None:
        """Drop the tokens from `start` on. If that cuts a completion, the kept part is context."""
        for row in (self.ids, self.loss_mask, self.logprobs, self.versions):
            del row[start:]
        for span in self.spans:
            if span.start < start < span.end:
                width = start - span.start
                self.loss_mask[span.start :] = [0] * width
                self.logprobs[span.start :] = [0.0] * width
                self.versions[span.start :] = [-1] * width
        self.spans = [span for span in self.spans if span.end <= start]


@dataclass
class _Node:
    """One message. `turn`: the turn in which the model sampled it, if it did."""

    message: Message | None = None
    turn: Turn | None = None
    children: list["_Node"] = field(default_factory=list)
    trained: bool = False
    """Its turn is already in a sequence; later sequences have it as context."""

    def paths(self) -> Iterator[list["_Node"]]:
        """The paths from this node to each leaf."""
        if not self.children:
            yield [self]
        for child in self.children:
            for path in child.paths():
                yield [self, *path]


def cut_like_slime(
    spoken: Sequence[TurnMessages],
    versions_of: Callable[[Turn], Sequence[int]],
    *,
    threshold: int = FORK_THRESHOLD,
) -> list[TokenSequence]:
    """The sequences with a trained token, path by path. `versions_of`: one policy version per sampled
    token.
    """
    root = _Node()
    for one in spoken:
        if one.prompt:
            _mount(root, one, threshold)
    found: list[TokenSequence] = []
    for path in root.paths():
        grown: list[TokenSequence] = []
        for node in path:
            if node.turn is None:
                continue
            if not grown or not grown[-1].fits(node.turn, threshold):
                grown.append(TokenSequence())
            grown[-1].add(node.turn, versions_of(node.turn), trained=not node.trained)
            node.trained = True
        found += [one for one in grown if any(one.loss_mask)]
    return found


def _mount(root: _Node, spoken: TurnMessages, threshold: int) -> None:
    node, depth = root, 0
    messages = [_routed(message) for message in spoken.prompt]
    while depth < len(messages):
        matching = (child for child in node.children if child.message == messages[depth])
        if (child := next(matching, None)) is None:
            break
        node, depth = child, depth + 1
    if depth < len(messages) and (rewritten := _rewritten(node, messages[depth], threshold)):
        rewritten.turn, rewritten.message = None, messages[depth]
        node, depth = rewritten, depth + 1
    for message in messages[depth:]:
        node.children.append(_Node(message))
        node = node.children[-1]
    answer = _routed({**spoken.answer, "role": "assistant"}) if spoken.answer else None
    node.children.append(_Node(answer, spoken.turn))


def _rewritten(node: _Node, message: Message, threshold: int) -> _Node | None:
    """The short answer without continuation that this assistant message repeats in another form."""
    if message["role"] != "assistant":
        return None
    answers = [one for one in node.children if one.turn or _is_assistant(one)]
    if len(answers) != 1 or answers[0].children or answers[0].turn is None:
        return None
    return answers[0] if len(answers[0].turn.completion_ids) < threshold else None


def _is_assistant(node: _Node) -> bool:
    return node.message is not None and node.message["role"] == "assistant"


def _routed(message: Message) -> Message:
    """A message as slime compares it: without tool-call ids, with arguments as objects."""
    kept = {k: v for k, v in message.items() if k != "tool_call_id" and v is not None}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_called(call["function"]) for call in kept["tool_calls"]]
    return {"role": None, **kept}


def _called(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        parsed = arguments
    return {"name": function.get("name"), "arguments": parsed}


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    most = min(len(held), len(prompt))
    if list(held[:most]) == list(prompt[:most]):
        return most
    return next(at for at in range(most) if held[at] != prompt[at])
