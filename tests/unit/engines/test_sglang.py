"""SGLang as a token engine: its protocol in front of a scripted engine."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.dialects.base import Refused
from perdure.engines.base import Engine
from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.sglang import SglangEngine, new_tokens, sampling_params
from perdure.engines.clients.sglang_control import SglangControl
from perdure.engines.clients.token_endpoint import BreakKind, EngineRequest, StreamBroken
from perdure.engines.configured_engine import ConfiguredEngine
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.engine_state import EngineRecord, name_of
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.token_salvage import Salvage
from perdure.settings.settings_tree import Settings
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import FinishReason
from tests.doubles.scripted_sglang import ScriptedSglang
from tests.engine_wire import answering, plain

TURN = {"default": {"turns": [{"content": " ".join(f"word{n}" for n in range(40))}]}}
SAMPLING = {"max_tokens": 400, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [151_645]}


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[ScriptedEngine, ScriptedSglang]]:
    async with (
        ScriptedEngine(TURN, generation=1) as engine,
        ScriptedSglang(engine, **options) as face,
    ):
        yield engine, face


async def sample(face: ScriptedSglang, **changes: Any) -> tuple[Salvage, FinishReason]:
    salvage = Salvage()
    salvage.begin("sglang", 1)
    ask = EngineRequest("policy-g1", [1, 2, 3], {**SAMPLING, **changes}, "s", "s-0")
    async with aclosing(Connections()) as connections:
        engine = SglangEngine("sglang", face.url, connections)
        reason = await engine.sample(ask, salvage, lambda: None)
    return salvage, reason


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_completion_equals_what_the_engine_sampled(incremental: bool) -> None:
    """Ids, logprobs and the version arrive token for token, whether or not chunks repeat tokens."""
    async with served(incremental=incremental) as (engine, face):
        salvage, reason = await sample(face)

        (call,) = engine.calls
        assert list(salvage.ids) == list(call.completion_ids)
        assert list(salvage.logprobs) == list(call.logprobs)
        assert [(span.version, span.end) for span in salvage.versions] == [(1, len(salvage.ids))]
        assert reason is FinishReason.STOP


async def test_a_broken_stream_keeps_its_tokens() -> None:
    """If the connection ends in the middle, the stream is broken and its tokens are kept."""
    async with served() as (engine, face):
        engine.control(kind="eof_mid_stream")
        salvage = Salvage()
        salvage.begin("sglang", 1)
        ask = EngineRequest("policy-g1", [1, 2, 3], SAMPLING, "s", "s-0")
        async with aclosing(Connections()) as connections:
            client = SglangEngine("sglang", face.url, connections)
            with pytest.raises(StreamBroken) as broken:
                await client.sample(ask, salvage, lambda: None)

        assert broken.value.kind is BreakKind.LOST
        sampled = list(engine.calls[-1].completion_ids)
        assert 0 < len(salvage.ids) < len(sampled)
        assert list(salvage.ids) == sampled[: len(salvage.ids)]


def aborted(**reason: Any) -> dict[str, Any]:
    told = {"type": "abort", **reason}
    about = {"finish_reason": told, "output_token_logprobs": [], "completion_tokens": 0}
    return {"output_ids": [], "meta_info": about}


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (aborted(), BreakKind.ABORTED),
        (aborted(status_code=503, message="the queue is full"), BreakKind.REFUSED),
        (aborted(status_code=400, message="the prompt is too long"), None),
        ({"error": {"code": 400, "message": "temperature must be at least 0"}}, None),
        ({"error": {"code": 400, "message": "the tokenizer manager is away"}}, BreakKind.REFUSED),
        ({"error": {"code": 500, "message": "scheduler died"}}, BreakKind.LOST),
    ],
)
async def test_a_stream_that_ends_early_has_a_kind(event: Any, kind: BreakKind | None) -> None:
    """After a 200, an event says that SGLang stopped, is full, refuses the content (None), or
    dies."""
    content = plain("200 OK", b"data: " + json.dumps(event).encode() + b"\n\n")
    ask = EngineRequest("policy-g1", [1, 2, 3], SAMPLING, "s", "s-0")
    async with answering([content]) as wire, aclosing(Connections()) as connections:
        engine = SglangEngine("sglang", wire.url, connections)
        with pytest.raises((StreamBroken, Refused)) as told:
            await engine.sample(ask, Salvage(), lambda: None)

    assert getattr(told.value, "kind", None) is kind


async def test_a_call_on_a_lost_sglang_continues_on_another_engine() -> None:
    """The pool sends prompt and salvage to the next engine, and the answer is whole."""
    async with (
        served() as (first, one),
        served() as (second, other),
        httpx.AsyncClient(trust_env=False, timeout=30) as client,
    ):
        for engine in (first, second):
            engine.control(kind="eof_mid_stream", times=1)
        roster = InMemoryRoster()
        for number, face in enumerate((one, other), 1):
            record = EngineRecord(
                name=name_of(face.url), url=face.url, kind="sglang", model="p", generation=number
            )
            await roster.change(lambda now, new=record: now.having(new))  # type: ignore[misc]
        pool = EnginePool(roster, client, options=PoolOptions(model="p", poll_s=60.0))
        try:
            prompt = [151_644, *ids(first, "assistant\n")]
            completion = await pool.generate(GenerateCall(prompt, SAMPLING, "s", "s-0"))
        finally:
            await pool.aclose()

        assert list(completion.token_ids) == first.policy.complete(prompt)
        assert len(completion.engines) > 1


def ids(engine: ScriptedEngine, text: str) -> list[int]:
    return engine.policy._tokenizer.encode_plain(text)


async def test_the_settings_may_name_sglang() -> None:
    """`PERDURE_ENGINE__KIND=sglang` makes the URL a token engine of the pool."""
    async with served() as (_, face), httpx.AsyncClient(trust_env=False, timeout=30) as client:
        engine = ConfiguredEngine(Settings(engine={"url": face.url, "kind": "sglang"}), client)
        try:
            found = await engine.current()
            assert isinstance(found, Engine)
            completion = await found.tokens.generate(GenerateCall([1, 2], SAMPLING, "s", "s-0"))
        finally:
            await engine.pool.aclose()

        assert completion.engines[0].engine.startswith("sglang ")


async def test_weights_are_loaded_from_a_folder(tmp_path: Path) -> None:
    """Pause, load and label use SGLang's routes; then the canary proves the new weights."""
    (tmp_path / "weights.json").write_text(json.dumps({"weights": 7}))
    async with served() as (_, face), httpx.AsyncClient(trust_env=False, timeout=30) as client:
        control = SglangControl(face.url, client)
        before = await control.score("policy-g1", [1, 2, 3])
        await control.pause("abort")
        await control.start_update()
        await control.update_weights({"path": str(tmp_path)})
        await control.finish_update(8)
        await control.resume()

        assert await control.version() == 8
        assert (await control.score("policy-g1", [1, 2, 3])).logprob != before.logprob


async def test_its_metrics_show_load_and_progress() -> None:
    """Capacity and the health check read SGLang's own metric names."""
    async with served() as (engine, face), httpx.AsyncClient(trust_env=False, timeout=30) as client:
        await sample(face)
        vitals = await SglangControl(face.url, client).vitals()

        assert vitals.kv_tokens
        assert vitals.tokens == len(engine.calls[-1].completion_ids)


def test_a_sampling_field_that_it_lacks_is_refused_by_name() -> None:
    """The translation drops no field silently."""
    with pytest.raises(Refused, match="sampling field 'best_of'"):
        sampling_params("sglang", {"best_of": 3})


def test_fields_get_sglangs_names() -> None:
    """Fields that vLLM and SGLang name differently are renamed."""
    found = sampling_params(
        "e", {"max_tokens": 5, "seed": 1, "structured_outputs": {"json": {"type": "object"}}}
    )

    assert (found["max_new_tokens"], found["sampling_seed"]) == (5, 1)
    assert found["json_schema"] == '{"type": "object"}'


def test_missing_tokens_are_detected() -> None:
    """A chunk that skips tokens is a malformed answer, not a shorter completion."""
    about = {"output_token_logprobs": [[-0.1, 5, None]], "completion_tokens": 4}

    with pytest.raises(ValueError, match="after 2"):
        new_tokens(about, 2)
