"""The served model's message format: its tokenizer, its template, and its tool-call parser."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from perdure.engines.engine_roster import ModelFormat
from perdure.errors import ConfigurationError
from perdure.gateway.rendering import chat_template, tokenizer_setting
from perdure.gateway.rendering.jinja_template import TemplateError
from perdure.gateway.rendering.parsed_response import ParsedResponse
from perdure.gateway.rendering.tokenizer_setting import PACKAGED, folder_of
from perdure.gateway.rendering.tokenizers import Tokenizer, load_tokenizer
from perdure.gateway.rendering.tool_call_parsers.base import ToolCallParser
from perdure.gateway.rendering.tool_call_parsers.format_detection import AUTO, SETTING
from perdure.gateway.rendering.tool_call_parsers.hermes import Hermes

QWEN3 = Path(__file__).with_name("qwen3")
"""The folder with the chat template for the packaged tokenizer."""


class MessageFormat(Protocol):
    """Converts messages to ids, and ids to messages, for one model."""

    @property
    def parser(self) -> ToolCallParser:
        """How the model writes reasoning and tool calls."""
        ...

    @property
    def tail_length(self) -> int:
        """How many ids at a prompt's end show whether the prompt opened the answer's reasoning."""
        ...

    def get_stop_token_ids(self) -> list[int]: ...

    def render_ids(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Ids of the whole conversation. Raises: any error of the template."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> list[int] | None:
        """The recorded ids, then the new messages. None if it is not certain what follows the answer."""
        ...

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse: ...


class Format(NamedTuple):
    """How one model reads and writes messages."""

    tokenizer: Tokenizer
    renderer: MessageFormat


def load_format(name: str, parser: str = AUTO, option: str = tokenizer_setting.SETTING) -> Format:
    """The tokenizer that PERDURE_ENGINE__TOKENIZER names, and the message format of its model.

    The chat template decides the format, not the model's name. `parser`: PERDURE_ENGINE__TOOL_CALL_PARSER.
    `option`: where the user gave `name`. Raises: ConfigurationError if the folder has no template, or if
    no tool-call parser reads its tool calls.
    """
    folder_of(name, option)
    tokenizer = load_tokenizer(name)
    if name == PACKAGED and parser not in (AUTO, Hermes.name):
        raise ConfigurationError(
            f"{SETTING} is {parser!r}, but the packaged tokenizer is Qwen3's: set "
            f"{option} to your model's folder"
        )
    folder = QWEN3 if name == PACKAGED else Path(name)
    try:
        return Format(tokenizer, chat_template.load(tokenizer, folder, parser))
    except TemplateError as error:
        raise ConfigurationError(
            f"no message format for {option}={name!r}: {error}; put the model's chat "
            "template into that folder as chat_template.jinja"
        ) from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}={name!r}: {error}") from error


def checked_format(tokenizer: str | None, parser: str, option: str) -> ModelFormat | None:
    """The format of a model that is added to the roster; None if the user gave no tokenizer.

    `option`: names the tokenizer's option in errors. Raises: ConfigurationError.
    """
    if tokenizer is None:
        if parser != AUTO:
            raise ConfigurationError(
                f"a tool-call parser belongs to a tokenizer: give {option} too"
            )
        return None
    load_format(tokenizer, parser, option)
    folder = folder_of(tokenizer)
    name = tokenizer if folder is None else str(folder.absolute())
    return ModelFormat(tokenizer=name, tool_call_parser=parser)
