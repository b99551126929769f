"""A scripted engine that speaks SGLang: the routes of 0.5.23 in front of a `ScriptedEngine`.

Owns only the wire form. The scripted engine samples, counts and fails on command.
"""

import base64
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from perdure.engines.clients.token_endpoint import experts_of_npy
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine

METRICS: Mapping[str, str] = {
    "vllm:num_requests_running": "sglang:num_running_reqs",
    "vllm:num_requests_waiting": "sglang:num_queue_reqs",
    "vllm:generation_tokens_total": "sglang:generation_tokens_total",
    "vllm:kv_cache_usage_perc": "sglang:token_usage",
    "vllm:prefix_cache_queries_total": "sglang:prompt_tokens_total",
    "vllm:prefix_cache_hits_total": "sglang:cached_tokens_total",
}
PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class ScriptedSglang:
    """Another port of a scripted engine, with SGLang's routes.

    Example:
        async with ScriptedEngine(scripts, generation=3) as engine, ScriptedSglang(engine) as sglang:
            record = EngineRecord(name=..., url=sglang.url, kind="sglang", ...)
    """

    def __init__(self, engine: ScriptedEngine, *, incremental: bool = True) -> None:
        """`incremental`: as with --incremental-streaming-output; otherwise each chunk repeats all before it."""
        self._engine = engine
        self._incremental = incremental
        self.url = ""
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "ScriptedSglang":
        client = httpx.AsyncClient(trust_env=False, timeout=None)
        self._client = await self._opened.enter_async_context(client)
        self.url = await self._opened.enter_async_context(served(self._app()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    def _app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=post),
                Route("/tokenize", self._tokenize, methods=post),
                Route("/v1/models", self._models),
                Route("/model_info", self._model_info),
                Route("/metrics", self._metrics),
                Route("/pause_generation", self._pause, methods=post),
                Route("/continue_generation", self._resume, methods=post),
                Route("/update_weights_from_disk", self._update, methods=post),
                Route("/abort_request", self._abort, methods=post),
                Route("/v1/loads", self._loads),
                Route("/workers", self._workers),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        wishes = dict(body.get("sampling_params") or {})
        if "max_tokens" in wishes:
            return _error("Unexpected keyword argument 'max_tokens'")
        stream, most = bool(body.get("stream")), wishes.pop("max_new_tokens", 128)
        asked = {
            "model": None,
            "request_id": body.get("rid"),
            "token_ids": body["input_ids"],
            "stream": stream,
            "sampling_params": {
                **(wishes | {"max_tokens": most, "logprobs": 1}),
                "routed_experts_prompt_start": body.get("routed_experts_start_len", 0),
            },
        }
        session = request.headers.get("x-session-id") or request.headers.get("x-smg-routing-key")
        headers = {"x-session-id": session or ""}
        url = f"{self._engine.url}/inference/v1/generate"
        told = _Told(len(body["input_ids"]), routed=bool(body.get("return_routed_experts")))
        if stream:
            return StreamingResponse(
                self._stream(url, asked, headers, told), media_type="text/event-stream"
            )
        response = await self._client.post(url, json=asked, headers=headers)
        if not response.is_success:
            return Response(response.content, response.status_code)
        return JSONResponse(told.take(response.json()["choices"][0], incremental=True))

    async def _stream(
        self, url: str, asked: Mapping[str, Any], headers: Mapping[str, str], told: "_Told"
    ) -> AsyncIterator[bytes]:
        """An error of the engine is not caught, so it cuts this connection too."""
        async with self._client.stream("POST", url, json=asked, headers=headers) as response:
            async for line in response.aiter_lines():
                event = line.removeprefix("data: ")
                if not event.startswith("{"):
                    continue
                found = json.loads(event)
                if "error" in found or not found.get("choices"):
                    out = found
                else:
                    out = told.take(found["choices"][0], incremental=self._incremental)
                yield b"data: " + json.dumps(out).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _tokenize(self, request: Request) -> Response:
        url = f"{self._engine.url}/tokenize"
        response = await self._client.post(url, content=await request.body())
        return Response(response.content, media_type="application/json")

    async def _models(self, _: Request) -> Response:
        response = await self._client.get(f"{self._engine.url}/v1/models")
        return Response(response.content, media_type="application/json")

    async def _model_info(self, _: Request) -> Response:
        label = (await self._client.get(f"{self._engine.url}/weight_info")).json()
        return JSONResponse({"is_generation": True, "weight_version": label["weight_version"]})

    async def _metrics(self, _: Request) -> Response:
        text = (await self._client.get(f"{self._engine.url}/metrics")).text
        room = re.search(r'kv_cache_size_tokens="(\d+)"', text)
        for ours, theirs in METRICS.items():
            text = text.replace(ours, theirs)
        known = f"sglang:max_total_num_tokens {room[1]}\n" if room else ""
        return Response(f"{text}\n{known}", media_type="text/plain")

    async def _pause(self, request: Request) -> Response:
        mode = PAUSES[(await request.json()).get("mode", "abort")]
        return await self._told(f"/pause?mode={mode}&clear_cache=true")

    async def _resume(self, _: Request) -> Response:
        return await self._told("/resume")

    async def _abort(self, _: Request) -> Response:
        await self._told("/pause?mode=abort&clear_cache=false")
        return await self._told("/resume")

    async def _loads(self, _: Request) -> Response:
        return JSONResponse({"loads": [{"num_reqs": self._engine.stats().in_flight}]})

    async def _workers(self, _: Request) -> Response:
        """A route of SGLang's router, which has this one server."""
        return JSONResponse({"workers": [{"url": self.url}]})

    async def _update(self, request: Request) -> Response:
        wish = await request.json()
        await self._told("/start_weight_update")
        loaded = await self._told("/update_weights", {"update_info": {"path": wish["model_path"]}})
        if loaded.status_code != httpx.codes.OK:
            return _error("Failed to update weights")
        return await self._told("/finish_weight_update", {"weight_version": wish["weight_version"]})

    async def _told(self, path: str, body: Mapping[str, Any] | None = None) -> Response:
        response = await self._client.post(f"{self._engine.url}{path}", json=body)
        done = {"success": response.is_success, "message": response.text}
        return JSONResponse(done, 200 if response.is_success else 400)


class _Told:
    """The part of one completion that has been streamed."""

    def __init__(self, prompt_tokens: int, *, routed: bool) -> None:
        self._prompt_tokens = prompt_tokens
        self._routed = routed
        self._entries: list[list[Any]] = []

    def take(self, choice: Mapping[str, Any], *, incremental: bool) -> dict[str, Any]:
        content = (choice.get("logprobs") or {}).get("content", ())
        new = [[entry["logprob"], entry["token_id"], None] for entry in content]
        self._entries += new
        shown = new if incremental else list(self._entries)
        reason = choice.get("finish_reason")
        about: dict[str, Any] = {
            "finish_reason": {"type": reason} if reason else None,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._entries),
            "output_token_logprobs": shown,
            "output_token_logprobs_length": len(self._entries),
        }
        if choice.get("weight_versions"):
            about["weight_versions"] = choice["weight_versions"]
            about["weight_version"] = choice["weight_versions"][-1]["version"]
        if self._routed and choice.get("routed_experts"):
            flat = experts_of_npy(choice["routed_experts"]).astype("<i4").tobytes()
            about["routed_experts"] = base64.b64encode(flat).decode()
        return {"text": "", "output_ids": [entry[1] for entry in shown], "meta_info": about}


def _error(message: str) -> Response:
    told = {"message": message, "type": "invalid_request_error", "code": 400}
    return JSONResponse({"error": told}, 400)
