"""Runs inside slime's environment: one recorded session through slime's own Anthropic adapter.

    slime_player.py <exchanges.json>  ->  {"sampled": .., "trained": .., "samples": .., "tokens": ..}

Adapter, routing tree and sample builder are slime's own. The engine is replaced by one that samples
the recorded answer, and SGLang's output parser by one that makes no mistakes. torch and ray are empty
modules, because slime's types only name them.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.inside_slime import ChatTokenizer  # before anything of slime

from aiohttp.test_utils import TestClient, TestServer  # isort: skip
from slime.agent.adapters import common  # isort: skip
from slime.agent.adapters.anthropic import AnthropicAdapter  # isort: skip
from slime.agent.parsing import ParsedModelOutput  # isort: skip
from slime.utils.types import Sample  # isort: skip


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
