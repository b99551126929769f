"""A hosted Anthropic API. Translates Chat Completions requests to Messages, and its answers back.

The API has no token ids, so its turns say `trainable: false`.
"""

import json
from typing import Any

from perdure.dialects import anthropic, openai_chat
from perdure.dialects.json_fields import Fields
from perdure.engines.base import ChatAnswer
from perdure.engines.clients.hosted_requests import HostedApi

API_VERSION = "2023-06-01"
FINISH = {"tool_use": "tool_calls", "max_tokens": "length"}


class AnthropicHosted(HostedApi):
    kind = "anthropic"

    def _headers_of(self, api_key: str) -> dict[str, str]:
        return {"anthropic-version": API_VERSION, "x-api-key": api_key}

    async def chat(self, request: dict[str, Any], *, session_id: str) -> ChatAnswer:
        body = to_messages(request, self.model or request["model"])
        return await self._post("/messages", body, from_messages, session_id=session_id)


def to_messages(request: dict[str, Any], model: str) -> dict[str, Any]:
    """A chat request as a Messages request. Raises: Refused if a message cannot be read."""
    messages = openai_chat.messages(request["messages"])
    system = [m["content"] for m in messages if m["role"] == "system"]
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request["max_tokens"],
        "messages": _turns([m for m in messages if m["role"] != "system"]),
    }
    if system:
        body["system"] = "\n\n".join(system)
    if request.get("tools"):
        body["tools"] = [_tool(tool["function"]) for tool in request["tools"]]
    if body.get("tools") and (choice := _tool_choice(request.get("tool_choice"))):
        body["tool_choice"] = choice
    if stop := request.get("stop"):
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    for name in ("temperature", "top_p", "top_k"):
        if request.get(name) is not None:
            body[name] = request[name]
    return body


def _tool_choice(choice: Any) -> dict[str, Any] | None:
    """The tool choice as Messages writes it. Raises: Refused if it cannot be read."""
    if isinstance(choice, dict):
        name = Fields(choice, "tool_choice").object("function").text("name")
        return {"type": "tool", "name": name}
    kinds = {chat: kind for kind, chat in anthropic.TOOL_CHOICES.items()}
    return {"type": kinds[choice]} if choice in kinds else None


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": schema,
    }


def _turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive messages of one role, because the API requires a turn's tool results in one
    message."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = _blocks(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"].extend(blocks)
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id", "")}
        return [{**result, "content": message["content"]}]
    blocks: list[dict[str, Any]] = []
    if message["content"].strip():
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**use, "input": _input(function["arguments"])})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def from_messages(answer: dict[str, Any]) -> dict[str, Any]:
    """A Messages answer as a chat completion object."""
    message = anthropic.assistant_message(Fields(answer))
    reason = FINISH.get(answer.get("stop_reason") or "", "stop")
    usage = answer["usage"]
    read, written = (usage.get(f"cache_{way}_input_tokens") or 0 for way in ("read", "creation"))
    prompt, sampled = usage["input_tokens"] + read + written, usage["output_tokens"]
    return {
        "model": answer.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            **({"prompt_tokens_details": {"cached_tokens": read}} if read else {}),
        },
    }
