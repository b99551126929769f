"""Runs inside slime's environment: its Anthropic adapter on a loopback port.

    slime_server.py <engine url>

Adapter, routing tree and HTTP are slime's own. The tokenizer is the one Perdure uses, behind the two
methods that slime asks of it. SGLang's parsers are absent, so the output goes through slime's own
fallback parser, which is cheaper; torch and ray are empty modules, which its types only name.
"""

import asyncio
import json
import sys
import types
from typing import Any


class _Empty(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for absent in ("torch", "torch.distributed", "ray"):
    sys.modules[absent] = _Empty(absent)

from aiohttp import web  # noqa: E402  # after the empty modules
from renderers import create_renderer  # noqa: E402
from slime.agent.adapters.anthropic import AnthropicAdapter  # noqa: E402

from perdure.gateway.tokenizers import load_tokenizer  # noqa: E402


class ChatTokenizer:
    """Qwen3's vocabulary and template, as slime asks a Hugging Face tokenizer for them."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer("qwen3")
        self._renderer = create_renderer(self._tokenizer)

    def apply_chat_template(
        self, messages: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> list[int]:
        self._tokenizer._cached.cache_clear()  # among many rollouts no history stays in it
        rendered = self._renderer.render_ids(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return list(rendered)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids)


async def serve(engine_url: str) -> None:
    adapter = AnthropicAdapter(tokenizer=ChatTokenizer(), sglang_url=engine_url)
    adapter.open_session("s")
    runner = web.AppRunner(adapter.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"event": "listens", "port": port}), file=sys.stderr, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
