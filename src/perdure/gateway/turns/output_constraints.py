"""The form that an agent requests for an answer: tool choice, response format, logit bias.

A token engine enforces it through structured outputs; otherwise the call is refused with the field's
name. Nothing is dropped. Owns the grammar for each request. `request.body` is an OpenAI Chat Completions
body in every dialect.
"""

import json
from collections.abc import Callable
from typing import Any

from perdure.dialects.base import ModelRequest, Refused
from perdure.dialects.json_fields import Fields, bad
from perdure.gateway.rendering.message_format import Format
from perdure.gateway.rendering.tool_call_parsers.format_detection import SETTING
from perdure.gateway.rendering.tool_call_parsers.hermes import Hermes
from perdure.gateway.rendering.tool_call_parsers.no_calls import NoCalls
from perdure.types import Sampling

MOST_BIAS = 100.0
ANY_OBJECT_SCHEMA = {"type": "object"}
"""The schema of arguments for a tool that describes none."""


def constraints(model_format: Format, rules: Sampling, request: ModelRequest) -> dict[str, Any]:
    """Sampling fields that enforce the requested form; empty if none is requested. Raises: Refused (400)."""
    if request.tools and isinstance(model_format.renderer.parser, NoCalls):
        raise _unsupported("tools", f"cannot be used: {SETTING} says that the model makes no calls")
    body = Fields(request.body)
    found = _logit_bias(body, rules)
    schema, forced = _response_format(body), _forced_tools(body, request)
    if schema is not None and request.tools and not forbids_calls(request):
        raise _unsupported(
            "response_format", "cannot be combined with tools: its grammar would forbid tool calls"
        )
    if forced:
        return found | {"structured_outputs": {"structural_tag": _one_call(model_format, forced)}}
    return found | ({"structured_outputs": schema} if schema is not None else {})


def forbids_calls(request: ModelRequest) -> bool:
    """Whether `tool_choice` is `none`; text that looks like a call then stays text."""
    return request.body.get("tool_choice") == "none"


def _logit_bias(body: Fields, rules: Sampling) -> dict[str, Any]:
    wished = body.object("logit_bias")
    if not wished.values:
        return {}
    if rules.decided_by != "agent":
        raise _unsupported(
            "logit_bias",
            "would change the trainer's sampling: it needs `sampling.decided_by: agent`",
        )
    for token in wished.values:
        if not token.isascii() or not token.isdigit():
            raise wished.bad(token, "must be a token id")
        wished.number(token, -MOST_BIAS, MOST_BIAS)
    return {"logit_bias": wished.values}


def _response_format(body: Fields) -> dict[str, Any] | None:
    """The response format as vLLM's structured outputs; None if any text is allowed."""
    wished = body.object("response_format")
    kind = wished.get("type")
    if not wished.values or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise wished.bad("type", "must be text, json_object or json_schema")
    schema = wished.object("json_schema").object("schema")
    return {"json": schema.values} if schema.values else {"json_object": True}


def _forced_tools(body: Fields, request: ModelRequest) -> list[dict[str, Any]]:
    """The functions of which the answer must call one; empty if it need not call any."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return []
    functions = [tool["function"] for tool in request.tools or ()]
    if choice == "required":
        wanted: Callable[[str], bool] = bool
    elif isinstance(choice, dict) and choice.get("type") == "function":
        name = body.object("tool_choice").object("function").text("name")
        wanted = name.__eq__
    else:
        raise bad("tool_choice", "must be auto, none, required or a function in `tools`")
    found = [one for one in functions if wanted(one["name"])]
    if not found:
        raise bad("tool_choice", "does not name a function in `tools`")
    return found


def _one_call(model_format: Format, functions: list[dict[str, Any]]) -> str:
    """An xgrammar structural tag for vLLM: exactly one call of one of the functions."""
    if not isinstance(model_format.renderer.parser, Hermes):
        raise _unsupported("tool_choice", "cannot be forced for this model's tool calls: use auto")
    calls = [_call_tag(one) for one in functions]
    form = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    return json.dumps({"type": "structural_tag", "format": form})


def _call_tag(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or ANY_OBJECT_SCHEMA
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }


def _unsupported(param: str, problem: str) -> Refused:
    return Refused(400, "unsupported_value", f"'{param}' {problem}", param=param)
