"""An inference server without a model: vLLM's API, a real tokenizer, answers from a script.

Its policy is a JSON file, so it can really solve a task. Its token ids are real; its logprobs are made
up, but exact and repeatable. It can simulate every failure that we have seen in a real engine. It also
answers `/v1/chat/completions` and `/v1/messages`, as a double of hosted APIs.

    python -m perdure.testing.scripted_engine --port 8100 --scripts policy.json
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import re
import socket
import sys
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.dialects import openai_chat
from perdure.dialects.base import Answer, Refused
from perdure.engines.clients.token_endpoint import npy_of_experts
from perdure.engines.clients.vllm_control import PROBE_SESSION, version_number
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.local_server import served
from perdure.testing.scripted_policy import Policy
from perdure.types import ExpertRows

KEPT_CALLS = 512
CHUNK = 8
"""Tokens per chunk of a stream."""
FAULTS = (
    "status",  # answers with `status` and samples nothing
    "hang",  # takes the request and never answers; /health stays 200
    "reset_before",  # drops the connection and samples nothing
    "reset_after",  # samples, then drops the connection
    "done_without_finish",  # the stream ends with [DONE] but without finish_reason
    "eof_mid_stream",  # the stream ends without [DONE]
    "short_logprobs",  # one logprob is missing
    "hang_mid_stream",  # half a stream, then nothing; /health stays 200
)


WEIGHTS_FILE = "weights.json"
"""The file in this engine's checkpoint folders: `{"weights": 7}`."""
BROKEN_WEIGHTS = -1
"""Weights after a failed update: empty tensors, as in vLLM."""


CERTAIN_TOP_P = 1e-3
"""A smaller top_p leaves one token, whose processed logprob is 0."""


def logprob(token_id: int, position: int, weights: int = 0) -> float:
    """The made-up logprob of a token at a position of its completion: exact, and never 0.

    `weights`: the number in the checkpoint that the engine holds.
    """
    return -((token_id * 31 + position * 17 + weights * 101) % 4093 + 1) / 4096


class Experts(NamedTuple):
    """The shape of a mixture of experts."""

    layers: int = 4
    top_k: int = 2
    total: int = 64


def kept_set(token: int) -> list[int]:
    """The made-up kept set of a sampled token: two or three ids, in no order."""
    return [token + 5, token, token + 2][token % 2 :]


def routed_experts(
    ids: Sequence[int], shape: Experts, weights: int = 0, start: int = 0
) -> ExpertRows:
    """The made-up experts of the tokens from position `start` on: exact, distinct within a layer, and
    different for other positions, layers and weights. Shape [N, layers, top_k]."""
    tokens = numpy.asarray(ids[start:], numpy.int64)
    places = numpy.arange(start, start + len(tokens))
    layers, ranks = numpy.arange(shape.layers), numpy.arange(shape.top_k)
    of_token = tokens * 31 + places * 17 + weights * 101
    found = (of_token[:, None, None] + layers[:, None] * 7 + ranks) % shape.total
    return numpy.asarray(found, numpy.uint8 if shape.total <= 256 else numpy.uint16)


@dataclass(frozen=True)
class Faults:
    """Simulated faults: `kind` on every `every`-th generate call, at most `times` times."""

    kind: str | None = None
    every: int = 1
    times: int | None = None
    status: int = 503

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in FAULTS:
            raise ValueError(f"unknown fault {self.kind!r}: use one of {', '.join(FAULTS)}")


@dataclass(frozen=True)
class Call:
    """One sampled completion, as the engine recorded it."""

    session_id: str
    request_id: str
    prompt_ids: "array[int]"
    completion_ids: "array[int]"
    logprobs: "array[float]"
    sampling: Mapping[str, Any]
    sampled_by: list[int] = field(default_factory=list)
    """For each streamed token, the weights that the engine really held."""
    at: float = field(default_factory=time.monotonic)

    def as_json(self) -> dict[str, Any]:
        arrays = ("prompt_ids", "completion_ids", "logprobs")
        return {**vars(self), **{name: list(getattr(self, name)) for name in arrays}}


@dataclass
class Stats:
    """The answer of `/stats`."""

    calls: int = 0
    """Completions that /inference/v1/generate sampled."""
    chat_calls: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    calls_by_session: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class CacheModel:
    """The modeled prefix cache of an engine."""

    kv_tokens: int = 1 << 20
    """Size of the cache, in tokens."""
    block: int = 128
    """Tokens per cache block."""
    prefill_per_s: float = 0.0
    """Uncached tokens prefilled per second, one prompt after the other. 0 = prefill takes no time."""


DEFAULT_CACHE = CacheModel()


class PrefixCache:
    """A model of vLLM's prefix cache: full blocks, each hashed with all blocks before it, LRU."""

    def __init__(self, model: CacheModel) -> None:
        self._block = model.block
        self._room = max(1, model.kv_tokens // model.block)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.queries = 0
        self.hits = 0

    def look(self, ids: Sequence[int]) -> int:
        """The number of prompt tokens that need no prefill. The last token always needs it."""
        self.queries += len(ids)
        hit = 0
        for key in self._keys(ids[: len(ids) - 1]):
            if key not in self._blocks:
                break
            hit += self._block
        self.hits += hit
        return hit

    def keep(self, ids: Sequence[int]) -> None:
        for key in self._keys(ids):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def _keys(self, ids: Sequence[int]) -> Iterator[int]:
        key = 0
        for start in range(0, len(ids) - self._block + 1, self._block):
            key = hash((key, tuple(ids[start : start + self._block])))
            yield key


_TRANSPORTS: dict[tuple[object, object], asyncio.Transport] = {}
"""The key has both ends of a connection: a client may use one local port for several servers."""


class _Protocol(H11Protocol):
    """uvicorn's protocol, with connections that we can cut."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _TRANSPORTS[self.client, self.server] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _TRANSPORTS.pop((self.client, self.server), None)


def _cut(request: Request) -> None:
    """Cut a connection, unless the client has already closed it."""
    ends = request.scope["client"], request.scope["server"]
    if (transport := _TRANSPORTS.get(ends)) is not None:
        transport.abort()


class ScriptedEngine:
    """A scripted engine on a loopback port, in this process's event loop.

    Example:
        async with ScriptedEngine({"default": {"turns": [{"content": "Done."}]}}) as engine:
            settings = Settings(engine={"url": engine.url, "kind": "vllm"})
            ...
            assert engine.stats().calls == 1
            assert engine.calls[0].prompt_ids == recorded
    """

    def __init__(
        self,
        scripts: Mapping[str, Any] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokenizer: str = "qwen3",
        policy_version: int | None = 1,
        latency_s: float = 0.0,
        max_model_len: int = 131_072,
        chunk_delay_s: float = 0.0,
        generation: int | None = None,
        cache: CacheModel = DEFAULT_CACHE,
        experts: Experts | None = None,
        keeps_sets: bool = False,
    ) -> None:
        """`generation`: also serve `policy-g<generation>`, and refuse other generations' names.
        `experts`: return `routed_experts`, as vLLM with `--enable-return-routed-experts`.
        `keeps_sets`: return `sampling_mask`, as vLLM with `--return-sampling-mask`."""
        self._tokenizer = load_tokenizer(tokenizer)
        self.policy = Policy(self._tokenizer, scripts or {})
        digest = hashlib.sha256(json.dumps(scripts or {}, sort_keys=True).encode()).hexdigest()
        self._root = f"scripted:{digest[:12]}"
        self.policy_version = policy_version
        self.latency_s = latency_s
        self.chunk_delay_s = chunk_delay_s
        self.generation = generation
        self.experts = experts
        self.keeps_sets = keeps_sets
        self.weights = 0
        self.raw_logprobs = False
        """Like vLLM without `--logprobs-mode processed_logprobs`: sampling does not change logprobs."""
        self.cache = PrefixCache(cache)
        self._cache_model = cache
        self._prefilling = asyncio.Lock()
        self._started = time.time()
        self._steps = itertools.count(1)
        self._step = 0
        self._emitted = 0
        self._updating = False
        self._aborts = 0
        self._running = asyncio.Event()
        self._running.set()
        self.faults = Faults()
        self.calls: deque[Call] = deque(maxlen=KEPT_CALLS)
        """The newest completions, oldest first."""
        self._address = (host, port)
        self._max_model_len = max_model_len
        self._stats = Stats()
        self._counter = itertools.count(1)
        self._released = asyncio.Event()
        self._opened = contextlib.AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        listener = socket.create_server(self._address, backlog=1024)
        serving = served(self.app(), listener, http=_Protocol)
        self.url = await self._opened.enter_async_context(serving)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._released.set()
        await self._opened.aclose()

    def stats(self) -> Stats:
        return self._stats

    def reset(self, **changes: Any) -> None:
        """Forget calls, counts and faults, apply `changes` as `control` does, then release hanging and
        delayed calls, so that their callers' next calls see the changes.

        Raises: TypeError, ValueError as `control` does.
        """
        self.faults = Faults()
        self.control(**changes)
        self._stats = Stats(in_flight=self._stats.in_flight)
        self._counter = itertools.count(1)
        self.calls.clear()
        self._released.set()
        self._released = asyncio.Event()

    def control(self, **changes: Any) -> None:
        """Change `policy_version`, `latency_s`, `chunk_delay_s`, `weights`, `scripts`, or the fields
        of `Faults`.

        Raises: TypeError, ValueError, which names the wrong field.
        """
        faults = {n: changes.pop(n) for n in list(changes) if n in Faults.__dataclass_fields__}
        new_faults = replace(self.faults, **faults)
        if "scripts" in changes:
            self.policy = Policy(self._tokenizer, changes.pop("scripts"))
        for name, value in changes.items():
            if name not in ("policy_version", "latency_s", "chunk_delay_s", "weights"):
                raise ValueError(f"unknown field {name!r}")
            setattr(self, name, value)
        if faults:
            self.faults = new_faults
            self._counter = itertools.count(1)

    def app(self) -> Starlette:
        post = ["POST"]
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=post),
                Route("/v1/chat/completions", self._chat, methods=post),
                Route("/v1/messages", self._messages, methods=post),
                Route("/pause", self._pause, methods=post),
                Route("/resume", self._resume, methods=post),
                Route("/is_paused", self._is_paused),
                Route("/init_weight_transfer_engine", self._init_transfer, methods=post),
                Route("/start_weight_update", self._start_update, methods=post),
                Route("/update_weights", self._update_weights, methods=post),
                Route("/finish_weight_update", self._finish_update, methods=post),
                Route("/update_weight_version", self._relabel, methods=post),
                Route("/weight_info", self._weight_info),
                Route("/tokenize", self._tokenize, methods=post),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/stats", self._stats_route),
                Route("/calls", self._calls_route),
                Route("/reset", self._reset_route, methods=post),
                Route("/control", self._control_route, methods=post),
            ]
        )

    # --- vLLM's token endpoint -----------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        prompt_ids = body.get("token_ids") if isinstance(body, dict) else None
        if not isinstance(prompt_ids, list) or not prompt_ids:
            return _openai_error(400, "token_ids: Field required")
        if not self._serves(str(body.get("model") or "")):
            return _openai_error(404, f"The model `{body['model']}` does not exist.")
        with self._working():
            fault = self._fault(request)
            if fault == "status":
                return _openai_error(self.faults.status, "a fault on command")
            if fault == "hang":
                await self._released.wait()
            if fault == "reset_before":
                return self._drop(request)
            await self._take_time()
            if not body.get("stream"):
                await self._running.wait()
            return self._sampled(request, body, prompt_ids, fault)

    async def _take_time(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.latency_s):
                await self._released.wait()

    def _serves(self, model: str) -> bool:
        """False for the model name of another generation: vLLM too refuses unknown models."""
        fenced = re.search(r"-g(\d+)$", model)
        return fenced is None or self.generation is None or int(fenced[1]) == self.generation

    def _sampled(
        self, request: Request, body: dict[str, Any], prompt_ids: list[int], fault: str | None
    ) -> Response:
        sampling = body.get("sampling_params") or {}
        room = self._max_model_len - len(prompt_ids)
        if room <= 0:
            message = (
                f"The decoder prompt (length {len(prompt_ids)}) is longer than the maximum model "
                f"length of {self._max_model_len}."
            )
            if not body.get("stream"):
                return _openai_error(400, message)
            told = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
            refusal = _sse({"error": told}) + b"data: [DONE]\n\n"
            return Response(refusal, media_type="text/event-stream")  # a 200, as vLLM's streams
        whole = self.policy.complete(prompt_ids)
        begun = self.policy.begun(prompt_ids, whole)
        token_ids = whole[begun : begun + min(sampling.get("max_tokens") or room, room)]
        ended = begun + len(token_ids) == len(whole)
        if stops := sampling.get("stop"):
            until = self.policy.until(token_ids, stops)
            ended = ended or len(until) < len(token_ids)
            token_ids = until
        reason = "stop" if ended else "length"
        cached, prefills = 0, bool(self._cache_model.prefill_per_s and body.get("stream"))
        if not prefills and not _is_probe(request):
            cached = self.cache.look(prompt_ids)
            self.cache.keep([*prompt_ids, *token_ids])
        call = self._record(request, body, prompt_ids, token_ids, begun)
        if fault == "reset_after":
            return self._drop(request)
        logprobs = call.logprobs[:-1] if fault == "short_logprobs" else call.logprobs
        usage = _usage(len(prompt_ids), len(token_ids))
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if body.get("stream") or fault in ("done_without_finish", "eof_mid_stream"):
            job = _Job(body, call, token_ids, begun, reason, usage, len(logprobs), fault)
            if prefills:
                job = job._replace(prefill=prompt_ids)
            return StreamingResponse(self._stream(request, job), media_type="text/event-stream")
        choice = _part(token_ids, logprobs, reason, [self._label()] * len(token_ids))
        choice |= self._routed(sampling, [*prompt_ids, *token_ids]) | self._mask(token_ids)
        self._advance(len(token_ids))
        call.sampled_by.extend([self.weights] * len(token_ids))
        answer = self._head(request, body)
        if sampling.get("prompt_logprobs") is not None:
            answer["prompt_logprobs"] = self._forced(prompt_ids)
        content = json.dumps({**answer, "choices": [choice], "usage": usage})
        return Response(content, media_type="application/json")

    def _forced(self, prompt_ids: list[int]) -> list[dict[str, Any] | None]:
        """Logprobs of the prompt's own tokens. The first token has none."""
        entries = [
            {str(token): {"logprob": logprob(token, i, self.weights)}}
            for i, token in enumerate(prompt_ids)
        ]
        return [None, *entries[1:]]

    def _routed(self, sampling: Mapping[str, Any], read: Sequence[int]) -> dict[str, str]:
        """The experts of the tokens that were read: all of prompt + completion but the last, from the
        request's `routed_experts_prompt_start` on."""
        if self.experts is None or not read:
            return {}
        start = sampling.get("routed_experts_prompt_start", 0)
        rows = routed_experts(read[:-1], self.experts, self.weights, start)
        return {"routed_experts": npy_of_experts(rows)}

    def _mask(self, ids: Sequence[int]) -> dict[str, list[list[int]]]:
        """vLLM sends the sets of the tokens of the same event."""
        return {"sampling_mask": [kept_set(one) for one in ids]} if self.keeps_sets and ids else {}

    def _advance(self, tokens: int) -> None:
        self._step = next(self._steps)
        self._emitted += tokens

    def _record(
        self,
        request: Request,
        body: dict[str, Any],
        prompt_ids: list[int],
        token_ids: list[int],
        begun: int,
    ) -> Call:
        sampling = body.get("sampling_params") or {}
        certain = not self.raw_logprobs and sampling.get("top_p", 1.0) < CERTAIN_TOP_P
        call = Call(
            session_id=request.headers.get("x-session-id", ""),
            request_id=request.headers.get("x-request-id") or body.get("request_id") or "",
            prompt_ids=array("i", prompt_ids),
            completion_ids=array("i", token_ids),
            logprobs=array(
                "d",
                (
                    0.0 if certain else logprob(t, i, self.weights)
                    for i, t in enumerate(token_ids, begun)
                ),
            ),
            sampling=sampling,
        )
        if _is_probe(request):
            return call
        self.calls.append(call)
        stats = self._stats
        stats.calls += 1
        stats.calls_by_session[call.session_id] += 1
        stats.prompt_tokens += len(prompt_ids)
        stats.sampled_tokens += len(token_ids)
        return call

    def _head(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        request_id = request.headers.get("x-request-id") or body.get("request_id") or "0"
        return {
            "request_id": f"generate-tokens-{request_id}",
            "model": body.get("model"),
            "prompt_token_ids": None,
        }

    async def _stream(self, request: Request, job: "_Job") -> AsyncIterator[bytes]:
        """Only the last chunk has versions, experts and a finish reason, as in vLLM."""
        with self._working():
            head, length, aborts = self._head(request, job.body), len(job.token_ids), self._aborts
            labels: list[str] = []
            sampling = job.body.get("sampling_params") or {}
            if job.prefill is not None:
                await self._prefill(job, job.prefill)
            for start in range(0, length, CHUNK):
                await self._frozen(aborts)
                if aborts != self._aborts:
                    part = _part([], [], "abort", labels)
                    part |= self._routed(sampling, [*job.call.prompt_ids, *job.token_ids[:start]])
                    yield _sse({**head, "choices": [part]})
                    yield b"data: [DONE]\n\n"
                    return
                last = start + CHUNK >= length
                if last and job.fault == "eof_mid_stream":
                    _cut(request)
                    return
                if start >= length // 2 and job.fault == "hang_mid_stream":
                    await self._released.wait()
                ids = job.token_ids[start : start + CHUNK]
                labels += [self._label()] * len(ids)
                job.call.sampled_by.extend([self.weights] * len(ids))
                logprobs = [
                    logprob(token, job.begun + start + i, self.weights)
                    for i, token in enumerate(ids)
                    if start + i < job.logprobs
                ]
                ends = last and job.fault != "done_without_finish"
                self._advance(len(ids))
                part = _part(ids, logprobs, job.reason if ends else None, labels if ends else None)
                if ends:
                    part |= self._routed(sampling, [*job.call.prompt_ids, *job.token_ids])
                yield _sse({**head, "choices": [part | self._mask(ids)]})
            if job.fault == "done_without_finish":
                yield _sse({"error": {"message": "EngineDeadError", "code": 500}})
            elif (job.body.get("stream_options") or {}).get("include_usage"):
                yield _sse({**head, "choices": [], "usage": job.usage})
            yield b"data: [DONE]\n\n"

    async def _prefill(self, job: "_Job", prompt_ids: list[int]) -> None:
        async with self._prefilling:
            cached = self.cache.look(prompt_ids)
            await asyncio.sleep((len(prompt_ids) - cached) / self._cache_model.prefill_per_s)
            self.cache.keep([*prompt_ids, *job.token_ids])
        job.usage["prompt_tokens_details"] = {"cached_tokens": cached}

    async def _frozen(self, aborts: int) -> None:
        """Wait for one step, and for the end of a pause in mode `keep`."""
        if self.chunk_delay_s:
            await asyncio.sleep(self.chunk_delay_s)
        if aborts == self._aborts:
            await self._running.wait()

    def _label(self) -> str:
        return "default" if self.policy_version is None else str(self.policy_version)

    def _fault(self, request: Request) -> str | None:
        faults = self.faults
        if faults.kind is None:
            return None
        if _is_probe(request):  # only a permanent fault fails a probe, and we do not count it
            return faults.kind if faults.every == 1 and faults.times is None else None
        if next(self._counter) % faults.every:
            return None
        if faults.times is not None and self._stats.faults[faults.kind] >= faults.times:
            return None
        self._stats.faults[faults.kind] += 1
        return faults.kind

    def _drop(self, request: Request) -> Response:
        _cut(request)
        return Response(status_code=500)  # goes nowhere: the connection is gone

    @contextlib.contextmanager
    def _working(self) -> Any:
        stats = self._stats
        stats.in_flight += 1
        stats.most_in_flight = max(stats.most_in_flight, stats.in_flight)
        try:
            yield
        finally:
            self._stats.in_flight -= 1

    # --- vLLM's control plane ------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "keep", "wait"):
            return _openai_error(400, f"mode {mode!r}")
        self._running.clear()
        if mode == "abort":
            self._aborts += 1
        if request.query_params.get("clear_cache", "true") == "true":
            self.cache.clear()
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self._running.set()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": not self._running.is_set()})

    async def _init_transfer(self, request: Request) -> Response:
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _start_update(self, request: Request) -> Response:
        if self._updating:
            return _openai_error(500, "a weight update is already active")
        self._updating = True
        return JSONResponse({"message": "Weight update started"})

    async def _update_weights(self, request: Request) -> Response:
        """A checkpoint with `stale` is accepted and changes nothing, as a real vLLM once did. One with
        `cut` fails after its load has changed tensors."""
        if not self._updating:
            return _openai_error(500, "update_weights before start_weight_update")
        path = Path((await request.json())["update_info"]["path"])
        try:
            loaded = json.loads((path / WEIGHTS_FILE).read_text())
        except OSError as error:  # nothing was opened, so nothing has changed
            return _openai_error(500, f"cannot open the checkpoint: {error}")
        except ValueError as error:
            self.weights, self._updating = BROKEN_WEIGHTS, False
            return _openai_error(500, f"cannot load {path}: {error}")
        if not loaded.get("stale"):
            self.weights = int(loaded["weights"])
        if loaded.get("cut"):
            return _openai_error(500, f"{path} ends in the middle")
        return JSONResponse({"message": "Weights updated"})

    async def _finish_update(self, request: Request) -> Response:
        if not self._updating:
            return _openai_error(500, "finish_weight_update before start_weight_update")
        self._updating = False
        self.policy_version = version_number((await request.json()).get("weight_version"))
        return JSONResponse({"message": "Weight update finished"})

    async def _relabel(self, request: Request) -> Response:
        """Changes only the label, not the weights, as in vLLM."""
        label = (await request.json())["new_version"]
        self.policy_version = version_number(label)
        return JSONResponse({"success": True, "new_version": label})

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self._label()})

    # --- hosted APIs ---------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        raw = await request.body()
        try:
            parsed = openai_chat.parse(raw)
        except Refused as refused:
            return Response(openai_chat.error(refused), refused.status)
        with self._working():
            fault = self._fault(request)
            if fault == "status":
                return _openai_error(self.faults.status, "a fault on command")
            if fault == "hang":
                await self._released.wait()
            await self._take_time()
            answer = self._chat_answer(parsed.request.model, parsed.request.messages)
        if parsed.stream:
            content = openai_chat.events(answer, include_usage=parsed.include_usage)
            return Response(content, media_type="text/event-stream")
        return Response(openai_chat.completion(answer), media_type="application/json")

    def _chat_answer(self, model: str, messages: list[dict[str, Any]]) -> Answer:
        self._stats.chat_calls += 1
        answers = sum(message["role"] == "assistant" for message in messages)
        opening = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
        turn = self.policy.scripts.turn("\n".join(m["content"] for m in opening), answers)
        calls = [
            {
                "id": f"call_{self._stats.chat_calls}_{i}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for i, call in enumerate(turn.get("tool_calls", ()))
        ]
        message = {"role": "assistant", "content": turn.get("content", "")}
        if turn.get("reasoning"):
            message["reasoning_content"] = turn["reasoning"]
        if calls:
            message["tool_calls"] = calls
        size = sum(len(m["content"]) for m in messages) // 4
        return Answer(
            id=f"chatcmpl-{self._stats.chat_calls}",
            created=0,
            model=model,
            message=message,
            finish_reason="tool_calls" if calls else "stop",
            usage=_usage(size, len(json.dumps(message)) // 4),
        )

    async def _messages(self, request: Request) -> Response:
        """Anthropic's Messages API without streaming: text and tool use."""
        body = await request.json()
        chat = [_plain_message(message) for message in body["messages"]]
        with self._working():
            answer = self._chat_answer(body["model"], chat)
        blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.message["content"]}]
        for call in answer.message.get("tool_calls", ()):
            use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            blocks.append({**use, "input": json.loads(call["function"]["arguments"])})
        usage = {
            "input_tokens": answer.usage["prompt_tokens"],
            "output_tokens": answer.usage["completion_tokens"],
        }
        reason = "tool_use" if len(blocks) > 1 else "end_turn"
        return JSONResponse(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "model": body["model"],
                "content": blocks,
                "stop_reason": reason,
                "usage": usage,
            }
        )

    # --- the rest ------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        tokens = self._tokenizer.encode(str(body.get("prompt", "")))
        return JSONResponse(
            {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens}
        )

    async def _models(self, request: Request) -> Response:
        card = {"object": "model", "max_model_len": self._max_model_len, "root": self._root}
        names = ["policy"] if self.generation is None else [f"policy-g{self.generation}", "policy"]
        return JSONResponse({"object": "list", "data": [{"id": name, **card} for name in names]})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _metrics(self, request: Request) -> Response:
        stats, cache = self._stats, self.cache
        values = {
            "process_start_time_seconds": self._started,
            "vllm:num_requests_running": stats.in_flight,
            "vllm:num_requests_waiting": 0,
            "vllm:iteration_tokens_total_count": self._step,
            "vllm:generation_tokens_total": self._emitted,
            "vllm:num_preemptions_total": 0,
            "vllm:prefix_cache_queries_total": cache.queries,
            "vllm:prefix_cache_hits_total": cache.hits,
            f'vllm:cache_config_info{{kv_cache_size_tokens="{self._cache_model.kv_tokens}"}}': 1,
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))

    async def _stats_route(self, request: Request) -> Response:
        sessions = len(self._stats.calls_by_session)
        return JSONResponse({**vars(self._stats), "sessions": sessions})

    async def _calls_route(self, request: Request) -> Response:
        wanted = request.query_params.get("session")
        calls = [call for call in self.calls if wanted in (None, call.session_id)]
        return JSONResponse([call.as_json() for call in calls])

    async def _reset_route(self, request: Request) -> Response:
        return await self._changed(request, self.reset)

    async def _control_route(self, request: Request) -> Response:
        return await self._changed(request, self.control)

    async def _changed(self, request: Request, change: Callable[..., None]) -> Response:
        try:
            change(**json.loads(await request.body() or b"{}"))
        except (TypeError, ValueError) as error:
            return _openai_error(400, str(error))
        return JSONResponse({"faults": asdict(self.faults)})


class _Job(NamedTuple):
    """One completion to stream. `logprobs`: how many logprobs it has."""

    body: dict[str, Any]
    call: Call
    token_ids: list[int]
    begun: int
    reason: str
    usage: dict[str, Any]
    logprobs: int
    fault: str | None
    prefill: list[int] | None = None
    """The prompt, if the stream must wait for its prefill."""


def _part(
    ids: Sequence[int], logprobs: Sequence[float], reason: str | None, labels: list[str] | None
) -> dict[str, Any]:
    content = [
        {"token_id": token_id, "logprob": value, "rank": 1, "top_logprobs": []}
        for token_id, value in zip(ids, logprobs, strict=False)
    ]
    spans: list[dict[str, Any]] | None = None
    if labels is not None:
        spans, start = [], 0
        for version, run in itertools.groupby(labels):
            end = start + len(list(run))
            spans.append({"version": version, "start": start, "end": end})
            start = end
    return {
        "index": 0,
        "token_ids": list(ids),
        "logprobs": {"content": content},
        "finish_reason": reason,
        "stop_reason": None,
        "weight_versions": spans,
    }


def _is_probe(request: Request) -> bool:
    return request.headers.get("x-session-id") == PROBE_SESSION


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(str(b.get("text") or b.get("content") or "") for b in content)
    return {"role": message["role"], "content": content}


def _openai_error(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status)


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _sse(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _run(options: argparse.Namespace) -> None:
    scripts = json.loads(options.scripts.read_text("utf-8")) if options.scripts else None
    engine = ScriptedEngine(
        scripts,
        host=options.host,
        port=options.port,
        tokenizer=options.tokenizer,
        policy_version=options.policy_version,
        latency_s=options.latency,
        chunk_delay_s=options.chunk_delay,
        generation=options.generation,
        cache=CacheModel(options.kv_tokens, options.block),
        experts=Experts(*options.experts) if options.experts else None,
    )
    async with engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()  # until it is killed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perdure.testing.scripted_engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 = any; the URL is printed")
    parser.add_argument("--scripts", type=Path, help="JSON: {scripts: [{match, turns}], default}")
    parser.add_argument("--tokenizer", default="qwen3", help="as PERDURE_ENGINE__TOKENIZER")
    parser.add_argument("--policy-version", type=int, default=1)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds per completion")
    parser.add_argument("--chunk-delay", type=float, default=0.0, help="seconds per 8 tokens")
    parser.add_argument("--generation", type=int, help="also serve policy-g<N>")
    parser.add_argument("--kv-tokens", type=int, default=1 << 20, help="size of the modeled cache")
    parser.add_argument("--block", type=int, default=128, help="tokens per cache block")
    shape = ("LAYERS", "TOP_K", "TOTAL")
    parser.add_argument(
        "--experts", type=int, nargs=3, metavar=shape, help="of a mixture of experts"
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
