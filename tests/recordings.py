"""Recorded Claude Code sessions as a script: the requests to send, and the answers to sample.

A recording is `{client, scenario, requests: [{headers, body, resp}]}`; `resp` is `{blocks, stop}`, or
null if the client got an error, and then the request is not sent.

`captured` plays one through a real gateway, over HTTP, with a scripted engine behind it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from perdure.episodes import turns_parquet
from perdure.gateway.rendering.message_format import load_format
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.testing.scripted_policy import Policy
from perdure.types import Turn

SENT_HEADERS = (
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
)
FORMAT = load_format("qwen3")
END = FORMAT.tokenizer.convert_tokens_to_ids("<|im_end|>")


@dataclass
class Exchange:
    """One request and its answer. `answer_ids`: as the model would have sampled it. Shape [C]."""

    headers: dict[str, str]
    body: dict[str, Any]
    blocks: list[dict[str, Any]]
    answer_ids: list[int] = field(default_factory=list)


def read(path: Path) -> list[Exchange]:
    """The answered requests of a recording, in order."""
    requests = json.loads(path.read_bytes())["requests"]
    return [
        Exchange(
            {name: r["headers"][name] for name in SENT_HEADERS if name in r["headers"]},
            {**r["body"], "stream": False},
            r["resp"]["blocks"],
            answer_ids(r["resp"]["blocks"]),
        )
        for r in requests
        if r["resp"] is not None
    ]


@dataclass
class Session:
    """A recording on the wire: later requests carry the tool-use ids that this server made."""

    exchanges: list[Exchange]
    minted: dict[str, str] = field(default_factory=dict)

    def bodies(self) -> Iterator[tuple[Exchange, dict[str, Any]]]:
        for exchange in self.exchanges:
            text = json.dumps(exchange.body)
            for theirs, ours in self.minted.items():
                text = text.replace(theirs, ours)
            yield exchange, json.loads(text)

    def answered(self, exchange: Exchange, content: list[dict[str, Any]]) -> None:
        theirs = [block["id"] for block in exchange.blocks if block["type"] == "tool_use"]
        ours = [block["id"] for block in content if block["type"] == "tool_use"]
        self.minted.update(zip(theirs, ours, strict=True))


def answer_ids(blocks: list[dict[str, Any]]) -> list[int]:
    """An answer as the model would have sampled it, with its closing token."""

    def joined(kind: str) -> str:
        return "".join(block[kind] for block in blocks if block["type"] == kind)

    calls = [
        {"function": {"name": block["name"], "arguments": json.dumps(block["input"])}}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    said: dict[str, Any] = {"role": "assistant", "content": joined("text"), "tool_calls": calls}
    said["reasoning_content"] = joined("thinking")
    asked: list[Any] = [{"role": "user", "content": "?"}]
    opened = FORMAT.renderer.render_ids(asked, add_generation_prompt=True)
    whole = FORMAT.renderer.render_ids([*asked, said])
    return list(whole[len(opened) : whole.index(END, len(opened)) + 1])


class Speaker(Policy):
    """The policy of a scripted engine that samples the answers it is given, in order."""

    def __init__(self) -> None:
        super().__init__(load_tokenizer("qwen3"), {})
        self.next: list[int] = []

    def complete(self, prompt_ids: list[int]) -> list[int]:
        return self.next


async def captured(recording: Path, home: Path) -> list[Turn]:
    """The turns that the gateway wrote to its store."""
    session, speaker, name = Session(read(recording)), Speaker(), recording.stem
    async with ScriptedEngine() as engine:
        engine.policy = speaker
        async with LocalGateway(home, engine={"url": engine.url, "kind": "vllm"}) as gateway:
            key = await gateway.open(name)
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
                for exchange, body in session.bodies():
                    speaker.next = exchange.answer_ids
                    headers = {**exchange.headers, "authorization": f"Bearer {key}"}
                    answer = await http.post("/v1/messages?beta=true", json=body, headers=headers)
                    answer.raise_for_status()
                    session.answered(exchange, answer.json()["content"])
            await gateway.control.close(name)
            return turns_parquet.decode((await gateway.store.get(turns_key_of(name))).data)
