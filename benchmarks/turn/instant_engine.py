"""An engine in this process that answers at once, in vLLM's and SGLang's format.

Its own CPU is not measured.
"""

import functools
import json
from contextlib import AsyncExitStack
from typing import Any, Self

import numpy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from perdure.engines.clients.token_endpoint import npy_of_experts
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.local_server import served
from perdure.testing.scripted_policy import Policy
from perdure.types import ExpertRows

ANSWER = {
    "content": "I look at the next file before I change anything.",
    "tool_calls": [{"name": "Read", "arguments": {"file_path": "/testbed/src/module.py"}}],
}


LAYERS, TOP_K, EXPERTS = 48, 8, 128
"""Those of Qwen3-30B-A3B."""
SOME_TOKENS = 1024


def some_experts(tokens: int) -> ExpertRows:
    """Of each layer, `TOP_K` different experts, all equally likely: the worst case to compress. Shape
    [tokens, LAYERS, TOP_K]."""
    return numpy.resize(_drawn(), (tokens, LAYERS, TOP_K))


@functools.cache
def _drawn() -> ExpertRows:
    dice = numpy.random.default_rng(0).random((SOME_TOKENS, LAYERS, EXPERTS))
    return dice.argsort(-1)[..., :TOP_K].astype(numpy.uint8)


class InstantEngine:
    """Example:
    async with InstantEngine() as engine:
        ...                                   # engine.url; engine.prompt_tokens of the last call
    """

    def __init__(self) -> None:
        self.ids = Policy(load_tokenizer("qwen3"), {}).tokens(ANSWER)
        self.url = ""
        self.prompt_tokens = 0
        self.routes = False
        """Whether it returns experts."""
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        routes = [
            Route("/inference/v1/generate", self._vllm, methods=["POST"]),
            Route("/generate", self._sglang, methods=["POST"]),
        ]
        self.url = await self._opened.enter_async_context(served(Starlette(routes=routes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def _vllm(self, request: Request) -> Response:
        asked = await request.json()
        self.prompt_tokens = len(asked["token_ids"])
        logprob = -0.5 if asked.get("stream") else 0.0  # a probe requires a certain token
        content = [{"token_id": token_id, "logprob": logprob} for token_id in self.ids]
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": self.ids,
            "logprobs": {"content": content},
            "finish_reason": "stop",
        }
        if self.routes:
            start = asked["sampling_params"].get("routed_experts_prompt_start", 0)
            rows = self.prompt_tokens + len(self.ids) - 1 - start
            choice["routed_experts"] = npy_of_experts(some_experts(rows))
        answer = {"request_id": "0", "choices": [choice]}
        if not asked.get("stream"):
            return JSONResponse(answer)
        return Response(f"data: {json.dumps(answer)}\n\n", media_type="text/event-stream")

    async def _sglang(self, request: Request) -> Response:
        self.prompt_tokens = len((await request.json())["input_ids"])
        sampled = [[-0.5, token_id, None] for token_id in self.ids]
        meta = {"output_token_logprobs": sampled, "finish_reason": {"type": "stop"}}
        return JSONResponse({"text": "", "meta_info": meta})
