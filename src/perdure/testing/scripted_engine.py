"""An inference server without a model: vLLM's wire, a real tokenizer, answers from a script.

Its policy is a JSON file, so it can truly solve a task; its ids are real, its logprobs made up but
exact and repeatable. It fails on command in every way a real engine was seen to fail. It also
answers `/v1/chat/completions` and `/v1/messages`, as a double of hosted APIs.

    python -m perdure.testing.scripted_engine --port 8100 --scripts policy.json
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import sys
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.gateway.base import Answer, Refused
from perdure.gateway.dialects import openai_chat
from perdure.gateway.server import NO_GRACE, Server, make_server
from perdure.gateway.tokenizers import Tokenizer, load_tokenizer

KEPT_CALLS = 512
CHUNK = 8
"""Tokens of one chunk of a stream."""
DEFAULT_TURNS: tuple[dict[str, Any], ...] = ({"content": "Nothing to do."},)
FAULTS = (
    "status",  # answers `status`, without work
    "hang",  # takes the request and never answers; /health stays 200
    "reset_before",  # drops the connection without work
    "reset_after",  # samples, then drops the connection
    "done_without_finish",  # a stream that ends with [DONE] but without finish_reason
    "eof_mid_stream",  # a stream that just ends
    "short_logprobs",  # one logprob too few
)


def logprob(token_id: int, position: int) -> float:
    """The made-up logprob of a token at a position of its completion: exact, and never 0."""
    return -((token_id * 31 + position * 17) % 4093 + 1) / 4096


@dataclass(frozen=True)
class Faults:
    """What goes wrong: `kind` on every `every`-th generate call, at most `times` times."""

    kind: str | None = None
    every: int = 1
    times: int | None = None
    status: int = 503

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in FAULTS:
            raise ValueError(f"unknown fault {self.kind!r}: use one of {', '.join(FAULTS)}")


@dataclass(frozen=True)
class Call:
    """One sampled completion, as the engine saw it."""

    session_id: str
    request_id: str
    prompt_ids: "array[int]"
    completion_ids: "array[int]"
    logprobs: "array[float]"
    sampling: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        arrays = ("prompt_ids", "completion_ids", "logprobs")
        return {**vars(self), **{name: list(getattr(self, name)) for name in arrays}}


@dataclass
class Stats:
    """What `/stats` answers."""

    calls: int = 0
    """Completions sampled by /inference/v1/generate."""
    chat_calls: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    calls_by_session: Counter[str] = field(default_factory=Counter)


class Scripts:
    """The policy: which script a conversation follows, and its next turn."""

    def __init__(self, scripts: Mapping[str, Any]) -> None:
        """Raises: ValueError naming what is wrong with the script."""
        self._scripts = [(_text(s, "match"), _turns(s)) for s in scripts.get("scripts", ())]
        self._default = _turns(scripts.get("default", {"turns": list(DEFAULT_TURNS)}))

    def turn(self, text: str, index: int) -> dict[str, Any]:
        """The `index`-th turn of the first script whose text occurs; the last one repeats."""
        turns = next((turns for match, turns in self._scripts if match in text), self._default)
        return turns[min(index, len(turns) - 1)]


def _text(script: Mapping[str, Any], name: str) -> str:
    if not isinstance(script.get(name), str) or not script[name]:
        raise ValueError(f"a script needs {name!r}, a non-empty string")
    return str(script[name])


def _turns(script: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = script.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError("a script needs 'turns', a non-empty list")
    return turns


class Policy:
    """Scripts on token ids: reads of a prompt only what it must, and remembers what it read."""

    def __init__(self, tokenizer: Tokenizer, scripts: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.scripts = Scripts(scripts)
        self._start, self._end = (
            tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")
        )
        self._assistant = tokenizer.encode_plain("assistant")[0]
        self._openings: dict[bytes, str] = {}
        self._completions: dict[int, list[int]] = {}

    def complete(self, prompt_ids: list[int]) -> list[int]:
        """The whole completion after a prompt. Shape [C]."""
        turns, opening = 0, len(prompt_ids)
        position = -1
        with contextlib.suppress(ValueError, IndexError):
            while True:
                position = prompt_ids.index(self._start, position + 1)
                if prompt_ids[position + 1] == self._assistant:
                    opening = min(opening, position)
                    turns += 1
        turn = self.scripts.turn(self._opening(prompt_ids[:opening]), max(turns - 1, 0))
        if id(turn) not in self._completions:
            self._completions[id(turn)] = self.tokens(turn)
        return self._completions[id(turn)]

    def _opening(self, token_ids: list[int]) -> str:
        """The text before the first answer, the same in all turns and samples of an instance."""
        key = array("i", token_ids).tobytes()
        if key not in self._openings:
            if len(self._openings) >= KEPT_CALLS:
                self._openings.clear()
            self._openings[key] = self._tokenizer.decode(token_ids)
        return self._openings[key]

    def tokens(self, turn: Mapping[str, Any]) -> list[int]:
        """A scripted turn as Qwen3 would sample it, closing token included."""
        if "raw" in turn:
            return [*self._encode_raw(turn["raw"]), self._end]
        parts = []
        if turn.get("reasoning"):
            parts.append(f"<think>\n{turn['reasoning']}\n</think>\n\n")
        parts.append(turn.get("content", ""))
        for call in turn.get("tool_calls", ()):
            body = json.dumps({"name": call["name"], "arguments": call["arguments"]})
            parts.append(f"{chr(10) if parts[-1] else ''}<tool_call>\n{body}\n</tool_call>")
        return [*self._encode_raw("".join(parts)), self._end]

    def _encode_raw(self, text: str) -> list[int]:
        """Scripts are ours, so here control tokens are read as such."""
        ids: list[int] = []
        while text:
            markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
            found = [(at, marker) for marker in markers if (at := text.find(marker)) != -1]
            at, marker = min(found, default=(len(text), ""))
            ids += self._tokenizer.encode_plain(text[:at])
            if marker:
                ids.append(self._tokenizer.convert_tokens_to_ids(marker))
            text = text[at + len(marker) :]
        return ids


_TRANSPORTS: dict[tuple[str, int], asyncio.Transport] = {}


class _Protocol(H11Protocol):
    """uvicorn's protocol, whose connection can be cut."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client:
            _TRANSPORTS[self.client] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.client:
            _TRANSPORTS.pop(self.client, None)


def _cut(request: Request) -> None:
    if request.client is not None:
        _TRANSPORTS[request.client].abort()


class ScriptedEngine:
    """A scripted engine on a loopback port, in this process's event loop.

    Example:
        async with ScriptedEngine({"default": {"turns": [{"content": "Done."}]}}) as engine:
            settings = Settings(engine_url=engine.url, engine_kind="vllm")
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
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer)
        self.policy = Policy(self._tokenizer, scripts or {})
        self.policy_version = policy_version
        self.latency_s = latency_s
        self.faults = Faults()
        self.calls: deque[Call] = deque(maxlen=KEPT_CALLS)
        """The newest completions, oldest first."""
        self._address = (host, port)
        self._max_model_len = max_model_len
        self._stats = Stats()
        self._counter = itertools.count(1)
        self._released = asyncio.Event()
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def __aenter__(self) -> "ScriptedEngine":
        listener = socket.create_server(self._address, backlog=1024)
        host, port = listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._server = make_server(self.app(), http=_Protocol, timeout_graceful_shutdown=NO_GRACE)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._serving is not None
        self._released.set()
        self._server.stop()
        await self._serving

    async def serve_forever(self) -> None:
        assert self._serving is not None
        await self._serving

    def stats(self) -> Stats:
        return self._stats

    def reset(self) -> None:
        """Forget calls, counts and faults; whatever hangs is let go."""
        self._stats = Stats(in_flight=self._stats.in_flight)
        self._counter = itertools.count(1)
        self.calls.clear()
        self.faults = Faults()
        self._released.set()
        self._released = asyncio.Event()

    def control(self, **changes: Any) -> None:
        """Change `policy_version`, `latency_s`, `scripts`, or the fields of `Faults`.

        Raises: TypeError, ValueError naming what is wrong; then nothing was changed.
        """
        faults = {n: changes.pop(n) for n in list(changes) if n in Faults.__dataclass_fields__}
        new_faults = replace(self.faults, **faults)
        if "scripts" in changes:
            self.policy = Policy(self._tokenizer, changes.pop("scripts"))
        for name, value in changes.items():
            if name not in ("policy_version", "latency_s"):
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
        with self._working():
            fault = self._fault()
            if fault == "status":
                return _openai_error(self.faults.status, "a fault on command")
            if fault == "hang":
                await self._released.wait()
            if fault == "reset_before":
                return self._drop(request)
            await asyncio.sleep(self.latency_s)
            return self._sampled(request, body, prompt_ids, fault)

    def _sampled(
        self, request: Request, body: dict[str, Any], prompt_ids: list[int], fault: str | None
    ) -> Response:
        sampling = body.get("sampling_params") or {}
        room = self._max_model_len - len(prompt_ids)
        if room <= 0:
            return _openai_error(
                400,
                f"The decoder prompt (length {len(prompt_ids)}) is longer than the maximum model "
                f"length of {self._max_model_len}.",
            )
        whole = self.policy.complete(prompt_ids)
        token_ids = whole[: min(sampling.get("max_tokens") or room, room)]
        reason = "stop" if len(token_ids) == len(whole) else "length"
        call = self._record(request, body, prompt_ids, token_ids)
        if fault == "reset_after":
            return self._drop(request)
        logprobs = call.logprobs[:-1] if fault == "short_logprobs" else call.logprobs
        choice = self._choice(token_ids, logprobs, reason)
        if body.get("stream") or fault in ("done_without_finish", "eof_mid_stream"):
            events = self._stream(request, body, choice, len(prompt_ids), fault)
            return StreamingResponse(events, media_type="text/event-stream")
        answer = self._head(request, body)
        usage = _usage(len(prompt_ids), len(token_ids))
        content = json.dumps({**answer, "choices": [choice], "usage": usage})
        return Response(content, media_type="application/json")

    def _record(
        self, request: Request, body: dict[str, Any], prompt_ids: list[int], token_ids: list[int]
    ) -> Call:
        call = Call(
            session_id=request.headers.get("x-session-id", ""),
            request_id=request.headers.get("x-request-id") or body.get("request_id") or "",
            prompt_ids=array("i", prompt_ids),
            completion_ids=array("i", token_ids),
            logprobs=array("d", (logprob(t, i) for i, t in enumerate(token_ids))),
            sampling=body.get("sampling_params") or {},
        )
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

    def _choice(
        self, token_ids: Sequence[int], logprobs: Sequence[float], reason: str | None
    ) -> dict[str, Any]:
        content = [
            {"token_id": token_id, "logprob": value, "rank": 1, "top_logprobs": []}
            for token_id, value in zip(token_ids, logprobs, strict=False)
        ]
        version = "default" if self.policy_version is None else str(self.policy_version)
        return {
            "index": 0,
            "token_ids": list(token_ids),
            "logprobs": {"content": content},
            "finish_reason": reason,
            "stop_reason": None,
            "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}],
        }

    async def _stream(
        self,
        request: Request,
        body: dict[str, Any],
        choice: dict[str, Any],
        prompt_tokens: int,
        fault: str | None,
    ) -> AsyncIterator[bytes]:
        """Versions and finish reason only on the last chunk, as vLLM sends them."""
        head, length = self._head(request, body), len(choice["token_ids"])
        for start in range(0, length, CHUNK):
            last = start + CHUNK >= length
            if last and fault == "eof_mid_stream":
                _cut(request)
                return
            part = {
                **choice,
                "token_ids": choice["token_ids"][start : start + CHUNK],
                "logprobs": {"content": choice["logprobs"]["content"][start : start + CHUNK]},
            }
            if not last or fault == "done_without_finish":
                part.update(finish_reason=None, weight_versions=None)
            yield _sse({**head, "choices": [part]})
        if fault == "done_without_finish":
            yield _sse({"error": {"message": "EngineDeadError", "code": 500}})
        elif (body.get("stream_options") or {}).get("include_usage"):
            yield _sse({**head, "choices": [], "usage": _usage(prompt_tokens, length)})
        yield b"data: [DONE]\n\n"

    def _fault(self) -> str | None:
        faults = self.faults
        if faults.kind is None or next(self._counter) % faults.every:
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

    # --- hosted APIs ---------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        raw = await request.body()
        try:
            parsed = openai_chat.parse(raw)
        except Refused as refused:
            return Response(openai_chat.error(refused), refused.status)
        with self._working():
            if self._fault() == "status":
                return _openai_error(self.faults.status, "a fault on command")
            await asyncio.sleep(self.latency_s)
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
        """Anthropic's Messages, not streamed: text and tool use."""
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
        tokens = self._tokenizer.encode_plain(str(body.get("prompt", "")))
        return JSONResponse(
            {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens}
        )

    async def _models(self, request: Request) -> Response:
        card = {"id": "policy", "object": "model", "max_model_len": self._max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _metrics(self, request: Request) -> Response:
        stats = self._stats
        return PlainTextResponse(
            f"vllm:num_requests_running {stats.in_flight}\n"
            f"vllm:generation_tokens_total {stats.sampled_tokens}\n"
        )

    async def _stats_route(self, request: Request) -> Response:
        sessions = len(self._stats.calls_by_session)
        return JSONResponse({**asdict(self._stats), "sessions": sessions})

    async def _calls_route(self, request: Request) -> Response:
        wanted = request.query_params.get("session")
        calls = [call for call in self.calls if wanted in (None, call.session_id)]
        return JSONResponse([call.as_json() for call in calls])

    async def _reset_route(self, request: Request) -> Response:
        self.reset()
        return JSONResponse({})

    async def _control_route(self, request: Request) -> Response:
        try:
            self.control(**await request.json())
        except (TypeError, ValueError) as error:
            return _openai_error(400, str(error))
        return JSONResponse({"faults": asdict(self.faults)})


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(str(b.get("text") or b.get("content") or "") for b in content)
    return {"role": message["role"], "content": content}


def _openai_error(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status)


def _usage(prompt: int, completion: int) -> dict[str, int]:
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
    )
    async with engine:
        print(engine.url, flush=True)
        await engine.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perdure.testing.scripted_engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 = any; the URL is printed")
    parser.add_argument("--scripts", type=Path, help="JSON: {scripts: [{match, turns}], default}")
    parser.add_argument("--tokenizer", default="qwen3", help="as PERDURE_TOKENIZER")
    parser.add_argument("--policy-version", type=int, default=1)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of each completion")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
