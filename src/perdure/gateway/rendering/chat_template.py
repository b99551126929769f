"""Any model's message format, made from its own chat template and the tool-call parser of its family.

The Jinja template turns messages into ids; the tool-call parser turns sampled ids into a message. Later turns are
bridged from the recorded ids, so only the part after the last answer is rendered. If it is not certain
where that part begins in the template's output, the whole prompt is rendered.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from perdure.gateway.rendering import late_system_message
from perdure.gateway.rendering.control_token_text import marked, unmarked
from perdure.gateway.rendering.jinja_template import JinjaTemplate, TemplateError
from perdure.gateway.rendering.parsed_response import ParsedResponse, ParsedToolCall
from perdure.gateway.rendering.tokenizers import Tokenizer, published, token_text
from perdure.gateway.rendering.tool_call_parsers.base import ToolCallParser
from perdure.gateway.rendering.tool_call_parsers.format_detection import Found, detect

Message = dict[str, Any]


class ChatTemplate:
    """A `MessageFormat` for any chat template.

    Example:
        chat = ChatTemplate(tokenizer, JinjaTemplate(text), Found(Hermes(), False), ["<|im_end|>"])
        chat.render_ids([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    """

    tail_length = 64

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: JinjaTemplate,
        found: Found,
        stop_tokens: Sequence[str],
    ) -> None:
        """`stop_tokens`: the tokens that end an answer."""
        self._tokenizer = tokenizer
        self._template = template
        self._stops = tuple(stop_tokens)
        self._arguments_as_text = found.arguments_as_text
        self.parser: ToolCallParser = found.parser

    # --- MessageFormat -------------------------------------------------------------------------

    def get_stop_token_ids(self) -> list[int]:
        return [self._tokenizer.convert_tokens_to_ids(token) for token in self._stops]

    def render_ids(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Ids of the whole conversation. Raises: TemplateError."""
        text = self._text(messages, self._offered(tools), add_generation_prompt)
        return self._tokenizer.encode(text)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> list[int] | None:
        """The recorded ids, then the template's text after an answer. None if that is not certain."""
        if not previous_prompt_ids or not new_messages:
            return None
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        added = self._after_answer(new_messages, tools)
        if added is None:
            return None
        rest = self._joined(previous_prompt_ids, previous_completion_ids, *added)
        if rest is None:
            return None
        return [*previous_prompt_ids, *previous_completion_ids, *self._tokenizer.encode(rest)]

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        stops = set(self.get_stop_token_ids())
        end = next((i for i, token_id in enumerate(token_ids) if token_id in stops), None)
        text = self._tokenizer.decode_marked(token_ids[:end])
        read = self.parser.read(text, tools, opened=self._opened(prompt_ids or []))
        return replace(
            read,
            content=unmarked(read.content),
            reasoning_content=unmarked(read.reasoning_content),
            tool_calls=tuple(map(_unmarked_call, read.tool_calls)),
        )

    # --- rendering -----------------------------------------------------------------------------

    def _text(
        self, messages: Sequence[Message], offered: list[Any] | None, add_generation_prompt: bool
    ) -> str:
        """The rendered text, with marks in spelled-out control tokens. `offered`: tools, marked."""
        given = [marked(message, self._tokenizer.control) for message in self._prepared(messages)]
        return late_system_message.rendered(
            given,
            lambda told: self._template.render(
                messages=told, tools=offered, add_generation_prompt=add_generation_prompt
            ),
        )

    def _offered(self, tools: list[Any] | None) -> list[Any] | None:
        offered: list[Any] | None = marked(tools, self._tokenizer.control) if tools else None
        return offered

    def _prepared(self, messages: Sequence[Message]) -> Iterator[Message]:
        """The messages as the template expects them: arguments in its form, ids in the family's form, and
        the function's name in each tool result."""
        known: dict[str, tuple[str, str]] = {}
        for message in messages:
            if message["role"] == "tool":
                yield _under(message, known)
                continue
            if not message.get("tool_calls"):
                yield message
                continue
            calls = []
            for call in message["tool_calls"]:
                name, minted = call["function"]["name"], call.get("id") or ""
                own = self.parser.call_id(minted, name, len(known))
                known[minted] = (own, name)
                calls.append({**call, "id": own, "function": self._function(call["function"])})
            yield self.parser.history({**message, "tool_calls": calls})

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        if self._arguments_as_text:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            return {**function, "arguments": text}
        # Arguments that are not JSON, or that are already an object, stay unchanged.
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return {**function, "arguments": json.loads(arguments)}
        return function

    # --- bridging ------------------------------------------------------------------------------

    def _joined(
        self, prompt: list[int], completion: list[int], close: str, rest: str
    ) -> str | None:
        """The text that follows the recorded answer, if the template ends answers with `close`. None if
        the recorded answer ended in a way that contradicts this."""
        stops = self.get_stop_token_ids()
        last = completion[-1] if completion else None
        if last not in stops:
            read = self.parse_response(completion, prompt_ids=prompt)
            lacks = self.parser.closing(reasoning_open=read.reasoning_complete is False)
            return lacks + close + rest
        if completion.count(last) > 1:
            return None  # the model sampled past an end of turn, which no template renders
        ended_by = self._stops[stops.index(last)]
        if ended_by == close or close not in self.parser.openers:
            return rest
        return None if ended_by in self.parser.openers else close + rest

    def _after_answer(self, new: list[Message], tools: list[Any] | None) -> tuple[str, str] | None:
        """The token that closes an answer, and the text from there to the next generation.

        The new messages are rendered after two different made-up conversations. If the results differ,
        the text depends on more than the new messages, and bridging fails. If the template moves or drops
        a system message, that message is rendered as a user message.
        """
        offered = self._offered(tools)
        for told in (new, [late_system_message.as_user(message) for message in new]):
            seen = {self._after_made_up(told, offered, said) for said in ("Go on.", "And now?")}
            found = seen.pop() if len(seen) == 1 else None
            if found is not None and self._says_all(found[1], told):
                return found
        return None

    def _says_all(self, text: str, messages: list[Message]) -> bool:
        """Whether `text` contains every message in order, verbatim or as JSON."""
        position = 0
        for message in messages:
            content = marked(message["content"], self._tokenizer.control).strip()
            quoted = json.dumps(content, ensure_ascii=False)[1:-1]
            ends = [
                at + len(one) for one in (content, quoted) if (at := text.find(one, position)) >= 0
            ]
            if not ends:
                return False
            position = min(ends)
        return True

    def _after_made_up(
        self, new: list[Message], offered: list[Any] | None, said: str
    ) -> tuple[str, str] | None:
        sentinel = f"answer-{uuid4().hex}"
        for answer in _answers_before(new, sentinel):
            try:
                text = self._text([{"role": "user", "content": said}, answer, *new], offered, True)
            except TemplateError:
                continue
            _, found, tail = text.rpartition(sentinel)
            ends = (*self._stops, *self.parser.ends)
            closes = [(at, token) for token in ends if (at := tail.find(token)) >= 0]
            if found and closes:
                position, token = min(closes)
                return token, tail[position + len(token) :]
        return None

    def _opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt already opened the reasoning, so that the answer only closes it."""
        tail = self._tokenizer.decode(prompt_ids[-self.tail_length :])
        return self.parser.opens_reasoning(tail)


def _unmarked_call(call: ParsedToolCall) -> ParsedToolCall:
    return replace(
        call,
        raw=unmarked(call.raw),
        name=unmarked(call.name),
        arguments=unmarked(call.arguments),
    )


def _under(result: Message, known: dict[str, tuple[str, str]]) -> Message:
    """A tool result with the id and the name of the call that it answers."""
    call_id, name = known.get(
        result.get("tool_call_id") or "", (result.get("tool_call_id"), result.get("name"))
    )
    given = {"tool_call_id": call_id, "name": name}
    return {**result, **{key: value for key, value in given.items() if value}}


def _answers_before(new: Sequence[Message], sentinel: str) -> Iterator[Message]:
    """Made-up answers that these messages may follow, with a call for each tool result. The second has
    one call, for templates that accept only one at a time."""
    results = [message for message in new if message["role"] == "tool"]
    if not results:
        yield {"role": "assistant", "content": sentinel}
        return
    calls = [_call_before(result, sentinel) for result in results]
    yield {"role": "assistant", "content": "", "tool_calls": calls}
    if len(calls) > 1:
        yield {"role": "assistant", "content": "", "tool_calls": calls[-1:]}


def _call_before(result: Message, sentinel: str) -> dict[str, Any]:
    function = {"name": result.get("name") or "tool", "arguments": {"value": sentinel}}
    return {
        "id": result.get("tool_call_id") or "call00000",
        "type": "function",
        "function": function,
    }


def load(tokenizer: Tokenizer, folder: Path, parser: str) -> ChatTemplate:
    """The message format from a model's folder. Raises: TemplateError, ConfigurationError."""
    config = published(folder, "tokenizer_config.json")
    text = _template_text(folder, config.get("chat_template"))
    if text is None:
        raise TemplateError(
            "the folder has no chat_template.jinja, and tokenizer_config.json no `chat_template`"
        )
    named = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token")}
    template = JinjaTemplate(text, named)
    stops = [named["eos_token"], *_generation_stops(tokenizer, folder)]
    found = detect(template, parser, stops)
    known = dict.fromkeys((*stops, *found.parser.stops))
    ends = [token for token in known if token in tokenizer.control_tokens]
    return ChatTemplate(tokenizer, template, found, ends)


def _template_text(folder: Path, given: Any) -> str | None:
    """The template from its own file, or from the configuration, which has one text or several by name
    (`tool_use` first)."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    if isinstance(given, list):
        by_name = {entry["name"]: entry["template"] for entry in given}
        given = by_name.get("tool_use", by_name.get("default"))
    return given if isinstance(given, str) else None


def _generation_stops(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """The end tokens of generation_config.json. Some models end tool calls with a separate token."""
    ids = published(folder, "generation_config.json").get("eos_token_id", [])
    return [tokenizer.decode([token_id]) for token_id in (ids if isinstance(ids, list) else [ids])]
