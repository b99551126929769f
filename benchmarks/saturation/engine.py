"""An engine in virtual time: vLLM's scheduler with modelled step times, behind the routes a gateway calls.

It has continuous batching with chunked prefill, and a KV cache whose idle part is a prefix cache
(LRU). It admits a request only if the whole prompt fits, and preempts the newest by recomputation.
Tokens are counted, not sampled: one id on the wire represents GRAIN tokens.
"""

import asyncio
import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import httpx

from benchmarks.saturation.law import Law
from perdure.engines.clients.vllm_control import PROBE_SESSION

GRAIN = 16
BUDGET = 8192
"""Tokens of one step, prefill included (`--max-num-batched-tokens`)."""
MOST_SEQUENCES = 256
STRIDE = 16
"""Decode steps simulated at once while no prompt waits, because they would all be the same."""


@dataclass(eq=False)
class Work:
    """A request. Lengths in tokens."""

    session: str
    prompt: int
    output: int
    held: int = 0
    """Tokens of the KV cache."""
    made: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def missing(self) -> int:
        """Tokens to prefill before it decodes; after a preemption also those it had sampled."""
        return max(0, self.prompt + self.made - self.held)


@dataclass
class Counters:
    """The counters of /metrics and of the benchmark."""

    busy_s: float = 0.0
    steps: int = 0
    sampled: int = 0
    prefilled: int = 0
    queries: int = 0
    hits: int = 0
    preemptions: int = 0

    def since(self, before: "Counters") -> "Counters":
        return Counters(**{n: value - vars(before)[n] for n, value in vars(self).items()})


class ModelledEngine:
    """One engine. `run` is its scheduler loop."""

    def __init__(self, law: Law, kv_tokens: int) -> None:
        self.law, self.kv_tokens = law, kv_tokens
        self.counters = Counters()
        self._running: list[Work] = []
        self._waiting: deque[Work] = deque()
        self._idle: OrderedDict[str, int] = OrderedDict()
        """Cached tokens of each session without a running request."""
        self._used = 0
        self._kept = 0
        self._wake = asyncio.Event()

    async def complete(self, session: str, prompt: int, output: int) -> None:
        work = Work(session, prompt, output)
        self._waiting.append(work)
        self._wake.set()
        await work.ended.wait()

    async def run(self) -> None:
        while True:
            if not (self._running or self._waiting):
                self._wake.clear()
                await self._wake.wait()
            seconds = self._step()
            self.counters.busy_s += seconds
            await asyncio.sleep(seconds)
            self._finish()

    def _step(self) -> float:
        decoding = [work for work in self._running if not work.missing]
        steps = self._stride(decoding)
        preempted = self._decode(decoding, steps)
        decoding = [work for work in decoding if work in self._running]
        room = BUDGET - len(decoding)
        prompt, pairs = self._prefill_running(room)
        if not preempted:
            more, more_pairs = self._admit(room - prompt)
            prompt, pairs = prompt + more, pairs + more_pairs
        self.counters.steps += steps
        self.counters.sampled += steps * len(decoding)
        self.counters.prefilled += prompt
        context = sum(work.held for work in decoding)
        once = self.law.step(sequences=len(decoding), context=context, prompt=prompt, pairs=pairs)
        return once * steps

    def _stride(self, decoding: list[Work]) -> int:
        if self._waiting or len(decoding) < len(self._running) or not decoding:
            return 1
        return max(1, min(STRIDE, *(work.output - work.made for work in decoding)))

    def _decode(self, decoding: list[Work], steps: int) -> bool:
        """Make room for the next tokens of each request; if there is none, preempt the newest ones."""
        preempted = False
        for work in decoding:
            while work in self._running and not self._take(work, steps):
                self._preempt(self._running[-1])
                preempted = True
            if work in self._running:
                work.made += steps
        return preempted

    def _prefill_running(self, room: int) -> tuple[int, float]:
        """Continue prompts that are partly prefilled."""
        read, pairs = 0, 0.0
        for work in self._running:
            part = min(work.missing, room - read)
            if part > 0 and self._take(work, part):
                pairs += part * (work.held - part / 2)
                read += part
        return read, pairs

    def _admit(self, room: int) -> tuple[int, float]:
        """Admit waiting requests in order while whole prompts fit."""
        read, pairs = 0, 0.0
        while self._waiting and read < room and len(self._running) < MOST_SEQUENCES:
            work = self._waiting[0]
            whole = work.prompt + work.made
            if self._used + whole > self.kv_tokens:
                break
            self._waiting.popleft()
            self._running.append(work)
            # The last token of a prompt is always computed, because its logits are sampled from.
            kept = self._idle.pop(work.session, 0)
            self._kept -= kept
            work.held = cached = min(kept, whole - 1)
            self._used += cached
            self.counters.queries += whole
            self.counters.hits += cached
            part = min(work.missing, room - read)
            self._take(work, part)
            pairs += part * (work.held - part / 2)
            read += part
        return read, pairs

    def _take(self, work: Work, tokens: int) -> bool:
        if self._used + tokens > self.kv_tokens:
            return False
        self._used += tokens
        work.held += tokens
        while self._used + self._kept > self.kv_tokens:
            self._overwrite(self._used + self._kept - self.kv_tokens)
        return True

    def _overwrite(self, tokens: int) -> None:
        """Evict from the end of the least recently used session."""
        session, kept = next(iter(self._idle.items()))
        gone = min(tokens, kept)
        self._kept -= gone
        if kept > gone:
            self._idle[session] = kept - gone
        else:
            del self._idle[session]

    def _let_go(self, work: Work) -> None:
        self._running.remove(work)
        self._used -= work.held
        self._idle[work.session] = work.held
        self._idle.move_to_end(work.session)
        self._kept += work.held

    def _preempt(self, work: Work) -> None:
        self._let_go(work)
        work.held = 0
        self._waiting.appendleft(work)
        self.counters.preemptions += 1

    def _finish(self) -> None:
        for work in [work for work in self._running if work.made >= work.output]:
            self._let_go(work)
            work.ended.set()

    def metrics(self) -> str:
        counters = self.counters
        values = {
            "process_start_time_seconds": 1.0,
            "vllm:num_requests_running": len(self._running),
            "vllm:num_requests_waiting": len(self._waiting),
            'vllm:num_requests_waiting_by_reason{reason="capacity"}': len(self._waiting),
            "vllm:iteration_tokens_total_count": counters.steps,
            "vllm:generation_tokens_total": counters.sampled,
            "vllm:num_preemptions_total": counters.preemptions,
            "vllm:kv_cache_usage_perc": self._used / self.kv_tokens,
            f'vllm:cache_config_info{{kv_cache_size_tokens="{self.kv_tokens // GRAIN}"}}': 1,
            "vllm:prefix_cache_queries_total": counters.queries // GRAIN,
            "vllm:prefix_cache_hits_total": counters.hits // GRAIN,
        }
        return "".join(f"{name} {value}\n" for name, value in values.items())


class Wire(httpx.AsyncBaseTransport):
    """The engine's routes without a socket."""

    def __init__(self, engine: ModelledEngine) -> None:
        self._engine = engine

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/inference/v1/generate":
                return await self._generate(request)
            case "/metrics":
                return httpx.Response(200, text=self._engine.metrics())
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "policy"}]})
            case "/is_paused":
                return httpx.Response(200, json={"is_paused": False})
            case "/weight_info":
                return httpx.Response(200, json={"weight_version": "1"})
            case _:
                return httpx.Response(404)

    async def _generate(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        length = body["sampling_params"]["max_tokens"]
        session = request.headers["x-session-id"]
        if session != PROBE_SESSION:
            prompt = len(body["token_ids"]) * GRAIN
            await self._engine.complete(session, prompt, length * GRAIN)
        choice = {
            "token_ids": [1] * length,
            "logprobs": {"content": [{"token_id": 1, "logprob": 0.0}] * length},
            "finish_reason": "length",
            "weight_versions": [{"version": "1", "start": 0, "end": length}],
        }
        answer = {"model": body["model"], "choices": [choice]}
        if not body.get("stream"):
            return httpx.Response(200, json=answer)
        return httpx.Response(200, content=b"data: " + json.dumps(answer).encode() + b"\n\n")
