"""One contract for every engine client, over real HTTP against the scripted engine's routes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from perdure.dialects.base import Refused
from perdure.engines.base import ChatEngine, TokenEngine
from perdure.engines.clients import hosted_requests
from perdure.engines.clients.anthropic_hosted import AnthropicHosted, from_messages, to_messages
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.clients.openai_hosted import OpenAIHosted
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.engine_state import EngineSpec
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.errors import Boundary, CallsRefused, GatewayUnavailable
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.scripted_engine import ScriptedEngine, logprob

CALL = {"name": "bash", "arguments": {"command": "ls"}}
SCRIPTS = {
    "scripts": [{"match": "tool", "turns": [{"content": "Look:", "tool_calls": [CALL]}]}],
    "default": {"turns": [{"content": "Hello there, this is an answer of some length."}]},
}
PROMPT = load_tokenizer("qwen3").encode_plain("hi")
SAMPLING = {"max_tokens": 100, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [151_645]}
MakeToken = Callable[[str, httpx.AsyncClient, float], EnginePool]
MakeChat = Callable[[str, httpx.AsyncClient, float], ChatEngine]

TOKEN_ENGINES: dict[str, MakeToken] = {
    "pool": lambda url, client, patience: EnginePool(
        InMemoryRoster(), client, [EngineSpec(url)], PoolOptions(patience_s=patience)
    ),
}
HOSTED: dict[str, Any] = {"api_key": "sk-secret-value", "key_source": "SOME_API_KEY"}
CHAT_ENGINES: dict[str, MakeChat] = {
    "openai": lambda url, client, patience: OpenAIHosted(
        url, "m", client, **HOSTED, patience_s=patience
    ),
    "anthropic": lambda url, client, patience: AnthropicHosted(
        url, "m", client, **HOSTED, patience_s=patience
    ),
}


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(SCRIPTS, policy_version=3) as server:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


@pytest.fixture(params=TOKEN_ENGINES)
async def make_token(request: pytest.FixtureRequest) -> AsyncIterator[MakeToken]:
    """Makes clients, and closes them at the end."""
    async with AsyncExitStack() as made:

        def make(url: str, client: httpx.AsyncClient, patience_s: float) -> EnginePool:
            engine = TOKEN_ENGINES[request.param](url, client, patience_s)
            made.push_async_callback(engine.aclose)
            return engine

        yield make


@pytest.fixture(params=CHAT_ENGINES)
def make_chat(request: pytest.FixtureRequest) -> MakeChat:
    return CHAT_ENGINES[request.param]


def _generate(engine: TokenEngine, **sampling: Any) -> Any:
    return engine.generate(GenerateCall(PROMPT, {**SAMPLING, **sampling}, "s", "s-0"))


async def test_ids_and_logprobs_arrive_exactly(
    make_token: MakeToken, server: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """The completion is the server's own, id by id and bit by bit."""
    completion = await _generate(make_token(server.url, client, 0))

    assert list(completion.token_ids) == list(server.calls[0].completion_ids)
    expected = [logprob(token, i) for i, token in enumerate(completion.token_ids)]
    assert list(completion.logprobs) == expected
    assert list(server.calls[0].prompt_ids) == PROMPT


async def test_policy_versions_are_spans(
    make_token: MakeToken, server: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """Every token knows the policy version that sampled it."""
    completion = await _generate(make_token(server.url, client, 0))

    (span,) = completion.versions
    assert (span.version, span.start, span.end) == (3, 0, len(completion.token_ids))


async def test_an_unset_version_label_is_no_version(
    make_token: MakeToken, server: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """vLLM's label `default` is not guessed to be a number."""
    server.control(policy_version=None)

    assert (await _generate(make_token(server.url, client, 0))).versions == ()


async def test_a_cut_completion_says_length(
    make_token: MakeToken, server: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """The finish reason of max_tokens differs from that of a stop."""
    completion = await _generate(make_token(server.url, client, 0), max_tokens=3)

    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


async def test_the_session_travels_for_cache_affinity(
    make_token: MakeToken, server: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """Routers in front of engines see which session a call belongs to."""
    await _generate(make_token(server.url, client, 0))

    assert server.stats().calls_by_session == {"s": 1}


FAULTS = [
    {"kind": "status", "status": 503},
    {"kind": "status", "status": 500},
    {"kind": "status", "status": 429},
    {"kind": "reset_before"},
    {"kind": "reset_after"},
    {"kind": "done_without_finish"},
    {"kind": "eof_mid_stream"},
    {"kind": "short_logprobs"},
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
async def test_a_transient_fault_is_retried(
    make_token: MakeToken, server: ScriptedEngine, client: httpx.AsyncClient, fault: dict[str, Any]
) -> None:
    """A transient fault delays the turn but does not fail it."""
    server.control(**fault, times=1)

    completion = await _generate(make_token(server.url, client, 30))

    assert completion.finish_reason == "stop"
    assert server.stats().faults[fault["kind"]] == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
async def test_a_lasting_fault_is_unavailable(
    make_token: MakeToken, server: ScriptedEngine, client: httpx.AsyncClient, fault: dict[str, Any]
) -> None:
    """A partial answer never counts as a completion."""
    server.control(**fault)

    with pytest.raises(GatewayUnavailable) as caught:
        await _generate(make_token(server.url, client, 0))
    assert caught.value.boundary is Boundary.ENGINE


async def test_a_refused_connection_is_unavailable(
    make_token: MakeToken, client: httpx.AsyncClient
) -> None:
    """A refused connection is the engine's failure, and the error names its address."""
    with pytest.raises(GatewayUnavailable, match=r"127\.0\.0\.1:9"):
        await _generate(make_token("http://127.0.0.1:9", client, 0))


async def test_a_prompt_too_long_is_refused_for_good(
    make_token: MakeToken, client: httpx.AsyncClient
) -> None:
    """The engine's context limit reaches the agent as `context_length_exceeded`."""
    async with ScriptedEngine(SCRIPTS, max_model_len=32) as small:
        engine = make_token(small.url, client, 30)
        with pytest.raises(Refused) as caught:
            await engine.generate(GenerateCall(PROMPT * 32, SAMPLING, "s", "s-0"))

    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


# --- hosted APIs -------------------------------------------------------------------------------


def _chat(text: str) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 50}


async def test_text_and_tool_calls_come_back_as_a_chat_completion(
    make_chat: MakeChat, server: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """The caller gets OpenAI's format, even from an API with another format."""
    answer = await make_chat(server.url, client, 0).chat(_chat("a tool"), session_id="s")

    choice = answer.completion["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Look:"
    assert (call["function"]["name"], call["function"]["arguments"]) == (
        "bash",
        '{"command": "ls"}',
    )
    assert choice["finish_reason"] == "tool_calls"
    assert answer.completion["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("status", [401, 404, 422])
async def test_a_refusal_from_the_start_is_told_soon_and_never_shows_the_key(
    client: httpx.AsyncClient,
    server: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    """A wrong key or model ends a first call long before its patience, and names the variable."""
    monkeypatch.setattr(hosted_requests, "FIRST_PATIENCE_S", 0.1)
    server.control(kind="status", status=status)
    engine = CHAT_ENGINES["openai"](server.url, client, 300)

    async with asyncio.timeout(30):
        with pytest.raises(CallsRefused) as caught:
            await engine.chat(_chat("hi"), session_id="s")
    assert "sk-secret-value" not in str(caught.value)
    assert ("SOME_API_KEY" in str(caught.value)) == (status == 401)


@pytest.mark.parametrize("status", [301, 401, 404, 422, 451, 507, 520])
async def test_a_later_refusal_is_waited_out(
    server: ScriptedEngine,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    """An API that has served calls works, so a later refusal only delays the call, and the wait has
    a reason that people can read."""
    monkeypatch.setattr(hosted_requests, "FIRST_PATIENCE_S", 0.0)
    engine = CHAT_ENGINES["openai"](server.url, client, 300)
    await engine.chat(_chat("hi"), session_id="s")
    server.control(kind="status", status=status)
    call = asyncio.ensure_future(engine.chat(_chat("ho"), session_id="s"))
    async with asyncio.timeout(30):
        while (wait := engine.waits("s")) is None:
            await asyncio.sleep(0.01)
    server.control(kind=None)
    answer = await call

    assert answer.completion["choices"][0]["message"]
    assert answer.waited_s > 0
    assert (f"answered {status}" in wait.reason, engine.waits("s")) == (True, None)


async def test_a_call_waits_also_while_a_further_try_is_on_its_way(
    server: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """A call still waits while its retry runs, which may take as long as the API needs."""
    engine = CHAT_ENGINES["openai"](server.url, client, 300)
    server.control(kind="status", status=503)
    call = asyncio.ensure_future(engine.chat(_chat("ho"), session_id="s"))
    async with asyncio.timeout(30):
        while engine.waits("s") is None:
            await asyncio.sleep(0.01)
        server.control(kind="hang")
        while not server.stats().faults["hang"]:
            await asyncio.sleep(0.01)
        wait = engine.waits("s")
        server.reset()
        await call

    assert wait is not None
    assert "answered 503" in wait.reason
    assert engine.waits("s") is None


def test_tool_results_of_one_turn_are_in_one_message() -> None:
    """Anthropic requires a turn's results together, in one user message after the tool uses."""
    call = {"type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": i} for i in "ab"]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "user", "content": "Next."},
    ]

    body = to_messages({"messages": messages, "max_tokens": 9}, "m")

    assert body["system"] == "Be brief."
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    kinds = [block["type"] for block in body["messages"][2]["content"]]
    assert kinds == ["tool_result", "tool_result", "text"]
    assert body["messages"][1]["content"][0]["input"] == {"command": "ls"}


def test_a_cut_message_says_length() -> None:
    """Anthropic's `max_tokens` becomes OpenAI's `length`."""
    answer = from_messages(
        {
            "content": [{"type": "text", "text": "He"}],
            "stop_reason": "max_tokens",
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }
    )

    assert answer["choices"][0]["finish_reason"] == "length"
