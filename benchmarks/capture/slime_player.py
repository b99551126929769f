"""Runs inside slime's environment: one recorded session through slime's own Anthropic adapter.

    slime_player.py <exchanges.json>  ->  {"sampled": .., "trained": .., "samples": .., "tokens": ..}

Slime's adapter, routing tree and sample builder are its own. Replaced are the engine (says the
recorded answer) and the output parser (SGLang's; here it reads without a mistake), and torch and ray
are empty modules: slime's types only name them.
"""

import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any


class _Empty(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for absent in ("torch", "torch.distributed", "ray"):
    sys.modules[absent] = _Empty(absent)

from aiohttp.test_utils import TestClient, TestServer  # noqa: E402  # after the empty modules
from renderers import create_renderer  # noqa: E402
from slime.agent.adapters import common  # noqa: E402
from slime.agent.adapters.anthropic import AnthropicAdapter  # noqa: E402
from slime.agent.parsing import ParsedModelOutput  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from perdure.gateway.tokenizers import load_tokenizer  # noqa: E402


class ChatTokenizer:
    """Qwen3's vocabulary and template, as slime asks a Hugging Face tokenizer for them."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer("qwen3")
        self._renderer = create_renderer(self._tokenizer)

    def apply_chat_template(
        self, messages: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> list[int]:
        rendered = self._renderer.render_ids(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return list(rendered)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids)


async def play(exchanges: list[dict[str, Any]]) -> dict[str, int]:
    now: dict[str, Any] = {}

    async def generate(prompt_ids: Any, session: Any, body: Any, **_: Any) -> Any:
        answer = now["answer_ids"]
        return common.TurnRecord(list(prompt_ids), list(answer), "stop", [-0.5] * len(answer))

    def parse(raw: str, **_: Any) -> ParsedModelOutput:
        blocks = now["blocks"]

        def joined(kind: str) -> str:
            return "".join(block[kind] for block in blocks if block["type"] == kind)

        calls = [
            {"name": b["name"], "input": b["input"]} for b in blocks if b["type"] == "tool_use"
        ]
        return ParsedModelOutput(joined("thinking"), joined("text"), calls)

    common.call_sglang_generate = generate
    common.parse_model_output = parse
    adapter = AnthropicAdapter(tokenizer=ChatTokenizer(), sglang_url="http://unused")
    adapter.open_session("s")
    minted: dict[str, str] = {}
    async with TestClient(TestServer(adapter.app)) as http:
        for exchange in exchanges:
            now.update(exchange)
            text = json.dumps(exchange["body"])
            for theirs, ours in minted.items():
                text = text.replace(theirs, ours)
            headers = {**exchange["headers"], "authorization": "Bearer s"}
            answer = await http.post("/v1/messages", json=json.loads(text), headers=headers)
            content = (await answer.json())["content"]
            given = [block["id"] for block in exchange["blocks"] if block["type"] == "tool_use"]
            own = [block["id"] for block in content if block["type"] == "tool_use"]
            minted.update(zip(given, own, strict=True))
        samples = await adapter.finish_session("s", base_sample=Sample(index=0))
    return {
        "sampled": sum(len(exchange["answer_ids"]) for exchange in exchanges),
        "trained": sum(sum(sample.loss_mask) for sample in samples),
        "samples": len(samples),
        "tokens": sum(len(sample.tokens) for sample in samples),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play(json.loads(Path(sys.argv[1]).read_text())))))
