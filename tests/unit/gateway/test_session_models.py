"""Many models behind one gateway: each session names its model, and each has its engines."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.engines.engine_roster import (
    ModelFormat,
    Roster,
    StoredRoster,
    add_engine,
    remove_engine,
    roster_key,
)
from perdure.engines.engine_state import EngineSpec, name_of
from perdure.engines.pool.engine_fleet import Fleet
from perdure.engines.weights.weight_publishing import Weights
from perdure.engines.weights.weight_update import WeightCanary
from perdure.episodes.turns_parquet import decode
from perdure.errors import ConfigurationError, GatewayUnavailable
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import ScriptedEngine, logprob
from perdure.types import Turn
from tests.unit.gateway.families import FAMILIES

QWEN3 = ModelFormat(tokenizer="qwen3")


def says(text: str) -> dict[str, Any]:
    return {"default": {"turns": [{"content": text}]}}


@pytest.fixture(autouse=True)
def _no_engine_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def policy() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(says("the policy"), policy_version=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(FAMILIES["Qwen3"].folder(tmp_path_factory.mktemp("models")))


@pytest.fixture
async def judge(other_tokenizer: str) -> AsyncIterator[ScriptedEngine]:
    """A model with another tokenizer than the policy's."""
    async with ScriptedEngine(
        says("the judge"), tokenizer=other_tokenizer, policy_version=3
    ) as engine:
        yield engine


def roster_of(gateway: LocalGateway) -> StoredRoster:
    return StoredRoster(gateway.store, roster_key(gateway.secret))


def home(tmp_path: Path, engine: ScriptedEngine | None = None) -> LocalGateway:
    """A gateway whose settings name this engine."""
    return LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"} if engine else {})


async def ask(
    gateway: LocalGateway, key: str, messages: list[dict[str, Any]], model: str = "any"
) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
        answer = await http.post(
            "/v1/chat/completions",
            json={"model": model, "messages": messages},
            headers={"authorization": f"Bearer {key}"},
        )
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


async def models_of(gateway: LocalGateway, key: str) -> list[str]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers) as http:
        return [one["id"] for one in (await http.get(f"{gateway.url}/v1/models")).json()["data"]]


async def converse(gateway: LocalGateway, key: str, calls: int = 2) -> list[str]:
    """The answers to a conversation."""
    messages = [{"role": "user", "content": "Go."}]
    for _ in range(calls):
        answer = await ask(gateway, key, messages)
        messages += [answer, {"role": "user", "content": "And now?"}]
    return [message["content"] for message in messages if message["role"] == "assistant"]


async def turns_of(gateway: LocalGateway, session: str) -> list[Turn]:
    await gateway.control.close(session)
    return decode((await gateway.store.get(turns_key_of(session))).data)


async def test_a_session_has_the_model_that_it_names(
    tmp_path: Path, policy: ScriptedEngine, judge: ScriptedEngine, other_tokenizer: str
) -> None:
    """Its prompts are written with that model's tokenizer, its engines sample, its turns record that
    engine's policy version, and the list of models has its name."""
    async with home(tmp_path, policy) as gateway:
        judged = ModelFormat(tokenizer=other_tokenizer)
        await add_engine(roster_of(gateway), EngineSpec(judge.url), "judge", model_format=judged)
        keys = [await gateway.open("p"), await gateway.open("j", model="judge")]
        answers = await asyncio.gather(*(converse(gateway, key) for key in keys))
        listed = [await models_of(gateway, key) for key in keys]
        told = {session: await turns_of(gateway, session) for session in "pj"}

    assert answers == [["the policy"] * 2, ["the judge"] * 2]
    assert listed == [["policy"], ["judge"]]
    for session, name, version in (("p", "qwen3", 8), ("j", other_tokenizer, 3)):
        first, second = told[session]
        assert "Go." in load_tokenizer(name).decode(first.prompt_ids)
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids  # it was bridged
        assert (second.bridged, second.trainable) == (True, True)
        assert {span.version for span in (*first.versions, *second.versions)} == {version}
    assert (policy.stats().calls, judge.stats().calls) == (2, 2)


async def test_tokens_are_counted_for_the_model_that_will_answer(
    tmp_path: Path, policy: ScriptedEngine, judge: ScriptedEngine, other_tokenizer: str
) -> None:
    """An agent that fits its prompts to a helper's window counts with the helper's tokenizer."""
    messages = [{"role": "user", "content": "Name everything there is, in one line."}]
    async with home(tmp_path, policy) as gateway:
        judged = ModelFormat(tokenizer=other_tokenizer)
        await add_engine(roster_of(gateway), EngineSpec(judge.url), "judge", model_format=judged)
        key = await gateway.open("s", models={"small-*": "judge"})
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
            counts = []
            for model in ("policy", "small-1"):
                body = {"model": model, "messages": messages}
                counted = await http.post("/v1/messages/count_tokens", json=body)
                counts.append(counted.json()["input_tokens"])
                await ask(gateway, key, messages, model)
        prompts = [len(turn.prompt_ids) for turn in await turns_of(gateway, "s")]

    assert counts == prompts
    assert counts[0] != counts[1]


async def test_a_model_may_have_more_token_ids_than_the_settings_model(
    tmp_path: Path, policy: ScriptedEngine, judge: ScriptedEngine, other_tokenizer: str
) -> None:
    """Its engine is not taken for broken, because ids are checked against its own vocabulary."""
    options = {"url": judge.url, "kind": "vllm", "tokenizer": other_tokenizer}
    async with LocalGateway(tmp_path, engine=options) as gateway:
        await add_engine(roster_of(gateway), EngineSpec(policy.url), "large", model_format=QWEN3)
        key = await gateway.open("s", models={"large-*": "large"})
        answers = [
            (await ask(gateway, key, [{"role": "user", "content": "Go."}], model))["content"]
            for model in ("small", "large-1")
        ]
        (_, large) = await turns_of(gateway, "s")

    assert answers == ["the judge", "the policy"]
    assert max(large.completion_ids) >= load_tokenizer(other_tokenizer).vocabulary


async def test_a_group_that_every_engine_of_its_model_has_outrun_is_refused(
    tmp_path: Path, policy: ScriptedEngine, judge: ScriptedEngine, other_tokenizer: str
) -> None:
    """An engine of another model, with a lower version, is no reason to wait."""
    async with home(tmp_path, policy) as gateway:
        judged = ModelFormat(tokenizer=other_tokenizer)
        await add_engine(roster_of(gateway), EngineSpec(judge.url), "judge", model_format=judged)
        key = await gateway.open("s", labels={"policy_version": "5", "max_staleness": "1"})
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, headers=headers) as http:
            body = {"model": "any", "messages": [{"role": "user", "content": "Go."}]}
            answer = await http.post("/v1/chat/completions", json=body)

    assert "every engine serves newer weights" in answer.text


async def test_a_session_goes_on_when_its_tokenizer_is_in_another_folder(
    tmp_path: Path, judge: ScriptedEngine, other_tokenizer: str
) -> None:
    """Another process continues it after the model was added again, from a copy of its folder. The
    prompt begins with the recorded ids."""
    copy = shutil.copytree(other_tokenizer, tmp_path / "copy")
    async with home(tmp_path) as first:
        roster = roster_of(first)
        judged = ModelFormat(tokenizer=other_tokenizer)
        await add_engine(roster, EngineSpec(judge.url), "judge", model_format=judged)
        key = await first.open("s", model="judge")
        answer = await ask(first, key, [{"role": "user", "content": "Go."}])
    await remove_engine(roster, name_of(judge.url))
    moved = ModelFormat(tokenizer=str(copy))
    await add_engine(roster, EngineSpec(judge.url), "judge", model_format=moved)
    async with home(tmp_path) as second:
        messages = [{"role": "user", "content": "Go."}, answer, {"role": "user", "content": "On."}]
        await ask(second, key, messages)
        turns = await turns_of(second, "s")

    assert [turn.bridged for turn in turns] == [False, True]
    assert "On." in load_tokenizer(other_tokenizer).decode(turns[1].prompt_ids)


async def test_a_model_without_an_engine_is_refused(tmp_path: Path, policy: ScriptedEngine) -> None:
    """The error lists the available models, without a model whose last engine was removed."""
    async with ScriptedEngine(says("another")) as other, home(tmp_path, policy) as gateway:
        roster = roster_of(gateway)
        await add_engine(roster, EngineSpec(other.url), "user", model_format=QWEN3)
        await add_engine(roster, EngineSpec("http://127.0.0.1:9"), "gone", model_format=QWEN3)
        await remove_engine(roster, "127.0.0.1:9")

        for model in ("judge", "gone"):
            told = await refusal(gateway, model=model)
            assert f"no engine has the model {model}: the engines have policy, user" in told


async def refusal(gateway: LocalGateway, **spec: Any) -> str:
    """Why the gateway refuses a session, once all engines have told their models."""
    async with asyncio.timeout(30):
        while True:
            try:
                await gateway.open("refused", **spec)
            except GatewayUnavailable:
                await asyncio.sleep(0.02)
            except ConfigurationError as error:
                return str(error)


async def test_a_request_without_a_model_gets_the_only_one(
    tmp_path: Path, policy: ScriptedEngine
) -> None:
    """A user with one model never names it, whatever its name is; with two, one must be named."""
    async with ScriptedEngine(says("another")) as other, home(tmp_path) as gateway:
        roster = roster_of(gateway)
        await add_engine(roster, EngineSpec(policy.url), "my-model", model_format=QWEN3)
        answers = await converse(gateway, await gateway.open("s"), calls=1)
        await add_engine(roster, EngineSpec(other.url), "judge", model_format=QWEN3)
        told = await refusal(gateway)

    assert answers == ["the policy"]
    assert "several: judge, my-model. Name one" in told


async def test_a_run_with_engines_never_uses_those_of_all_runs(
    tmp_path: Path, policy: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls wait while the gateway has not read that the run has engines, and once they are gone."""
    syncs, may_see = Fleet._sync, asyncio.Event()

    def sync(fleet: Fleet, roster: Roster) -> None:
        syncs(fleet, roster if may_see.is_set() else roster.without(name_of(own.url)))

    monkeypatch.setattr(Fleet, "_sync", sync)
    async with ScriptedEngine(says("the trainer's")) as own, home(tmp_path, policy) as gateway:
        before = await converse(gateway, await gateway.open("s-1"), calls=1)
        await add_engine(roster_of(gateway), EngineSpec(own.url), run="train-7")
        key = await gateway.open("s-2", labels={"run": "train-7"})
        first = asyncio.create_task(converse(gateway, key, calls=1))
        await waiting_calls(gateway, 1)
        may_see.set()
        after = await first
        await remove_engine(roster_of(gateway), name_of(own.url))
        while name_of(own.url) in str(await gateway.control.engines()):
            await asyncio.sleep(0.02)
        second = asyncio.create_task(converse(gateway, key, calls=2))
        await waiting_calls(gateway, 1)
        second.cancel()

    assert (before, after) == (["the policy"], ["the trainer's"])


async def waiting_calls(gateway: LocalGateway, count: int) -> None:
    async with asyncio.timeout(30):
        while (await gateway.control.engines())["waiting"].get("policy") != count:
            await asyncio.sleep(0.02)


async def test_engines_of_a_run_sample_only_for_it(tmp_path: Path, policy: ScriptedEngine) -> None:
    """A trainer's engines serve its rollouts and no others, and its rollouts use no other engine, however
    many there are."""
    async with ScriptedEngine(says("the trainer's")) as own, home(tmp_path, policy) as gateway:
        await add_engine(roster_of(gateway), EngineSpec(own.url), run="train-*")
        await add_engine(
            roster_of(gateway), EngineSpec(own.url.replace("127.0.0.1", "localhost")), "judge",
            model_format=QWEN3, run="train-*",
        )  # fmt: skip
        sessions: list[tuple[str, dict[str, Any]]] = [
            (f"s-{run}", {"labels": {"run": run}}) for run in ("train-7", "train-8", "other")
        ]
        sessions += [("no-run", {}), ("j", {"model": "judge", "labels": {"run": "train-7"}})]
        answers = [
            await converse(gateway, await gateway.open(name, **spec), calls=1)
            for name, spec in sessions
        ]
        told = [
            await refusal(gateway, model="judge", **spec)
            for spec in ({}, {"labels": {"run": "other"}})
        ]

    assert all("the engines have policy" in one for one in told)
    trainers, shared = ["the trainer's"], ["the policy"]
    assert answers == [trainers, trainers, shared, shared, trainers]


async def test_a_full_model_delays_no_call_to_another(
    tmp_path: Path, policy: ScriptedEngine
) -> None:
    """Calls of one run queue for each model, and the gateway counts them by model."""
    async with ScriptedEngine(says("the judge")) as judge:
        options = {"url": policy.url, "kind": "vllm", "agents": 1}
        async with LocalGateway(tmp_path, engine=options) as gateway:
            await add_engine(roster_of(gateway), EngineSpec(judge.url), "judge", model_format=QWEN3)
            named = {"p1": "policy", "p2": "policy", "j1": "judge", "j2": "judge"}
            keys = {name: await gateway.open(name, model=model) for name, model in named.items()}
            waiting, answers = [], []
            for first, second in (("p1", "p2"), ("j1", "j2")):
                answers += await converse(gateway, keys[first], calls=1)
                waiting.append(asyncio.create_task(converse(gateway, keys[second], calls=1)))
                while len(counted := (await gateway.control.engines())["waiting"]) < len(waiting):
                    await asyncio.sleep(0.02)
            for first in ("p1", "j1"):
                await gateway.control.close(first)
            answers += [answer for one in waiting for answer in await one]

    assert counted == {"policy": 1, "judge": 1}
    assert answers == ["the policy", "the judge"] * 2


async def test_calls_for_another_name_go_to_the_sessions_model_unless_it_maps_the_name(
    tmp_path: Path, policy: ScriptedEngine
) -> None:
    """An agent's small helper model is the policy by default. A mapped one answers without changing the
    main chain's tokens, whatever policy version the group accepts, and its turns are not trained."""
    helper = "small-20250101"
    async with (
        ScriptedEngine(says("the judge"), policy_version=3) as judge,
        home(tmp_path, policy) as gateway,
    ):
        await add_engine(roster_of(gateway), EngineSpec(judge.url), "judge", model_format=QWEN3)
        answers: dict[str, list[str]] = {}
        for session, models in (("default", {}), ("mapped", {"small-*": "judge"})):
            versions = {"policy_version": "8", "max_staleness": "0"}
            key = await gateway.open(session, models=models, labels=versions)
            messages = [{"role": "user", "content": "Go."}]
            answers[session] = []
            for number in range(2):
                title = [{"role": "user", "content": f"Title {number}?"}]
                aside = await ask(gateway, key, title, helper)
                answers[session].append(aside["content"])
                messages += [await ask(gateway, key, messages), {"role": "user", "content": "On."}]
        turns = await turns_of(gateway, "mapped")
        summary = await gateway.control.get("mapped")
        async with httpx.AsyncClient() as http:
            metrics = (await http.get(f"{gateway.url}/metrics")).text
        told = await refusal(gateway, models={"small-*": "nobody"})

    assert "no engine has the model nobody" in told
    assert answers == {"default": ["the policy"] * 2, "mapped": ["the judge"] * 2}
    assert [(turn.asked_model, turn.trainable, turn.bridge_miss) for turn in turns] == [
        ("judge", False, "first"),
        ("policy", True, "first"),
        ("judge", False, "restart"),
        ("policy", True, None),
    ]
    assert (summary.policy_version_min, summary.policy_version_max) == (8, 8)
    assert "perdure_engine_moved_sessions 0.0" in metrics  # it kept its lease at either engine
    assert 'perdure_gateway_turns_total{finish_reason="stop",model="judge"} 2.0' in metrics


async def test_a_hosted_api_and_engines_serve_one_gateway(
    tmp_path: Path, policy: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API gets the name that the session gives. An added engine has exact tokens all the same, and
    calls that a hosted model answers do not make the rollout untrainable."""
    async with ScriptedEngine(says("an API")) as api:
        monkeypatch.setenv("OPENAI_BASE_URL", api.url)
        async with home(tmp_path) as gateway:
            await add_engine(roster_of(gateway), EngineSpec(policy.url), "mine", model_format=QWEN3)
            key = await gateway.open("s", model="mine", models={"small": "gpt-5-mini"})
            answers = [
                (await ask(gateway, key, [{"role": "user", "content": "Go."}], model))["content"]
                for model in ("small", "mine")
            ]
            hosted = await gateway.open("h", model="gpt-5", models={"small": "gpt-5-mini"})
            for model in ("small", "gpt-5"):
                await ask(gateway, hosted, [{"role": "user", "content": "Go."}], model)
            trainable = (await gateway.control.get("s")).trainable
            turns = [await turns_of(gateway, session) for session in "sh"]

    assert answers == ["an API", "the policy"]
    assert trainable
    assert [[(turn.asked_model, turn.trainable) for turn in those] for those in turns] == [
        [("gpt-5-mini", False), ("mine", True)],
        [("gpt-5-mini", False), ("gpt-5", False)],
    ]


async def test_a_hosted_api_does_not_answer_for_a_trainers_engines(
    tmp_path: Path, policy: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training's rollouts name no model; its own engines sample for them all the same."""
    async with ScriptedEngine(says("an API")) as api:
        monkeypatch.setenv("OPENAI_BASE_URL", api.url)
        async with home(tmp_path) as gateway:
            await add_engine(roster_of(gateway), EngineSpec(policy.url), run="train-*")
            answers = [
                await converse(gateway, await gateway.open(run, labels={"run": run}), calls=1)
                for run in ("train-7", "other")
            ]

    assert answers == [["the policy"], ["an API"]]


async def test_weights_are_published_to_the_engines_of_one_model(
    tmp_path: Path, policy: ScriptedEngine
) -> None:
    """The policy's update leaves the judge's weights and version as they are; each model has its own
    published version."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights.json").write_text('{"weights": 9}')
    token = load_tokenizer("qwen3").encode_plain("the")[0]
    canary = WeightCanary(
        prompt_ids=(1, 2, 3), token_id=token, logprob=logprob(token, 0, 9), tolerance=0.01
    )
    async with (
        ScriptedEngine(says("the judge"), policy_version=3) as judge,
        home(tmp_path, policy) as gateway,
    ):
        roster = roster_of(gateway)
        await add_engine(roster, EngineSpec(judge.url), "judge", model_format=QWEN3)
        async with asyncio.timeout(30):
            while sum(one.serves for one in (await roster.read()).engines) < 2:
                await asyncio.sleep(0.02)
        async with (
            Weights(gateway.settings, notice_s=0) as weights,
            Weights(gateway.settings, model="judge", notice_s=0) as judges,
        ):
            done = await weights.publish(9, folder, [canary])
            published = (await weights.published(), await judges.published())
        versions = {one.model: one.version for one in (await roster.read()).engines}
        async with Weights(gateway.settings, model="nobody") as nobody:
            with pytest.raises(ConfigurationError, match="the engines have judge, policy"):
                await nobody.published()

    assert [one.engine for one in done] == [name_of(policy.url)]
    assert versions == {"policy": 9, "judge": 3}
    assert (published[0] and published[0].version, published[1]) == (9, None)
    assert (policy.weights, judge.weights) == (9, 0)
