"""Bridging: makes the next prompt from the recorded ids and the rendered new messages.

`turn_chains` finds the turn that a request continues. `turn_maker` renders the whole
history if bridging fails.
"""

import itertools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from perdure.gateway.rendering.message_format import MessageFormat
from perdure.gateway.rendering.parsed_response import ToolCallParseStatus
from perdure.gateway.turns.canonical_request import Message
from perdure.gateway.turns.turn_chains import Node


class Miss(NamedTuple):
    """Why a request could not be bridged."""

    reason: str


def bridge(
    renderer: MessageFormat,
    node: Node,
    held: "array[int]",
    new: list[Message],
    tools: list[dict[str, Any]] | None,
) -> "array[int] | Miss":
    """The next prompt: the recorded ids, then the rendered new messages. Shape [P].

    `held`: the ids of `node`, which are extended to the prompt. The renderer gets only the end of the
    recorded prompt, because it reads no more of it.
    """
    if not held:
        return Miss("no_recorded_ids")
    completion = node.record.completion.tolist()
    sampled = len(completion)
    whole = len(held) - sampled
    tail = list(held[max(0, whole - renderer.tail_length) : whole])
    answered = _answering(renderer, node, completion, new)
    ids = renderer.bridge_to_next_turn(tail, completion, answered, tools=tools)
    if ids is None:
        return Miss("open_reasoning" if node.record.reasoning_open else "renderer_unsupported")
    seen = len(tail) + sampled
    if ids[:seen] != tail + completion:
        return Miss("prefix_assert")
    held.extend(ids[seen:])
    return held


def _answering(
    renderer: MessageFormat, node: Node, completion: list[int], new: list[Message]
) -> list[Message]:
    """The new messages, with the function's name added to each tool result, because some templates write
    it. If the model's calls have ids, the result gets the id that the model gave its call."""
    calls = node.record.answer.message.get("tool_calls") or ()
    if not calls or not any(message["role"] == "tool" for message in new):
        return new
    sampled = _sampled_ids(renderer, completion) if renderer.parser.has_ids else []
    known = {
        call["id"]: {"name": call["function"]["name"], **({"tool_call_id": own} if own else {})}
        for call, own in itertools.zip_longest(calls, sampled[: len(calls)])
    }
    return [{**message, **known.get(message.get("tool_call_id"), {})} for message in new]


def _sampled_ids(renderer: MessageFormat, completion: list[int]) -> list[str | None]:
    read = renderer.parse_response(completion)
    return [call.id for call in read.tool_calls if call.status == ToolCallParseStatus.OK]


def end_of(prompt: Sequence[int], renderer: MessageFormat) -> Sequence[int]:
    """The end of a prompt, as much of it as the format reads."""
    return prompt[-renderer.tail_length :]


def common_ids(base: Node | None, prompt: "array[int]") -> int:
    """How many leading ids a prompt shares with the ids of `base`."""
    held = base.ids() if base is not None else array("i")
    low, high = 0, min(len(held), len(prompt))
    while low < high:
        middle = (low + high + 1) // 2
        if held[low:middle] == prompt[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
