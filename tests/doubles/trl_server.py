"""A scripted engine behind the routes of vLLM's server that TRL 1.16.0's client uses.

Owns only the wire form: the fields of vLLM 0.32's `CompletionRequest` and `CompletionResponse`
(`entrypoints/openai/completion/protocol.py`).
"""

from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine

MODEL = {"logprobs_mode": "processed_logprobs", "max_model_len": 8192}
CONFIG = {"model_config": MODEL, "weight_transfer_config": {"backend": "nccl"}}
UPDATE = "/update_weights"
ANSWERS: dict[str, dict[str, Any]] = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "policy", "object": "model"}]},
    "/server_info": {"vllm_config": CONFIG},
    "/start_weight_update": {},
    UPDATE: {},
    "/finish_weight_update": {},
    "/reset_prefix_cache": {"success": True},
}


class TrlServer:
    """Another port of a scripted engine, with TRL's routes. `asked` counts the calls by path.

    Example:
        async with ScriptedEngine(scripts) as engine, TrlServer(engine) as server:
            config = GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url)
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.asked: Counter[str] = Counter()
        self.url = ""
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "TrlServer":
        client = httpx.AsyncClient(trust_env=False, timeout=None)
        self._client = await self._opened.enter_async_context(client)
        routes = [Route(path, self._told, methods=["GET", "POST"]) for path in ANSWERS]
        routes.append(Route("/v1/completions", self._completions, methods=["POST"]))
        self.url = await self._opened.enter_async_context(served(Starlette(routes=routes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def _told(self, request: Request) -> Response:
        self.asked[request.url.path] += 1
        return JSONResponse(ANSWERS[request.url.path])

    async def _completions(self, request: Request) -> Response:
        """Of one prompt. The scripted engine ignores what is no sampling parameter."""
        sampling = await request.json()
        (prompt,) = sampling.pop("prompt")
        assert sampling.pop("return_token_ids")
        assert sampling.pop("return_tokens_as_token_ids")
        asked = {"token_ids": prompt, "sampling_params": {**sampling, "logprobs": 1}}
        answer = await self._client.post(f"{self._engine.url}/inference/v1/generate", json=asked)
        if not answer.is_success:
            return Response(answer.content, answer.status_code)
        (sampled,) = answer.json()["choices"]
        entries = [
            (f"token_id:{entry['token_id']}", entry["logprob"])
            for entry in sampled["logprobs"]["content"]
        ]
        logprobs = {
            "text_offset": [0] * len(entries),
            "token_logprobs": [value for _, value in entries],
            "tokens": [token for token, _ in entries],
            "top_logprobs": [{token: value} for token, value in entries],
        }
        choice = {"index": 0, "text": "", "logprobs": logprobs, "stop_reason": None}
        choice |= {name: sampled[name] for name in ("finish_reason", "token_ids")}
        told = {"id": "cmpl-1", "object": "text_completion", "model": sampling["model"]}
        return JSONResponse({**told, "choices": [{**choice, "prompt_token_ids": prompt}]})
