"""Router replay: the experts that engines return, from their streams to what trainers read."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest

from perdure.engines.base import Completion
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_pool import EnginePool
from perdure.episodes.segment_experts import segment_experts
from perdure.episodes.trajectory_segments import cut
from perdure.episodes.turns_parquet import decode
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import Experts, ScriptedEngine, routed_experts
from perdure.types import ExpertRows, Turn
from tests.doubles.scripted_sglang import ScriptedSglang
from tests.integration.engine_calls import (
    LONG,
    PROMPT,
    SAMPLING,
    ask,
    opened,
    ready,
    sampling,
    until,
)

SHAPE = Experts(layers=3, top_k=2, total=300)
WIDE = Experts(layers=5, top_k=4, total=128)
CHAT = {"default": {"turns": [{"content": f"Answer {n}."} for n in range(4)]}}


def rows(ids: Sequence[int], shape: Experts = SHAPE, **more: int) -> list[Any]:
    """The engine's experts for all of these tokens except the last."""
    found: list[Any] = routed_experts(ids[:-1], shape, **more).tolist()
    return found


async def talk(gateway: LocalGateway, key: str, messages: list[dict[str, Any]], turns: int) -> None:
    """Add as many turns to a conversation."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, headers=headers) as http:
        for _ in range(turns):
            messages.append({"role": "user", "content": f"Go on {len(messages)}."})
            body = {"model": "policy", "messages": messages}
            answer = await http.post("/v1/chat/completions", content=json.dumps(body))
            messages.append(answer.raise_for_status().json()["choices"][0]["message"])


async def recorded(gateway: LocalGateway) -> list[Turn]:
    await gateway.control.close("s")
    return decode((await gateway.store.get(turns_key_of("s"))).data)


def of_only_segment(turns: list[Turn]) -> tuple[list[int], ExpertRows | None]:
    """The tokens of a conversation that is one segment, and their experts."""
    segments = cut(turns)
    (experts,) = segment_experts(turns, segments)
    return [*segments[0].prompt_ids, *segments[0].response_ids], experts


@pytest.mark.parametrize("kind", ["vllm", "sglang", "sglang, whole chunks"])
async def test_a_segment_has_the_experts_of_all_its_tokens(tmp_path: Path, kind: str) -> None:
    """Each turn records only the experts of its new positions, and the rows join without gaps: the
    last token of an answer is read with the next prompt. SGLang sends no shape."""
    async with AsyncExitStack() as opened_:
        engine = await opened_.enter_async_context(ScriptedEngine(CHAT, experts=SHAPE))
        url, name = engine.url, kind.partition(",")[0]
        if name == "sglang":
            double = ScriptedSglang(engine, incremental=name == kind)
            url = (await opened_.enter_async_context(double)).url
        options: Any = {"engine": {"url": url, "kind": name}}
        gateway = await opened_.enter_async_context(LocalGateway(tmp_path, **options))
        await talk(gateway, await gateway.open("s"), [], 4)
        turns = await recorded(gateway)

    ids, experts = of_only_segment(turns)
    assert experts is not None
    assert experts.reshape(-1, SHAPE.layers, SHAPE.top_k).tolist() == rows(ids)
    assert experts.dtype == numpy.int16
    ends = [len(turn.prompt_ids) + len(turn.completion_ids) - 1 for turn in turns]
    known = [turn.routed_experts for turn in turns]
    assert [(one.start, one.end) for one in known if one] == list(
        zip([0, *ends], ends, strict=False)
    )


async def test_a_restarted_gateway_asks_only_for_new_experts(tmp_path: Path) -> None:
    """Recorded experts are in the journal, not in the process."""
    async with ScriptedEngine(CHAT, experts=WIDE) as engine:
        options: Any = {"engine": {"url": engine.url, "kind": "vllm"}}
        messages: list[dict[str, Any]] = []
        async with LocalGateway(tmp_path, **options) as gateway:
            key = await gateway.open("s")
            await talk(gateway, key, messages, 2)
        async with LocalGateway(tmp_path, **options) as gateway:
            await talk(gateway, key, messages, 1)
            turns = await recorded(gateway)
    ids, experts = of_only_segment(turns)

    assert experts is not None
    assert experts.dtype == numpy.uint8
    assert experts.tolist() == rows(ids, WIDE)
    assert turns[2].routed_experts is not None
    assert turns[2].routed_experts.start == len(turns[1].prompt_ids + turns[1].completion_ids) - 1


async def test_a_replayed_turn_keeps_its_experts(tmp_path: Path) -> None:
    """A new attempt samples no recorded turn again, and its segment has the experts of all its tokens."""
    async with ScriptedEngine(CHAT, experts=SHAPE) as engine:
        options: Any = {"engine": {"url": engine.url, "kind": "vllm"}}
        async with LocalGateway(tmp_path, **options) as gateway:
            await talk(gateway, await gateway.open("lost"), [], 2)
            await talk(gateway, await gateway.open("s", replay_of="lost"), [], 3)
            turns = await recorded(gateway)
    ids, experts = of_only_segment(turns)

    assert len(engine.calls) == 3
    assert experts is not None
    assert experts.tolist() == rows(ids)


async def test_an_engine_without_experts_leaves_the_segment_without(tmp_path: Path) -> None:
    """If one turn has no experts, its segment has none, even if the other turns have them."""
    async with ScriptedEngine(CHAT, experts=SHAPE) as engine:
        options: Any = {"engine": {"url": engine.url, "kind": "vllm"}}
        async with LocalGateway(tmp_path, **options) as gateway:
            key, messages = await gateway.open("s"), []  # type: ignore[var-annotated]
            await talk(gateway, key, messages, 1)
            engine.experts = None
            await talk(gateway, key, messages, 1)
            engine.experts = SHAPE
            await talk(gateway, key, messages, 1)
            turns = await recorded(gateway)

    assert [turn.routed_experts is None for turn in turns] == [False, True, False]
    assert turns[2].routed_experts is not None
    assert turns[2].routed_experts.start == 0
    assert of_only_segment(turns)[1] is None


# --- salvage ---------------------------------------------------------------------------------


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


def done(completion: Completion) -> list[int]:
    return [*PROMPT, *completion.token_ids]


async def test_a_lost_engines_experts_come_from_the_next_one(client: httpx.AsyncClient) -> None:
    """A stream that breaks returns no experts. The next engine reads the salvaged tokens again,
    with the same weights, and returns their experts too."""
    async with (
        ScriptedEngine(LONG, experts=SHAPE) as engine,
        opened(client, engine.url) as pool,
    ):
        await ready(pool, 1)
        engine.control(kind="eof_mid_stream", times=1)
        completion = await ask(pool)
    assert completion.routed_experts is not None

    assert len(completion.engines) == 2
    assert completion.routed_experts.array().tolist() == rows(done(completion))


async def updated(pool: EnginePool, engine: ScriptedEngine, abort: Experts | None) -> Completion:
    """A completion whose engine was paused in its middle and got new weights. `abort`: the shape of the
    experts that come with the abort, if any do."""
    engine.experts = abort
    call = ask(pool)
    await sampling(pool, tokens=8)
    async with httpx.AsyncClient(base_url=engine.url) as http:
        await http.post("/pause?mode=abort")
        await until(lambda: pool.resumed)
        engine.experts = SHAPE
        engine.control(chunk_delay_s=0.0, weights=9, policy_version=2)
        await http.post("/resume")
    return await call


async def test_an_aborted_calls_experts_are_kept_over_new_weights(
    client: httpx.AsyncClient,
) -> None:
    """An aborted call still returns its experts, so each token has those of the weights that
    sampled it."""
    async with (
        ScriptedEngine(LONG, experts=SHAPE, chunk_delay_s=0.4) as engine,
        opened(client, engine.url) as pool,
    ):
        await ready(pool, 1)
        completion = await updated(pool, engine, SHAPE)
    experts, ids = completion.routed_experts, done(completion)

    assert experts is not None
    first, second = completion.versions
    at = len(PROMPT) - 1 + second.start  # this row decided the first token of the new weights
    assert (first.version, second.version, first.end) == (1, 2, second.start)
    assert experts.array().tolist() == [*rows(ids)[:at], *rows(ids, weights=9)[at:]]


async def test_experts_lost_before_new_weights_stay_lost(client: httpx.AsyncClient) -> None:
    """The new weights read the salvaged tokens through other experts than those that sampled
    them."""
    async with (
        ScriptedEngine(LONG, experts=SHAPE, chunk_delay_s=0.4) as engine,
        opened(client, engine.url) as pool,
    ):
        await ready(pool, 1)
        completion = await updated(pool, engine, None)

    assert len(completion.versions) == 2
    assert completion.routed_experts is None


async def test_experts_of_other_tokens_are_not_taken(client: httpx.AsyncClient) -> None:
    """An array that does not fit the tokens is ignored, and the tokens stay."""

    class Short(ScriptedEngine):
        def _routed(self, sampling: Any, read: Sequence[int]) -> dict[str, str]:
            return super()._routed(sampling, read[1:])

    async with Short(LONG, experts=SHAPE) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        completion = await ask(pool)

    assert (completion.routed_experts, len(completion.token_ids) > 100) == (None, True)


async def test_known_experts_are_not_asked_for_again(client: httpx.AsyncClient) -> None:
    """Bytes on the wire follow the new tokens, not the history."""
    async with ScriptedEngine(LONG, experts=SHAPE) as engine, opened(client, engine.url) as pool:
        await ready(pool, 1)
        completion = await pool.generate(
            GenerateCall(PROMPT, SAMPLING, "s", "s-0", routed_from=len(PROMPT) - 2)
        )

    assert engine.calls[0].sampling["routed_experts_prompt_start"] == len(PROMPT) - 2
    assert completion.routed_experts is not None
    assert completion.routed_experts.start == len(PROMPT) - 2
    expected = rows(done(completion), start=len(PROMPT) - 2)
    assert completion.routed_experts.array().tolist() == expected
