"""Qwen3's format for the packaged tokenizer, which has no template beside it: `renderers`' own class."""

from typing import Any

from renderers import create_renderer
from renderers.base import ParsedResponse, RenderedTokens
from renderers.configs import AutoRendererConfig

from perdure.gateway.rendering.notations.base import Notation
from perdure.gateway.rendering.notations.hermes import Hermes
from perdure.gateway.rendering.tokenizers import Qwen3Tokenizer
from perdure.gateway.rendering.typed_text import marked


class PackagedQwen3:
    """Reasoning stays in the history as it was sampled (`thinking_retention`): a trainer conditions on
    the tokens that the engine saw, so nothing may be removed between two turns."""

    notation: Notation = Hermes()
    looks_back = 64
    """`renderers` looks no further back than the header of the newest answer: read in its code."""

    def __init__(self, tokenizer: Qwen3Tokenizer) -> None:
        self._control = tokenizer.control
        config = AutoRendererConfig(thinking_retention="all")
        self._renderer = create_renderer(tokenizer, config)

    def get_stop_token_ids(self) -> list[int]:
        return list(self._renderer.get_stop_token_ids())

    def render_ids(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        ids: list[int] = self._renderer.render_ids(
            marked(messages, self._control),
            tools=marked(tools, self._control),
            add_generation_prompt=add_generation_prompt,
        )
        return ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        return self._renderer.bridge_to_next_turn(
            previous_prompt_ids,
            previous_completion_ids,
            marked(new_messages, self._control),
            tools=tools,
        )

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        read = self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        for call in read.tool_calls:
            call.raw = f"<tool_call>\n{call.raw}\n</tool_call>"
        return read
