"""Two models with different tokenizers behind one gateway: an engine with the wrong tokenizer samples nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from perdure.engines.clients.vllm_control import digest_of_ids
from perdure.engines.engine_roster import (
    ModelFormat,
    StoredRoster,
    add_engine,
    roster_key,
)
from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState, name_of
from perdure.engines.function_engine import Ask, Sampled, ServedFunction
from perdure.gateway.rendering.tokenizers import load_tokenizer, tokenizer_canary
from perdure.integrations.trainer_engine import VLLM_SAMPLING
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import FinishReason
from tests.doubles.scripted_sglang import ScriptedSglang
from tests.unit.gateway.families import FAMILIES

SOON_S = 20.0
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


async def ask(gateway: LocalGateway, key: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=SOON_S) as http:
        return await http.post(
            "/v1/chat/completions",
            json={"model": "any", "messages": [{"role": "user", "content": "Go."}]},
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
