"""A function that is served as an engine, read by the gateway's own clients."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import httpx
import numpy
import pytest
import pytest_asyncio

from perdure.dialects.base import Refused
from perdure.engines import function_engine
from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.token_endpoint import BreakKind, EngineRequest, StreamBroken
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.function_engine import Ask, Sampled, ServedFunction
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import ExpertRows, FinishReason, VersionSpan


async def _at_once() -> None:
    pass


class Generator:
    """Stands in for a trainer's generator: counts up from the prompt's last token."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.lost = False
        self.logprobs = (-0.25, -0.5)
        self.reason = FinishReason.STOP
        self.newest: int | None = None
        self.error: Exception | None = None
        self.wait: Callable[[], Awaitable[object]] = _at_once
        self.experts: ExpertRows | None = None

    async def __call__(self, ask: Ask) -> Sampled:
        self.asked.append(ask)
        await self.wait()
        if self.lost:
            raise self.error or RuntimeError("out of memory")
        after = ask.prompt_ids[-1]
        ids = (after + 1, after + 2)
        return Sampled(ids, self.logprobs, self.reason, 7, self.newest, self.experts)


@pytest.fixture
def generator() -> Generator:
    return Generator()


@pytest_asyncio.fixture
async def engine(generator: Generator) -> AsyncIterator[ServedFunction]:
    accepts = frozenset({"temperature", "max_tokens"})
    async with ServedFunction(generator, accepts=accepts) as served:
        yield served


async def sampled(engine: ServedFunction, **sampling: object) -> tuple[Salvage, FinishReason]:
    salvage = Salvage()
    async with aclosing(Connections()) as connections:
        vllm = VllmEngine("vllm e", engine.url, connections)
        ask = EngineRequest("policy", [4, 5], dict(sampling), "session", "request")
        reason = await vllm.sample(ask, salvage, lambda: None)
    return salvage, reason


async def test_ids_logprobs_and_version_arrive(
    engine: ServedFunction, generator: Generator
) -> None:
    """They arrive exactly as the function returned them; the function gets the session and the
    sampling."""
    salvage, reason = await sampled(engine, temperature=0.8, max_tokens=9)

    assert (list(salvage.ids), list(salvage.logprobs)) == ([6, 7], [-0.25, -0.5])
    assert list(salvage.versions) == [VersionSpan(version=7, start=0, end=2)]
    assert reason is FinishReason.STOP
    assert generator.asked == [
        Ask([4, 5], {"temperature": 0.8, "max_tokens": 9}, "session", "request")
    ]


async def test_its_experts_arrive_from_the_position_asked_for(
    engine: ServedFunction, generator: Generator
) -> None:
    """The function returns the experts of all tokens that it read. A gateway that has the first
    rows requests only the others."""
    generator.experts = numpy.arange(3 * 2 * 2).reshape(3, 2, 2)
    salvage = Salvage(prompt_rows=0)
    async with aclosing(Connections()) as connections:
        vllm = VllmEngine("vllm e", engine.url, connections)
        ask = EngineRequest("policy", [4, 5], {}, "session", "request", routed_from=1)
        await vllm.sample(ask, salvage, lambda: None)

    assert salvage.experts is not None
    assert salvage.experts.tolist() == generator.experts[1:].tolist()


async def test_a_parameter_that_the_function_does_not_accept_is_refused(
    engine: ServedFunction, generator: Generator
) -> None:
    """It is refused by name before anything is sampled; otherwise it would be dropped silently."""
    with pytest.raises(Refused, match="does not accept top_k"):
        await sampled(engine, temperature=0.8, top_k=5)
    assert generator.asked == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"lost": True}, BreakKind.LOST),
        ({"logprobs": (-0.25,)}, BreakKind.LOST),
        ({"reason": FinishReason.ABORT}, BreakKind.ABORTED),
    ],
)
async def test_a_failure_is_a_broken_stream(
    engine: ServedFunction, generator: Generator, change: dict[str, object], kind: BreakKind
) -> None:
    """So the gateway samples the turn again, as after any engine's failure."""
    vars(generator).update(change)
    with pytest.raises(StreamBroken) as caught:
        await sampled(engine)

    assert caught.value.kind is kind


async def test_weights_that_change_within_a_call_are_reported(
    engine: ServedFunction, generator: Generator
) -> None:
    """Only the last token certainly comes from the new weights."""
    generator.newest = 8
    salvage, _ = await sampled(engine)

    assert [(one.version, one.start, one.end) for one in salvage.versions] == [(7, 0, 1), (8, 1, 2)]


class Rejected(Exception):
    """An error of a trainer's HTTP client."""

    status = 400


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("the model's maximum context length (64)"), "context_length_exceeded"),
        (ValueError("Ray's traceback\n  max_model_len\nthe prompt is too long"), "context_length"),
        (Rejected("`temperature` must be positive"), "engine_refused"),
    ],
)
async def test_what_the_trainer_refuses_is_no_failure_of_the_engine(
    engine: ServedFunction, generator: Generator, error: Exception, code: str
) -> None:
    """A prompt beyond the context ends the agent, and is not sent again and again."""
    generator.lost, generator.error = True, error
    with pytest.raises(Refused) as caught:
        await sampled(engine)

    assert caught.value.code.startswith(code)


async def test_a_traceback_is_not_searched(engine: ServedFunction, generator: Generator) -> None:
    """Ray's errors begin with one, and its lines of code name all kinds of limits."""
    generator.lost = True
    generator.error = RuntimeError("  n = self.max_model_len - len(ids)\nValueError: no server")
    with pytest.raises(StreamBroken) as caught:
        await sampled(engine)

    assert (caught.value.kind, "no server" in str(caught.value)) == (BreakKind.LOST, True)


async def test_a_long_call_is_not_silent(
    engine: ServedFunction, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway gives up a connection without a byte, for example while a trainer syncs weights."""
    monkeypatch.setattr(function_engine, "PING_S", 0.01)
    go_on, body = asyncio.Event(), {"token_ids": [4, 5], "stream": True}
    generator.wait = go_on.wait
    url = f"{engine.url}/inference/v1/generate"
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as answer:
        lines = answer.aiter_lines()
        first = await anext(lines)
        go_on.set()
        rest = [line async for line in lines if line.startswith("data: {")]

    assert (first, len(rest)) == (": ping", 1)


async def test_a_caller_that_leaves_ends_its_call(
    engine: ServedFunction, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped agent's call does not occupy the trainer's engines until its last token."""
    monkeypatch.setattr(function_engine, "PING_S", 0.01)
    ended, body = asyncio.Event(), {"token_ids": [4, 5], "stream": True}

    async def sampling() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    generator.wait = sampling
    url = f"{engine.url}/inference/v1/generate"
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as answer:
        assert await anext(answer.aiter_lines()) == ": ping"

    await ended.wait()


async def test_a_gateway_can_probe_it(engine: ServedFunction) -> None:
    """The probe gets one token, and the start time and the version are known."""
    async with httpx.AsyncClient() as client:
        control = EngineControl(engine.url, client)
        await control.round_trip("policy")
        vitals = await control.vitals()

        assert (await control.served("policy", vitals)).start_id == vitals.started != ""
        assert await control.version() == 7
        assert await control.is_paused() is None


async def test_it_never_counts_as_hung_while_it_samples(engine: ServedFunction) -> None:
    """A whole completion shows no progress until it ends; if the gateway gave up, it would start
    over."""
    engine._running = 1
    async with httpx.AsyncClient() as client:
        control = EngineControl(engine.url, client)
        steps = [(await control.vitals()).steps for _ in range(3)]

    assert steps == [1.0, 2.0, 3.0]
