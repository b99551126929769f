"""What tests that control the scripted engine rely on."""

import asyncio

import httpx

from perdure.engines.clients.hosted_requests import new_client
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.scripted_engine import ScriptedEngine

FOR_EVER_S = 3600.0


async def test_what_a_released_caller_asks_next_meets_the_new_latency() -> None:
    """Thousands of callers may be released at once. The first to call again has the new latency."""
    script = {"default": {"turns": [{"content": "Done."}]}}
    body = {"token_ids": load_tokenizer("qwen3").encode_plain("hi"), "sampling_params": {}}
    async with ScriptedEngine(script, latency_s=FOR_EVER_S) as engine, new_client() as client:

        async def two_calls() -> list[int]:
            url = f"{engine.url}/inference/v1/generate"
            return [(await client.post(url, json=body)).status_code for _ in range(2)]

        asking = asyncio.create_task(two_calls())
        async with asyncio.timeout(30):
            while not engine.stats().in_flight:
                await asyncio.sleep(0.001)
            await client.post(f"{engine.url}/reset", json={"latency_s": 0.0})
            assert await asking == [httpx.codes.OK] * 2


async def test_a_wrong_change_is_named() -> None:
    async with ScriptedEngine({}) as engine, new_client() as client:
        answer = await client.post(f"{engine.url}/reset", json={"latency": 1.0})

    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "latency" in answer.text
