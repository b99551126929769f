"""Sampling parameters reach a hosted API, or are refused by name."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.dialects.base import ModelRequest, Refused
from perdure.engines.clients.anthropic_hosted import AnthropicHosted
from perdure.engines.clients.openai_hosted import OpenAIHosted
from perdure.engines.hosted_sampling import check_hosted_sampling, hosted_kind
from perdure.engines.reported_model import engine_settings
from perdure.errors import ConfigurationError
from perdure.gateway.turns.sampling_params import chat_request
from perdure.rollouts import run_identity
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import RolloutRequest, Sampling
from tests.engine_wire import answering, plain

CHAT = {"choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}
MESSAGE = {
    "role": "assistant",
    "content": [{"type": "text", "text": "x"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
SET: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "stop": ("END",),
}
BY_ANTHROPIC = {"temperature", "top_p", "top_k", "stop"}


async def sent(
    kind: type[OpenAIHosted] | type[AnthropicHosted], rules: Sampling, **asked: Any
) -> Any:
    """The request body for a hosted API of this kind."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **asked}
    request = ModelRequest("m", [], None, {}, None, body)
    answer = json.dumps(CHAT if kind is OpenAIHosted else MESSAGE).encode()
    async with (
        answering([plain("200 OK", answer, "connection: close")]) as wire,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        api = kind(wire.url, "m", client, api_key="k", key_source="K")
        api.check(rules)
        seed = None if rules.seed is None else 17
        await api.chat(chat_request(rules, request, seed), session_id="s")
    return json.loads(wire.bodies[0])


async def test_every_parameter_reaches_an_openai_compatible_api() -> None:
    """The request has every parameter that the run's identity records."""
    body = await sent(OpenAIHosted, Sampling(**SET, seed=7))

    assert {name: body[name] for name in SET} == {**SET, "stop": ["END"]}
    assert body["seed"] == 17


async def test_anthropics_parameters_reach_it() -> None:
    """Stop texts have another name there."""
    body = await sent(AnthropicHosted, Sampling(**{name: SET[name] for name in BY_ANTHROPIC}))

    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.5, 0.9, 20)
    assert body["stop_sequences"] == ["END"]


async def test_the_rollouts_sampling_overrides_the_agents() -> None:
    """This is as with engines; the agent decides what the rollout leaves at its default."""
    body = await sent(OpenAIHosted, Sampling(temperature=0.5), temperature=0.1, top_p=0.2)
    agents = Sampling(temperature=0.5, decided_by="agent")

    assert (body["temperature"], body["top_p"]) == (0.5, 0.2)
    assert (await sent(OpenAIHosted, agents, temperature=0.1))["temperature"] == 0.1


@pytest.mark.parametrize(
    ("kind", "url", "lacking"),
    [
        ("anthropic", "http://127.0.0.1:9", {*SET} - BY_ANTHROPIC | {"seed", "stop_token_ids"}),
        (
            "openai",
            "https://api.openai.com/v1",
            {"top_k", "min_p", "repetition_penalty", "stop_token_ids"},
        ),
        ("openai", "http://127.0.0.1:9", {"stop_token_ids"}),
    ],
)
def test_a_parameter_that_the_api_lacks_is_refused_by_name(
    kind: str, url: str, lacking: set[str]
) -> None:
    """Nothing is dropped silently."""
    rules = Sampling(**SET, seed=7, stop_token_ids=(5,))
    with pytest.raises(ConfigurationError) as refused:
        check_hosted_sampling(rules, kind, url)

    named = str(refused.value).partition(":")[0].split(", ")
    assert {name.removeprefix("sampling.") for name in named} == lacking


async def test_a_run_is_refused_before_anything_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's identity is made before its first sandbox."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9")
    settings, store = Settings(home=tmp_path), LocalStore(tmp_path / "store")
    request = RolloutRequest(run_id="r", instance="d/i", sampling={"seed": 7})
    with pytest.raises(ConfigurationError, match=r"sampling\.seed"):
        await run_identity.identity_of(settings, store, request, [], engine_settings(settings))


def test_a_token_engine_is_not_a_hosted_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """PERDURE_ENGINE__URL overrides the variables of hosted APIs."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    named = Settings(engine={"url": "http://127.0.0.1:8", "kind": "auto"})

    assert hosted_kind(engine_settings(Settings())) == "openai"
    assert hosted_kind(engine_settings(named)) == ""


async def test_the_gateway_refuses_parameters_that_its_api_lacks() -> None:
    """This also holds if only the gateway detects the API's kind."""
    with pytest.raises(Refused, match=r"sampling\.min_p"):
        await sent(AnthropicHosted, Sampling(min_p=0.1))
