"""Detects a model's tool-call parser from its chat template.

The template renders a made-up call, and the parser that reads exactly this call is the model's. So
detection does not depend on the checkpoint's name, and a template whose calls no parser reads is
refused before an agent starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perdure.errors import ConfigurationError
from perdure.gateway.rendering.jinja_template import JinjaTemplate, TemplateError
from perdure.gateway.rendering.tool_call_parsers.base import ToolCallParser
from perdure.gateway.rendering.tool_call_parsers.deepseek import DeepSeekV3, DeepSeekV31
from perdure.gateway.rendering.tool_call_parsers.glm import Glm
from perdure.gateway.rendering.tool_call_parsers.harmony import Harmony
from perdure.gateway.rendering.tool_call_parsers.hermes import Hermes
from perdure.gateway.rendering.tool_call_parsers.invocations import DeepSeekV32, MinimaxM2
from perdure.gateway.rendering.tool_call_parsers.kimi_k2 import KimiK2
from perdure.gateway.rendering.tool_call_parsers.llama3_json import Llama3Json
from perdure.gateway.rendering.tool_call_parsers.mistral import Magistral, Mistral
from perdure.gateway.rendering.tool_call_parsers.nemotron import Nemotron
from perdure.gateway.rendering.tool_call_parsers.no_calls import NoCalls
from perdure.gateway.rendering.tool_call_parsers.pythonic import Pythonic
from perdure.gateway.rendering.tool_call_parsers.qwen3_coder import Qwen3Coder

SETTING = "PERDURE_ENGINE__TOOL_CALL_PARSER"
AUTO = "auto"
READABLE: tuple[ToolCallParser, ...] = (
    *(Hermes(), Qwen3Coder(), Glm(), KimiK2(), DeepSeekV3(), DeepSeekV31(), DeepSeekV32()),
    *(MinimaxM2(), Harmony(), Mistral(), Magistral(), Nemotron(), Llama3Json(), Pythonic()),
)
TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {one.name: one for one in (*READABLE, NoCalls())}
ASKED, TOLD = "What is here?", "lists-a-folder"
TOOL = {
    "type": "function",
    "function": {
        "name": "list_folder",
        "description": TOLD,
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "where"}},
            "required": ["path"],
        },
    },
}
ARGUMENTS = {"path": "src/a b"}


@dataclass(frozen=True)
class Found:
    """A tool-call parser, and whether the template takes a call's arguments as JSON text."""

    parser: ToolCallParser
    arguments_as_text: bool


def detect(template: JinjaTemplate, asked: str, stops: Sequence[str]) -> Found:
    """`asked`: the value of the setting; `stops`: the end tokens that the folder names.

    Raises: ConfigurationError, which names the setting, if no tool-call parser reads the template's calls or if
    the template does not show tools to the model.
    """
    if asked not in (AUTO, *TOOL_CALL_PARSERS):
        known = ", ".join((AUTO, *TOOL_CALL_PARSERS))
        raise ConfigurationError(f"{SETTING} is {asked!r}: use one of {known}")
    if asked != AUTO:
        return _forced(template, TOOL_CALL_PARSERS[asked])
    _check_shows_tools(template)
    for parser in _likely_first(template.text):
        for as_text in (False, True):
            if _reads_back(template, parser, as_text, stops):
                return Found(parser, as_text)
    raise ConfigurationError(
        "no tool-call parser reads the tool calls that the model's chat template writes: set "
        f"{SETTING} to the one that the model was trained with ({', '.join(TOOL_CALL_PARSERS)}), or to "
        f"{NoCalls.name!r} if its agents use no tools"
    )


def _likely_first(text: str) -> list[ToolCallParser]:
    """All tool-call parsers; first those whose reasoning marks occur in the template."""
    return sorted(READABLE, key=lambda one: one.think[0] not in text)


def _check_shows_tools(template: JinjaTemplate) -> None:
    """Raises: ConfigurationError."""
    try:
        shown = template.render(messages=[_user()], tools=[TOOL], add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigurationError(f"the model's chat template fails with a tool: {error}") from error
    if TOLD not in shown:
        raise ConfigurationError(
            "the model's chat template does not show tools to the model: replace it with one that does. "
            f"Or set {SETTING} to {NoCalls.name!r} if its agents use no tools, or to its tool-call parser "
            "(hermes, ...) if the model was trained to call tools without being shown them"
        )


def _forced(template: JinjaTemplate, parser: ToolCallParser) -> Found:
    """Trust the setting; only find out in which form the template takes arguments."""
    for as_text in (False, True):
        try:
            _render(template, [_user(), _called(parser, as_text)], generate=False)
        except TemplateError:
            continue
        return Found(parser, as_text)
    return Found(parser, False)


def _reads_back(
    template: JinjaTemplate, parser: ToolCallParser, as_text: bool, stops: Sequence[str]
) -> bool:
    try:
        whole = _render(template, [_user(), _called(parser, as_text)], generate=False)
        before = _render(template, [_user()], generate=True)
    except TemplateError:
        return False
    answer = whole.removeprefix(before).rpartition(ASKED)[2]
    ends = [at for end in (*stops, *parser.stops) if (at := _end(answer, end)) >= 0]
    read = parser.read(answer[: min(ends, default=None)], [TOOL], opened=False)
    calls = [(call.name, call.arguments) for call in read.tool_calls]
    return calls == [("list_folder", ARGUMENTS)]


def _end(answer: str, stop: str) -> int:
    """The position of the first stop token after the call's arguments; -1 if there is none."""
    return answer.find(stop, answer.find(ARGUMENTS["path"])) if stop else -1


def _render(template: JinjaTemplate, messages: list[dict[str, Any]], *, generate: bool) -> str:
    return template.render(messages=messages, tools=[TOOL], add_generation_prompt=generate)


def _user() -> dict[str, Any]:
    return {"role": "user", "content": ASKED}


def _called(parser: ToolCallParser, as_text: bool) -> dict[str, Any]:
    arguments: Any = '{"path": "src/a b"}' if as_text else dict(ARGUMENTS)
    function = {"name": "list_folder", "arguments": arguments}
    call_id = parser.call_id("call_000000000", "list_folder", 0)
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
