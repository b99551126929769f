"""Serves an async sampling function as an engine, so that a gateway can use a trainer's own generator.

Implements the routes of vLLM that gateways use. The function returns whole completions, so a stream
has one part. Pings keep it open until then.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from perdure.engines.clients.engine_errors import CONTENT_STATUSES, TOO_LONG
from perdure.engines.clients.token_endpoint import PREEMPTIONS, npy_of_experts
from perdure.types import DEFAULT_MODEL, ExpertRows, FinishReason, VersionSpan

if TYPE_CHECKING:
    import tokenizers

ROUTED_FROM = "routed_experts_prompt_start"
PLAIN = frozenset(
    {"logprobs", "skip_special_tokens", "prompt_logprobs", "stream_interval", ROUTED_FROM}
)
"""Parameters of vLLM's requests that do not change what is sampled."""

KEEP_ALIVE_S = 75
"""Longer than a gateway keeps an idle connection, because one that closes during a request looks like a
dead engine."""
PING, PING_S = b": ping\n\n", 60.0
"""Sent while the function samples or waits for new weights, because a gateway gives up a stream
that is silent for too long."""


class Ask(NamedTuple):
    """One request for a completion. `sampling`: vLLM's `sampling_params` without those of `PLAIN`.
    `session_id`: the same for all turns of a rollout's attempt."""

    prompt_ids: list[int]
    sampling: Mapping[str, Any]
    session_id: str
    request_id: str


class Sampled(NamedTuple):
    """One completion. Shapes: token_ids [C], logprobs [C]. After the finish reason `abort`, a
    gateway keeps these tokens and requests the rest. `version`: the policy version that sampled the
    tokens. `newest`: the version that sampled the last token, if the weights changed during the
    call; all earlier tokens then count as sampled by `version`. `routed_experts`: the experts of
    the prompt and of all sampled tokens except the last. Shape [P + C - 1, layers, top_k].
    `kept`: the tokens that top-p and top-k left for each sampled token. `preemptions`: how often the
    trainer's scheduler preempted the call; None if it does not tell."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    version: int | None = None
    newest: int | None = None
    routed_experts: ExpertRows | None = None
    kept: Sequence[Sequence[int]] | None = None
    preemptions: int | None = None

    @property
    def spans(self) -> list[VersionSpan]:
        """Which version sampled which tokens."""
        end = len(self.token_ids)
        last = end if self.newest in (None, self.version) else max(0, end - 1)
        return [
            VersionSpan(version=version, start=start, end=stop)
            for version, start, stop in ((self.version, 0, last), (self.newest, last, end))
            if version is not None and start < stop
        ]


Sample = Callable[[Ask], Coroutine[Any, Any, Sampled]]


class ServedFunction:
    """A server on a port of this host, in this process's event loop.

    Example:
        async def sample(ask: Ask) -> Sampled: ...

        async with ServedFunction(sample, host="10.0.0.3", port=18001) as engine:
            await add_engine(roster, EngineSpec(engine.url), "policy")
    """

    def __init__(
        self,
        sample: Sample,
        *,
        accepts: frozenset[str],
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = DEFAULT_MODEL,
        root: str = "",
    ) -> None:
        """`accepts`: the sampling parameters that `sample` applies. A request with any other gets a 400.
        `root`: the model behind the name `model`, if it is known: a folder, or a name at Hugging Face. If
        its tokenizer can be read on this host, a gateway refuses the engine unless the gateway encodes
        prompts with the same tokenizer; otherwise the tokenizer is not checked."""
        self._sample = sample
        self._accepts = accepts | PLAIN
        self._address = (host, port)
        self._model = model
        self._root = root
        self._started = time.time()
        self._running = 0
        self._steps = 0
        self._tokens = 0
        self._version: int | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def __aenter__(self) -> "ServedFunction":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises: OSError if the port is taken."""
        listener = socket.create_server(self._address, backlog=1024)
        host, port = listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        app = Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/weight_info", self._weight_info),
            ]
        )
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off"}
        bounded: dict[str, Any] = {
            "http": "h11"
        }  # uvicorn prefers httptools, which does not bound the size of heads
        waits: dict[str, Any] = {"timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": 1}
        self._server = _Server(uvicorn.Config(app, **quiet, **bounded, **waits))
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    # --- routes ----------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        ids = body.get("token_ids") if isinstance(body, dict) else None
        if not isinstance(ids, list) or not ids:
            return _error(400, "token_ids: Field required")
        sampling = body.get("sampling_params") or {}
        if unknown := sorted(set(sampling) - self._accepts):
            return _error(400, f"this trainer's generator does not accept {', '.join(unknown)}")
        ask = Ask(
            ids,
            {name: value for name, value in sampling.items() if name not in PLAIN},
            request.headers.get("x-session-id", ""),
            str(body.get("request_id") or ""),
        )
        routed_from = int(sampling.get(ROUTED_FROM) or 0)
        if body.get("stream"):
            events = self._events(ask, routed_from)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            return JSONResponse(self._answer(await self._sampled(ask), routed_from))
        except Exception as error:
            return _error(_status(error), _error_message(error))

    async def _events(self, ask: Ask, routed_from: int) -> AsyncIterator[bytes]:
        work = asyncio.ensure_future(self._sampled(ask))
        try:
            while not (await asyncio.wait([work], timeout=PING_S))[0]:
                yield PING
            yield _event(self._answer(work.result(), routed_from))
        except Exception as error:  # the status is already sent; vLLM, too, reports an event
            yield _event({"error": {"message": _error_message(error), "code": _status(error)}})
        finally:
            work.cancel()
        yield b"data: [DONE]\n\n"

    async def _sampled(self, ask: Ask) -> Sampled:
        self._running += 1
        try:
            found = await self._sample(ask)
        finally:
            self._running -= 1
        if len(found.token_ids) != len(found.logprobs):
            raise ValueError(
                f"{len(found.logprobs)} logprobs for {len(found.token_ids)} sampled tokens"
            )
        self._tokens += len(found.token_ids)
        self._version = found.version if found.newest is None else found.newest
        return found

    def _answer(self, found: Sampled, routed_from: int) -> dict[str, Any]:
        pairs = zip(found.token_ids, found.logprobs, strict=True)
        spans = [
            {"version": str(one.version), "start": one.start, "end": one.end} for one in found.spans
        ]
        choice = {
            "index": 0,
            "token_ids": list(found.token_ids),
            "logprobs": {"content": [{"token_id": one, "logprob": value} for one, value in pairs]},
            "finish_reason": found.finish_reason.value,
            "weight_versions": spans or None,
        }
        if found.kept is not None:
            choice["sampling_mask"] = [list(map(int, one)) for one in found.kept]
        if found.routed_experts is not None:
            choice["routed_experts"] = npy_of_experts(found.routed_experts[routed_from:])
        if found.preemptions is not None:
            choice[PREEMPTIONS] = found.preemptions
        return {"object": "generate", "model": self._model, "choices": [choice]}

    async def _tokenize(self, request: Request) -> Response:
        """Gateways ask only while they prove the engine, so the tokenizer is not kept in memory."""
        body = await request.json()
        tokenizer = await asyncio.to_thread(_tokenizer_of, self._root)
        if tokenizer is None:
            return _error(404, f"no tokenizer of {self._root!r} can be read on this host")
        special = bool(body.get("add_special_tokens", True))
        ids = tokenizer.encode(str(body.get("prompt", "")), add_special_tokens=special).ids
        return JSONResponse({"count": len(ids), "tokens": ids})

    async def _models(self, _: Request) -> Response:
        card = {"id": self._model, "object": "model", "root": self._root or None}
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _metrics(self, _: Request) -> Response:
        """Metrics for health checks. The start time tells starts apart. The step counter moves whenever
        calls run, because a function reports no progress; its trainer must detect a hang."""
        self._steps += self._running > 0
        values = {
            "process_start_time_seconds": self._started,
            "vllm:num_requests_running": self._running,
            "vllm:iteration_tokens_total_count": self._steps,
            "vllm:generation_tokens_total": self._tokens,
        }
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))

    async def _weight_info(self, _: Request) -> Response:
        label = "default" if self._version is None else str(self._version)
        return JSONResponse({"weight_version": label})


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the program around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _tokenizer_of(root: str) -> "tokenizers.Tokenizer | None":
    """The tokenizer of a model's folder, or of a name in Hugging Face's cache of this host. None if there
    is none, or if the packages of this process cannot read it. Downloads nothing."""
    try:
        import huggingface_hub
        import tokenizers

        file: object = Path(root, "tokenizer.json")
        if not root or not Path(root).is_dir():
            file = huggingface_hub.try_to_load_from_cache(root, "tokenizer.json")
        made = tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # `tokenizers` raises no narrower class
        return None
    made.no_truncation()
    return made


def _status(error: Exception) -> int:
    """400 if the trainer's client or server reports that the request is at fault, otherwise 500."""
    status = getattr(error, "status", None)
    return 400 if TOO_LONG.search(_error_message(error)) or status in CONTENT_STATUSES else 500


def _error_message(error: Exception) -> str:
    """The error's type and last line, because Ray's errors begin with a traceback."""
    lines = str(error).split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"{type(error).__name__}: {last}" if last else type(error).__name__


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status)


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
