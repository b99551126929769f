"""Turns sampled ids into the message that an agent reads.

A tool call that does not parse stays in the text as it was sampled. The agent sees its mistake, and
nothing is repaired.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from perdure.dialects.base import Answer, ModelRequest
from perdure.engines.base import Completion
from perdure.gateway.base import PLACEHOLDER
from perdure.gateway.rendering.message_format import Format
from perdure.gateway.rendering.parsed_response import ParsedToolCall, ToolCallParseStatus
from perdure.gateway.turns.output_constraints import forbids_calls
from perdure.gateway.turns.prompt_bridge import end_of
from perdure.types import FinishReason


class Read(NamedTuple):
    """An answer, and facts about its completion."""

    answer: Answer
    reasoning_open: bool = False
    """Whether the completion ended inside its reasoning."""
    placeholder: bool = False
    """Whether nothing visible was sampled, so that the text is `PLACEHOLDER`."""


def read_completion(
    model_format: Format,
    request: ModelRequest,
    prompt_ids: Sequence[int],
    completion: Completion,
    turn_id: str,
    *,
    mint: Callable[[int], str],
    stops: Sequence[str],
) -> Read:
    """`turn_id` is unique across sessions; `mint` gives the id of the tool call at a position. `stops`:
    the agent's own stop texts, which are cut from its answer."""
    token_ids = list(completion.token_ids)
    reasoning, reasoning_open = "", False
    calls: list[ParsedToolCall] = []
    try:
        parsed = model_format.renderer.parse_response(
            token_ids,
            tools=request.tools,
            prompt_ids=list(end_of(prompt_ids, model_format.renderer)),
        )
    except (ValueError, RecursionError):  # sampled JSON that does not parse: show it as text
        content = model_format.tokenizer.decode(token_ids)
    else:
        content, calls = _split(
            parsed.content, parsed.tool_calls, allowed=not forbids_calls(request)
        )
        reasoning = parsed.reasoning_content or ""
        reasoning_open = parsed.reasoning_complete is False
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_called(call, mint(i)) for i, call in enumerate(calls)]
    stopped_by = _cut(message, stops) if completion.finish_reason is FinishReason.STOP else None
    placeholder = _stand_in(message)
    answer = _answer(request, message, len(prompt_ids), completion, turn_id)
    return Read(replace(answer, stop_sequence=stopped_by), reasoning_open, placeholder)


def _cut(message: dict[str, Any], stops: Sequence[str]) -> str | None:
    """Cut the first stop text and everything after it, and return that text. The sampled ids keep it."""
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            message[name] = text[:at]
            return stop
    return None


def _stand_in(message: dict[str, Any]) -> bool:
    """Replace an empty answer with `PLACEHOLDER`: agents discard an empty one and ask again forever."""
    if message.get("tool_calls") or message["content"].strip():
        return False
    message["content"] = PLACEHOLDER
    return True


def _split(
    text: str, calls: Sequence[ParsedToolCall], *, allowed: bool
) -> tuple[str, list[ParsedToolCall]]:
    parsed = [c for c in calls if c.status == ToolCallParseStatus.OK and isinstance(c.name, str)]
    good = parsed if allowed else []
    bad = [call.raw for call in calls if call not in good]
    return "\n".join([*([text] if text else []), *bad]), good


def _called(call: ParsedToolCall, call_id: str) -> dict[str, Any]:
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _answer(
    request: ModelRequest,
    message: dict[str, Any],
    prompt_tokens: int,
    completion: Completion,
    turn_id: str,
) -> Answer:
    sampled = len(completion.token_ids)
    reason = completion.finish_reason.value
    if completion.finish_reason is FinishReason.STOP and "tool_calls" in message:
        reason = "tool_calls"
    return Answer(
        id=f"chatcmpl-{hashlib.sha256(turn_id.encode()).hexdigest()[:24]}",
        created=int(time.time()),
        model=request.model,
        message=message,
        finish_reason=reason,
        usage={
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    )


def hosted_answer(request: ModelRequest, completion: dict[str, Any], turn_id: str) -> Read:
    """A hosted API's chat completion as an answer, with our own id and the agent's model name."""
    choice = completion["choices"][0]
    usage = completion.get("usage")
    message = {**choice["message"], "content": choice["message"].get("content") or ""}
    placeholder = _stand_in(message)
    answer = Answer(
        id=f"chatcmpl-{hashlib.sha256(turn_id.encode()).hexdigest()[:24]}",
        created=int(time.time()),
        model=request.model,
        message=message,
        finish_reason=choice.get("finish_reason") or "stop",
        usage=usage if isinstance(usage, dict) else {},
    )
    return Read(answer, placeholder=placeholder)
