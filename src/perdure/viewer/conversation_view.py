"""A trajectory for a page: chains as a tree, their turns, and each turn's messages and tool calls.

Agents and models sent these messages, so a message may have any shape.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from perdure.reports.readable_trajectory import chain_title, facts, parsed
from perdure.viewer import diff_colors
from perdure.viewer.diff_colors import Diff
from perdure.viewer.safe_text import Folded, folded, hidden

Kind = Literal["system", "user", "assistant", "result", "thinks", "says", "calls"]
WHY_NOT = {
    "side": "a title or a probe: the outcome does not depend on it",
    "stray": "code in the sandbox made this call, not the agent",
    "hosted": "a hosted API gave no token ids",
    "unused": "the agent did not use this answer",
    "too_stale": "the rollout is too stale",
    "drift": "a later prompt does not repeat it token for token",
}
COMMANDS = ("command", "cmd", "code", "script")
TURNS = 60
"""Most entries on a page."""


@dataclass(frozen=True)
class Part:
    """One message, one call, or one text of an answer."""

    kind: Kind
    title: str = ""
    """The tool's name, for a call."""
    text: Folded | None = None
    diff: Diff | None = None
    arguments: tuple[tuple[str, Folded], ...] = ()


@dataclass(frozen=True)
class TurnView:
    index: int
    facts: str
    why_not: str
    """Why the turn is not trained; empty if it is."""
    segment: str
    """A description of the segment that starts here; empty if none does."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Chain:
    """A chain in the tree; roots, such as main, have `depth` 0."""

    name: str
    depth: int
    turns: int
    first: int
    started: str
    """`by main after turn 3`; empty for a root."""


@dataclass(frozen=True)
class Entry:
    """A line in reading order: a chain's heading, or a turn."""

    depth: int
    chain: Chain | None = None
    turn: dict[str, Any] | None = None


def entries(turns: Sequence[dict[str, Any]]) -> list[Entry]:
    """All lines in reading order. A sub-agent's chain follows the turn after which it started."""
    chains: dict[str, list[dict[str, Any]]] = {}
    for turn in turns:
        chains.setdefault(turn["chain"], []).append(turn)
    found: list[Entry] = []
    done: set[str] = set()
    roots = [name for name in chains if _parent(chains, name) == ""]
    for name in (*roots, *chains):  # chains that name each other as parent come last
        _walk(chains, name, 0, found, done)
    return found


def _parent(chains: Mapping[str, Sequence[dict[str, Any]]], name: str) -> str:
    parent = str(chains[name][0]["parent_chain"])
    return parent if parent in chains and parent != name else ""


def _walk(
    chains: Mapping[str, Sequence[dict[str, Any]]],
    name: str,
    depth: int,
    found: list[Entry],
    done: set[str],
) -> None:
    if name in done:
        return
    done.add(name)
    turns = chains[name]
    after = _started_after(chains, name)
    parent = _parent(chains, name)
    started = f"by {parent}" + (f" after turn {after}" if after is not None else "")
    chain = Chain(
        chain_title(turns[0]), depth, len(turns), turns[0]["index"], started if parent else ""
    )
    found.append(Entry(depth, chain=chain))
    children = [one for one in chains if one != name and _parent(chains, one) == name]
    before_all = [one for one in children if _started_after(chains, one) is None]
    for one in before_all:
        _walk(chains, one, depth + 1, found, done)
    for turn in turns:
        found.append(Entry(depth, turn=turn))
        for one in children:
            if _started_after(chains, one) == turn["index"]:
                _walk(chains, one, depth + 1, found, done)


def _started_after(chains: Mapping[str, Sequence[dict[str, Any]]], name: str) -> int | None:
    """The parent's last turn before the chain's first turn."""
    first = chains[name][0]["index"]
    before = [t["index"] for t in chains.get(_parent(chains, name), ()) if t["index"] < first]
    return before[-1] if before else None


def page_of(found: Sequence[Entry], turn: int) -> int:
    """The number of the page that contains the turn; the first page is 1."""
    for position, entry in enumerate(found):
        if entry.turn is not None and entry.turn["index"] == turn:
            return 1 + position // TURNS
    return 1


def view(turn: dict[str, Any], segments: Sequence[dict[str, Any]]) -> TurnView:
    reason = turn["untrained"] or ""
    return TurnView(
        index=turn["index"],
        facts=facts(turn),
        why_not=f"{reason}: {WHY_NOT[reason]}" if reason in WHY_NOT else reason,
        segment=_begins(turn, segments),
        parts=tuple(parts(turn["new_messages"], turn["answer"])),
    )


def _begins(turn: dict[str, Any], segments: Sequence[dict[str, Any]]) -> str:
    for one in segments:
        if one["turns"] and one["turns"][0] == turn["index"]:
            why = turn["bridge_miss"] or f"branches off after turn {turn['parent']}"
            return (
                f"segment {one['index']} {one['kind']} (new: {why}): prompt {one['prompt_tokens']},"
                f" response {one['response_tokens']}, trained {one['trained_tokens']},"
                f" {one['reward_share']:.3g} of the reward"
            )
    return ""


def parts(new_messages: Any, answer: Any) -> Iterator[Part]:
    """The messages since the parent turn, then the answer."""
    for message in new_messages if isinstance(new_messages, list) else ():
        if isinstance(message, dict):
            yield from _message(message)
    if isinstance(answer, dict):
        if thought := text_of(answer.get("reasoning_content")):
            yield Part("thinks", text=hidden(thought))
        if said := text_of(answer.get("content")):
            yield Part("says", text=folded(said))
        yield from _calls(answer)


def _message(message: Mapping[str, Any]) -> Iterator[Part]:
    role, text = str(message.get("role", "?")), text_of(message.get("content"))
    if thought := text_of(message.get("reasoning_content")):
        yield Part("thinks", text=hidden(thought))
    if role == "tool":
        if diff_colors.is_diff(text):
            yield Part("result", diff=diff_colors.color_diff(text))
        else:
            yield Part("result", text=folded(text))
    elif text and role == "system":
        yield Part("system", text=hidden(text))
    elif text:
        yield Part("assistant" if role == "assistant" else "user", text=folded(text))
    yield from _calls(message)


def _calls(message: Mapping[str, Any]) -> Iterator[Part]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield _call(str(function.get("name")), function.get("arguments"))


def _call(name: str, given: Any) -> Part:
    arguments = parsed(given, None) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        return Part("calls", name, text=folded(text_of(given)))
    if (diff := diff_colors.diff_of_edit(arguments)) is not None:
        return Part("calls", name, diff=diff)
    rest = {key: value for key, value in arguments.items() if key not in COMMANDS}
    command = next((arguments[key] for key in COMMANDS if key in arguments), None)
    return Part(
        "calls",
        name,
        text=folded(text_of(command)) if command is not None else None,
        arguments=tuple((str(key), folded(text_of(value))) for key, value in rest.items()),
    )


def text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or any other JSON value."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(one["text"]) if isinstance(one, dict) and "text" in one else text_of(one)
            for one in content
        )
    return "" if content is None else json.dumps(content, indent=1, ensure_ascii=False)


def turn_texts(new_messages: str, answer: str) -> Iterator[str]:
    """All texts of a turn, for the search index."""
    for part in parts(parsed(new_messages, []), parsed(answer, {})):
        yield part.title
        for text in (part.text, *(value for _, value in part.arguments)):
            if text is not None:
                yield text.head + text.rest
        if part.diff is not None:
            yield from (line.text for line in part.diff.lines)
