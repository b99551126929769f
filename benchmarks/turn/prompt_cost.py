"""Measures the prompt alone, bridged and rendered in full: no HTTP, no JSON, no journal.

Both run in this process, with the same tokenizer, on the same conversation.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.turn.turn_agent import Agent
from perdure.dialects import anthropic
from perdure.dialects.base import ModelRequest
from perdure.engines.base import Completion, Engine
from perdure.engines.pool.completion_call import GenerateCall
from perdure.gateway.base import SessionSpec
from perdure.gateway.gateway_metrics import Metrics
from perdure.gateway.rendering.message_format import load_format
from perdure.gateway.session_manager import Sessions
from perdure.gateway.session_model import ModelLoader, SessionModel
from perdure.gateway.turns.turn_maker import PendingTurn
from perdure.storage.local_store import LocalStore
from perdure.types import FinishReason, Sampling

Costs = dict[int, float]


class Instant:
    """An engine in this process that always answers the same."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.prompt_tokens = 0

    async def generate(self, call: GenerateCall) -> Completion:
        self.prompt_tokens = len(call.prompt_ids)
        return Completion(self.ids, [-0.5] * len(self.ids), FinishReason.STOP, (), "instant")

    async def current(self) -> Engine:
        return Engine("instant", tokens=self)

    async def choose(self, name: str, run: str) -> None:
        """There is one model."""


async def measure(answer_ids: list[int], sizes: Sequence[int], turns: int) -> tuple[Costs, Costs]:
    """Median CPU ms of a bridged and of a fully rendered prompt, at each size."""
    model_format = load_format("qwen3")
    engine: Any = Instant(answer_ids)
    bridged: Costs = {}
    rendered: Costs = {}
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        store = LocalStore(Path(folder))
        models = ModelLoader(SessionModel("policy", model_format, engine.current), engine)
        sessions = Sessions(models, store, Metrics(), secret=b"k")
        rules = Sampling(max_context_tokens=1 << 20)
        await sessions.open(SessionSpec(session_id="s", turns_key="t.parquet", sampling=rules))
        spent = _timed_prompts(sessions)
        agent = Agent(httpx.AsyncClient(), "")
        for size in sizes:
            while engine.prompt_tokens < size:
                await _turn(sessions, agent)
            spent.clear()
            full = []
            for _ in range(turns):
                request = await _turn(sessions, agent, short=True)
                full.append(_render(model_format, request))
            bridged[size], rendered[size] = statistics.median(spent), statistics.median(full)
    return bridged, rendered


def _timed_prompts(sessions: Sessions) -> list[float]:
    """CPU ms to find the turn that each request continues, and to build its prompt."""
    spent: list[float] = []
    maker = sessions._maker
    build = maker._prompt

    async def timed(pending: PendingTurn) -> Any:
        started = time.process_time()
        pending.awake.tree.locate(pending.request)
        found = await build(pending)
        spent.append((time.process_time() - started) * 1e3)
        return found

    maker._prompt = timed  # type: ignore[method-assign]  # measured from outside
    return spent


async def _turn(sessions: Sessions, agent: Agent, *, short: bool = False) -> ModelRequest:
    call = anthropic.parse(agent.body(), {})
    answer = await sessions.complete("s", call.request)
    agent.heard(json.loads(call.whole(answer))["content"], short=short)
    return call.request


def _render(model_format: Any, request: ModelRequest) -> float:
    """Empty the tokenizer's text cache: with many rollouts it would hold no history."""
    model_format.tokenizer._cached.cache_clear()
    started = time.process_time()
    model_format.renderer.render_ids(
        request.messages, tools=request.tools, add_generation_prompt=True
    )
    return (time.process_time() - started) * 1e3
