"""Two models with different tokenizers behind one gateway: an engine with the wrong tokenizer samples nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from perdure.dialects.base import Refused
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.clients.vllm_control import digest_of_ids
from perdure.engines.engine_roster import (
    InMemoryRoster,
    ModelFormat,
    StoredRoster,
    add_engine,
    remove_engine,
    roster_key,
)
from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState, name_of
from perdure.engines.function_engine import Ask, Sampled, ServedFunction
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.gateway.base import SessionSpec
from perdure.gateway.rendering.tokenizers import load_tokenizer, tokenizer_canary
from perdure.integrations.trainer_engine import VLLM_SAMPLING
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import FinishReason
from tests.doubles.scripted_sglang import ScriptedSglang
from tests.gateway_pool import SECRET, Pool
from tests.unit.gateway.families import FAMILIES

SOON_S = 20.0
PACKAGED = ModelFormat(tokenizer="qwen3")
SAYS = {"default": {"turns": [{"content": "Done."}]}}


class Engine(NamedTuple):
    spec: EngineSpec
    calls: Callable[[], int]
    """How many completions it has sampled."""


Open = Callable[[str], Awaitable[Engine]]
"""Opens an engine whose model has this tokenizer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder with another tokenizer than the packaged one."""
    return str(FAMILIES["Qwen3"].folder(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(FAMILIES["GLM"].folder(tmp_path_factory.mktemp("models")))


@pytest.fixture(autouse=True)
def _no_engine_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["vllm", "sglang", "trainer"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def of_trainer(tokenizer: str) -> Engine:
            asked: list[Ask] = []

            async def sample(ask: Ask) -> Sampled:
                asked.append(ask)
                ids = load_tokenizer(tokenizer).encode("Done.<|im_end|>")
                return Sampled(ids, [-0.001] * len(ids), FinishReason.STOP, 1)

            served = ServedFunction(sample, accepts=VLLM_SAMPLING, root=tokenizer, model="judge")
            served = await stack.enter_async_context(served)
            return Engine(EngineSpec(served.url), lambda: count(asked))

        async def scripted(tokenizer: str) -> Engine:
            engine = ScriptedEngine(SAYS, tokenizer=tokenizer)
            engine = await stack.enter_async_context(engine)
            spec = EngineSpec(engine.url)
            if request.param == "sglang":
                sglang = await stack.enter_async_context(ScriptedSglang(engine))
                spec = EngineSpec(sglang.url, kind="sglang")
            return Engine(spec, lambda: engine.stats().calls)

        yield of_trainer if request.param == "trainer" else scripted


def digest_of(tokenizer: str, of: str) -> str:
    return digest_of_ids(load_tokenizer(tokenizer).encode(tokenizer_canary(of).text))


def count(asked: list[Ask]) -> int:
    """Without the probes, whose prompts are a few ids."""
    return sum(len(ask.prompt_ids) > 5 for ask in asked)


def roster_of(gateway: LocalGateway) -> StoredRoster:
    return StoredRoster(gateway.store, roster_key(gateway.secret))


async def ask(gateway: LocalGateway, key: str, text: str = "Go.") -> httpx.Response:
    return await post(gateway.url, key, text)


async def post(url: str, key: str, text: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=SOON_S) as http:
        return await http.post(
            "/v1/chat/completions",
            json={"model": "any", "messages": [{"role": "user", "content": text}]},
            headers={"authorization": f"Bearer {key}"},
        )


async def found(
    gateway: LocalGateway, url: str, condition: Callable[[EngineRecord], Any]
) -> EngineRecord:
    """The engine's record, once it meets the condition."""
    while True:
        record = (await roster_of(gateway).read()).get(name_of(url))
        if record is not None and condition(record):
            return record
        await asyncio.sleep(0.05)


async def test_only_the_engine_with_the_models_tokenizer_samples(
    tmp_path: Path, opened: Open, folder: str, third: str
) -> None:
    """The policy's engine is not touched by it. The wrong engine's record and the refused call name the
    engine, the model, both tokenizers and the fix."""
    judged = ModelFormat(tokenizer=folder)
    right, wrong = await opened(folder), await opened(third)
    async with (
        asyncio.timeout(SOON_S),
        ScriptedEngine(SAYS) as policy,
        LocalGateway(tmp_path, engine={"url": policy.url, "kind": "vllm"}) as gateway,
    ):
        roster = roster_of(gateway)
        await add_engine(roster, wrong.spec, "judge", model_format=judged)
        record = await found(gateway, wrong.spec.url, lambda one: one.reason)
        refused = await ask(gateway, await gateway.open("early", model="judge"))
        await add_engine(roster, right.spec, "judge")
        await found(gateway, right.spec.url, lambda one: one.serves)
        answers = [
            await ask(gateway, await gateway.open(f"s-{n}", model=model))
            for n, model in enumerate(("judge", "judge", "judge", "policy"))
        ]
        sampled = right.calls(), wrong.calls(), policy.stats().calls

    assert record.state is EngineState.STARTING
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [
        "Done."
    ] * 4
    assert sampled == (3, 0, 1)
    assert 400 <= refused.status_code < 500
    for told in (record.reason, refused.text):
        assert all(part in told for part in (wrong.spec.url, "judge", folder, "--tokenizer"))
        assert all(digest_of(one, folder) in told for one in (folder, third))


async def test_a_gateway_with_another_tokenizer_setting_uses_no_engine_that_was_ready(
    tmp_path: Path, folder: str
) -> None:
    """The roster says that the engine is ready, because an earlier gateway had the right tokenizer."""
    async with asyncio.timeout(SOON_S), ScriptedEngine(SAYS) as policy:
        engine = {"url": policy.url, "kind": "vllm"}
        async with LocalGateway(tmp_path, engine=engine) as gateway:
            served = await ask(gateway, await gateway.open("first"))
        async with LocalGateway(tmp_path, engine={**engine, "tokenizer": folder}) as gateway:
            refused = await ask(gateway, await gateway.open("second"))
        async with LocalGateway(tmp_path, engine=engine) as gateway:
            mended = await ask(gateway, await gateway.open("third"))

    assert (served.status_code, mended.status_code) == (200, 200)
    assert refused.status_code >= 400
    assert all(part in refused.text for part in (policy.url, folder, "PERDURE_ENGINE__TOKENIZER"))
    assert policy.stats().calls == 2


async def test_a_session_whose_model_gets_another_tokenizer_is_refused_at_once(
    tmp_path: Path, opened: Open, folder: str
) -> None:
    """The new engine reads none of its ids. A later session and a new attempt get the new tokenizer, and
    the attempt replays no ids of the old one."""
    first, second = await opened("qwen3"), await opened(folder)
    async with asyncio.timeout(SOON_S), LocalGateway(tmp_path) as gateway:
        roster = roster_of(gateway)
        await add_engine(roster, first.spec, "judge", model_format=PACKAGED)
        key = await gateway.open("open", model="judge")
        served = await ask(gateway, key)
        await remove_engine(roster, name_of(first.spec.url))
        await add_engine(roster, second.spec, "judge", model_format=ModelFormat(tokenizer=folder))
        await found(gateway, second.spec.url, lambda one: one.serves)
        refused = [await ask(gateway, key, text) for text in ("Go on.", "Go on.")]
        asked = second.calls()
        session = await gateway.control.get("open")
        retried = await gateway.open("retried", model="judge", replay_of="open")
        answers = [await ask(gateway, retried), await ask(gateway, retried, "Go on.")]
        attempt = await gateway.control.get("retried")

    assert served.status_code == 200
    assert [one.status_code for one in refused] == [410, 410]
    assert asked == 0
    assert (session.turns, session.unanswered) == (1, "")
    for told in (session.tokenizer_changed, *(one.text for one in refused)):
        assert all(part in told for part in ("model judge", folder, "retry_on TokenizerChanged"))
        assert all(digest_of(one, one) in told for one in ("qwen3", folder))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (attempt.replayed_turns, attempt.tokenizer_changed) == (0, "")


async def test_a_call_that_waits_is_refused_once_its_model_has_another_tokenizer(
    folder: str,
) -> None:
    """Its model had no engine for a while, as between two commands of a user."""
    options = PoolOptions(canary=tokenizer_canary, poll_s=0.05)
    async with (
        asyncio.timeout(SOON_S),
        new_client() as client,
        ScriptedEngine(SAYS, tokenizer=folder) as engine,
    ):
        pool = EnginePool(InMemoryRoster(), client, (), options)
        digest = tokenizer_canary("qwen3").digest
        asked = GenerateCall([1, 2, 3], {}, "s", "s-0", model="judge", tokenizer=digest)
        call = asyncio.create_task(pool.generate(asked))
        while pool.waits("s") is None:
            await asyncio.sleep(0.01)
        other = ModelFormat(tokenizer=folder)
        await add_engine(pool.fleet, EngineSpec(engine.url), "judge", model_format=other)
        with pytest.raises(Refused, match=digest):
            await call
        await pool.aclose()

    assert engine.stats().calls == 0


@pytest.mark.longer
@pytest.mark.parametrize("model", ["policy", "judge"])
async def test_another_gateway_process_refuses_a_session_of_another_tokenizer(
    tmp_path: Path, folder: str, model: str
) -> None:
    """A gateway ends, and another one starts with another tokenizer: in the settings, or in the roster."""
    of_judge = model == "judge"
    homes = [tmp_path / "h"]
    async with (
        asyncio.timeout(5 * SOON_S),
        ScriptedEngine(SAYS) as policy,
        ScriptedEngine(SAYS) as first,
        ScriptedEngine(SAYS, tokenizer=folder) as second,
    ):
        async with Pool(homes, "" if of_judge else first.url) as pool:
            roster = StoredRoster(pool.store, roster_key(SECRET))
            if of_judge:
                await add_engine(roster, EngineSpec(policy.url))
                await add_engine(roster, EngineSpec(first.url), "judge", model_format=PACKAGED)
            async with pool.control() as control:
                spec = SessionSpec(session_id="s", turns_key="runs/r/t.parquet", model=model)
                await control.open(spec)
                key = control.key("s")
            served = await post(pool.url, key, "Go.")
        if of_judge:
            await remove_engine(roster, name_of(first.url))
            other = ModelFormat(tokenizer=folder)
            await add_engine(roster, EngineSpec(second.url), "judge", model_format=other)
        settings = {} if of_judge else {"engine__tokenizer": folder}
        async with Pool(homes, "" if of_judge else second.url, **settings) as pool:
            refused = await post(pool.url, key, "Go on.")
            async with pool.control() as control:
                session = await control.close("s")

    assert (served.status_code, refused.status_code) == (200, 410)
    assert second.stats().calls == 0
    assert session.tokenizer_changed
    assert session.tokenizer_changed in refused.json()["error"]["message"]


@pytest.mark.parametrize("root", ["", "policy", "no/such-model"])
async def test_a_trainer_whose_tokenizer_cannot_be_read_is_used(tmp_path: Path, root: str) -> None:
    """A trainer may name its model in a way that only its own process can resolve."""
    tokenizer = load_tokenizer("qwen3")

    async def sample(ask: Ask) -> Sampled:
        ids = tokenizer.encode("Done.<|im_end|>")
        return Sampled(ids, [-0.001] * len(ids), FinishReason.STOP, 1)

    async with (
        asyncio.timeout(SOON_S),
        ServedFunction(sample, accepts=VLLM_SAMPLING, root=root) as served,
        LocalGateway(tmp_path) as gateway,
    ):
        await add_engine(roster_of(gateway), EngineSpec(served.url), "policy")
        answer = await ask(gateway, await gateway.open("s"))

    assert answer.json()["choices"][0]["message"]["content"] == "Done."
