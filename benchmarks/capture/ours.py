"""Perdure's side: a recording through a real gateway, over HTTP, with a scripted engine behind it."""

from pathlib import Path

import httpx

from benchmarks.capture.recordings import Session, read
from perdure.episodes import turns_parquet
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.testing.scripted_policy import Policy
from perdure.types import Turn


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
