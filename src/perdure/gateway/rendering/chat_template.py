"""The message format of a model that `renderers` has no class for, from the model's own chat template.

Owns messages -> ids by the Jinja template, and sampled text -> message. Later turns are bridged from
the recorded ids: only what follows the last answer is rendered. If the boundary of that part in the
template's output is not certain, the prompt is rendered in full.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from renderers.base import ParsedResponse, RenderedTokens

from perdure.gateway.rendering import late_system
from perdure.gateway.rendering.template_calls import split_calls
from perdure.gateway.rendering.tokenizers import Tokenizer, published, token_text

Message = dict[str, Any]
PRIVATE_USE = range(0xE000, 0xF8FF)
"""One of these characters, which the messages do not contain, marks control tokens that are text."""
THINK, THOUGHT = "<think>", "</think>"


class TemplateError(ValueError):
    """The template refuses these messages; the message is the template's own."""


class ChatTemplate:
    """A `renderers.Renderer` over any chat template.

    Example:
        chat = ChatTemplate(tokenizer, template_text, stop_tokens=("<|eot_id|>",))
        chat.render_ids([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    """

    is_prefix_stable = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        control_tokens: Sequence[str],
        stop_tokens: Sequence[str],
        variables: dict[str, Any] | None = None,
    ) -> None:
        """`control_tokens`: every text that is one id; `stop_tokens`: those that end an answer;
        `variables`: what else the template reads (bos_token, ...).

        Raises: TemplateError when `template` is not valid Jinja.
        """
        self._tokenizer = tokenizer
        self._variables = variables or {}
        self._stops = tuple(stop_tokens)
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error

    # --- what renderers.Renderer asks ----------------------------------------------------------

    def get_stop_token_ids(self) -> list[int]:
        ids = (self._tokenizer.convert_tokens_to_ids(token) for token in self._stops)
        return [token_id for token_id in ids if token_id is not None]

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        ids = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids))

    def render_ids(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Ids of the whole conversation. Raises: TemplateError."""
        mark = _unused(messages, tools)
        return self._ids(self._text(messages, tools, add_generation_prompt, mark), mark)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """The recorded ids, then what the template writes after an answer. None: this is not certain."""
        if not previous_prompt_ids or not new_messages:
            return None
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        stops = self.get_stop_token_ids()
        closed = bool(previous_completion_ids) and previous_completion_ids[-1] in stops
        if closed and previous_completion_ids.count(previous_completion_ids[-1]) > 1:
            return None  # it sampled past an end of turn, which no template describes
        mark = _unused(new_messages, tools)
        added = self._after_answer(new_messages, tools, mark)
        if added is None:
            return None
        close, rest = added
        if closed and previous_completion_ids[-1] != self._tokenizer.convert_tokens_to_ids(close):
            return None
        ids = [*previous_prompt_ids, *previous_completion_ids]
        ids += self._ids(rest if closed else close + rest, mark)
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids))

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        text = self._tokenizer.decode(self._open_part(token_ids))
        reasoning, complete, rest = _split_reasoning(text, self._opened_thinking(prompt_ids or []))
        content, calls = split_calls(rest, tools)
        return ParsedResponse(
            content=content.strip("\n"),
            reasoning_content=reasoning,
            tool_calls=calls,
            reasoning_complete=complete,
        )

    # --- helpers -------------------------------------------------------------------------------

    def _text(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        mark: str,
    ) -> str:
        """The rendered text; `mark` is inside every control token that a message contains as text."""
        given = [self._escaped(_for_template(message), mark) for message in messages]
        return late_system.rendered(
            given, lambda told: self._render(told, tools, add_generation_prompt, mark)
        )

    def _render(
        self, given: list[Message], tools: list[Any] | None, generate: bool, mark: str
    ) -> str:
        try:
            return self._template.render(
                messages=given,
                tools=self._escaped(tools, mark) if tools else None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error

    def _escaped(self, value: Any, mark: str) -> Any:
        """`value` with `mark` after the first character of each text that spells a control token."""
        if isinstance(value, str):
            return self._control.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, list):
            return [self._escaped(item, mark) for item in value]
        if isinstance(value, dict):
            return {
                self._escaped(key, mark): self._escaped(item, mark) for key, item in value.items()
            }
        return value

    def _ids(self, text: str, mark: str) -> list[int]:
        """Ids of a rendered text: the template's control tokens as single ids, the rest as plain text."""
        ids: list[int] = []
        end = 0
        for found in self._control.finditer(text):
            ids += self._plain(text[end : found.start()], mark)
            ids.append(self._tokenizer.convert_tokens_to_ids(found[0]))
            end = found.end()
        return ids + self._plain(text[end:], mark)

    def _plain(self, text: str, mark: str) -> list[int]:
        return self._tokenizer.encode_plain(text.replace(mark, "")) if text else []

    def _after_answer(
        self, new: list[Message], tools: list[Any] | None, mark: str
    ) -> tuple[str, str] | None:
        """The token that closes an answer, and the text from there to the next generation.

        It is rendered after two different made-up conversations. If the results differ, they depend on
        more than the new messages, and there is no bridge. If the template moves or drops a system
        message, that message is rendered as a user message.
        """
        for told in (new, [late_system.as_user(message) for message in new]):
            seen = {self._after_made_up(told, tools, mark, said) for said in ("Go on.", "And now?")}
            found = seen.pop() if len(seen) == 1 else None
            if found is not None and self._says_all(found[1], told, mark):
                return found
        return None

    def _says_all(self, text: str, messages: list[Message], mark: str) -> bool:
        """Whether `text` contains every message, in order."""
        position = 0
        for message in messages:
            content = self._escaped(message["content"], mark).strip()
            position = text.find(content, position)
            if position < 0:
                return False
            position += len(content)
        return True

    def _after_made_up(
        self, new: list[Message], tools: list[Any] | None, mark: str, said: str
    ) -> tuple[str, str] | None:
        answer = f"answer-{uuid4().hex}"
        made_up = [{"role": "user", "content": said}, _answer_before(new, answer)]
        try:
            text = self._text([*made_up, *new], tools, True, mark)
        except TemplateError:
            return None
        _, found, tail = text.partition(answer)
        stops = [(at, token) for token in self._stops if (at := tail.find(token)) >= 0]
        if not found or not stops:
            return None
        position, token = min(stops)
        return token, tail[position + len(token) :]

    def _open_part(self, token_ids: list[int]) -> list[int]:
        """The ids before the stop token."""
        stops = set(self.get_stop_token_ids())
        end = next((i for i, token_id in enumerate(token_ids) if token_id in stops), None)
        return list(token_ids[:end])

    def _opened_thinking(self, prompt_ids: list[int]) -> bool:
        """Whether the template opened the reasoning, so that the answer only closes it."""
        tail = self._tokenizer.decode(prompt_ids[-8:]).rstrip()
        return tail.endswith(THINK)


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment that chat templates expect (transformers' documentation, "Chat templates")."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _unused(*values: Any) -> str:
    """A character that occurs in none of the values."""
    text = json.dumps(values, ensure_ascii=False)
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in text)


def _for_template(message: Message) -> Message:
    """The message as templates expect it: tool arguments are objects."""
    given = dict(message)
    if message.get("tool_calls"):
        given["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return given


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    # arguments that are not JSON, or already an object, are passed on unchanged
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _answer_before(new: Sequence[Message], text: str) -> Message:
    """An answer that these messages may follow: it makes the calls that tool results answer."""
    answer: Message = {"role": "assistant", "content": text}
    results = [message for message in new if message["role"] == "tool"]
    if results:
        answer["tool_calls"] = [
            {
                "id": result.get("tool_call_id") or "call00000",
                "type": "function",
                "function": {"name": result.get("name") or "tool", "arguments": {}},
            }
            for result in results
        ]
    return answer


def _split_reasoning(text: str, opened: bool) -> tuple[str | None, bool, str]:
    """(reasoning, whether it was closed, the rest)."""
    body = text.lstrip()
    if body.startswith(THINK):
        body = body.removeprefix(THINK)
    elif not opened:
        return None, True, text
    reasoning, closed, rest = body.partition(THOUGHT)
    return reasoning.strip("\n"), bool(closed), rest.lstrip("\n")


def load(tokenizer: Tokenizer, folder: Path) -> ChatTemplate:
    """The template published beside a model's weights. Raises: TemplateError."""
    config = published(folder, "tokenizer_config.json")
    template = _template_text(folder, config.get("chat_template"))
    if template is None:
        raise TemplateError("its folder has no chat_template.jinja and no `chat_template`")
    named = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token")}
    stops = dict.fromkeys((named["eos_token"], *_generation_stops(tokenizer, folder)))
    return ChatTemplate(
        tokenizer,
        template,
        control_tokens=tokenizer.control_tokens,
        stop_tokens=[token for token in stops if token in tokenizer.control_tokens],
        variables=named,
    )


def _template_text(folder: Path, given: Any) -> str | None:
    """From its own file, or from the configuration: one text, or several by name (`tool_use` first)."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    if isinstance(given, list):
        by_name = {entry["name"]: entry["template"] for entry in given}
        given = by_name.get("tool_use", by_name.get("default"))
    return given if isinstance(given, str) else None


def _generation_stops(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """All tokens that end an answer; some models end tool calls with a token of their own."""
    ids = published(folder, "generation_config.json").get("eos_token_id", [])
    return [tokenizer.decode([token_id]) for token_id in (ids if isinstance(ids, list) else [ids])]
