"""Stand-ins that slime's adapter needs. Imported in slime's environment, before slime.

torch and ray are empty modules, because slime only uses their types' names. The tokenizer is Perdure's,
with the two methods that slime calls.
"""

import sys
import types
from typing import Any


class _Empty(types.ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for absent in ("torch", "torch.distributed", "ray"):
    sys.modules[absent] = _Empty(absent)

from perdure.gateway.rendering.message_format import load_format  # noqa: E402  # after the empty modules


class ChatTokenizer:
    """Qwen3's vocabulary and template, with the Hugging Face tokenizer methods that slime calls."""

    def __init__(self) -> None:
        self._tokenizer, self._renderer = load_format("qwen3")

    def apply_chat_template(
        self, messages: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> list[int]:
        self._tokenizer._cached.cache_clear()  # with many rollouts this cache would hold no history
        rendered = self._renderer.render_ids(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return list(rendered)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids)
