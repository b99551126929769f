"""A turn's sampling parameters: the rollout's rules win, nothing is dropped, everything is
recorded."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from perdure.dialects.base import ModelRequest, Refused
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.token_salvage import Salvage
from perdure.episodes.turns_parquet import decode
from perdure.gateway.rendering.message_format import Format, load_format
from perdure.gateway.rendering.tool_call_parsers.format_detection import TOOL_CALL_PARSERS
from perdure.gateway.turns.output_constraints import constraints
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import Sampling, Turn

CALL = {"name": "bash", "arguments": {"command": "ls"}}
SCRIPTS = {
    "scripts": [{"match": "call it", "turns": [{"content": "Now.", "tool_calls": [CALL]}]}],
    "default": {"turns": [{"content": "One. Stop here. Two."}, {"content": "Again."}]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("bash", "q")
]
WISHES = {
    "temperature": 0.2,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.2,
    "stop": [" here"],
    "seed": 3,
}
AGENT = Sampling(decided_by="agent")
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
QWEN3 = load_format("qwen3")


class Gateway:
    """A gateway in front of a scripted engine, and calls of agents."""

    def __init__(
        self, local: LocalGateway, engine: ScriptedEngine, http: httpx.AsyncClient
    ) -> None:
        self.local = local
        self.engine = engine
        self.http = http

    async def chat(self, key: str, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.post("chat/completions", key, body)

    async def anthropic(self, key: str, **fields: Any) -> httpx.Response:
        hi = {"role": "user", "content": "Hi"}
        return await self.post(
            "messages", key, {"model": "m", "max_tokens": 99, "messages": [hi], **fields}
        )

    async def post(self, route: str, key: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.post(f"/v1/{route}", json=body, headers=headers)

    @property
    def sent(self) -> list[dict[str, Any]]:
        """The engine's requests, call by call."""
        return [dict(call.sampling) for call in self.engine.calls]

    async def turns(self, session_id: str) -> list[Turn]:
        await self.local.control.close(session_id)
        return decode((await self.local.store.get(turns_key_of(session_id))).data)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with (
        ScriptedEngine(SCRIPTS) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as local,
        httpx.AsyncClient(base_url=local.url, timeout=30) as http,
    ):
        yield Gateway(local, engine, http)


async def test_the_rollout_decides(gateway: Gateway) -> None:
    """An agent's sampling parameters do not reach the engine in a trainable session."""
    key = await gateway.local.open("s", sampling=Sampling(temperature=0.7, top_k=40))
    answer = await gateway.chat(key, **WISHES)

    (sent,) = gateway.sent
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 1.0, 40)
    assert not {"min_p", "presence_penalty", "frequency_penalty", "seed", "stop"} & set(sent)
    assert answer.json()["choices"][0]["message"]["content"] == "One. Stop here. Two."


async def test_every_rule_reaches_the_engine(gateway: Gateway) -> None:
    """The engine gets the penalties, stop texts and stop ids of the rollout's request."""
    rules = Sampling.model_validate(
        {n: v for n, v in WISHES.items() if n != "seed"} | {"stop_token_ids": (248046,)}
    )
    await gateway.chat(await gateway.local.open("s", sampling=rules))

    (sent,) = gateway.sent
    assert {name: sent[name] for name in WISHES if name != "seed"} == {
        name: value for name, value in WISHES.items() if name != "seed"
    }
    assert sent["stop_token_ids"][-1] == 248046


async def test_the_agent_decides_if_the_session_allows_it(gateway: Gateway) -> None:
    """With `decided_by: agent`, the agent's request decides; the rollout's rules fill in what it
    omits."""
    rules = Sampling(temperature=0.7, top_p=0.9, decided_by="agent")
    await gateway.chat(await gateway.local.open("s", sampling=rules), temperature=0.2)

    (sent,) = gateway.sent
    assert (sent["temperature"], sent["top_p"]) == (0.2, 0.9)


async def test_the_sent_parameters_are_recorded(gateway: Gateway) -> None:
    """A turn records exactly what its engine got, even if it changes from call to call."""
    key = await gateway.local.open("s", sampling=AGENT)
    await gateway.chat(key, **{name: v for name, v in WISHES.items() if name != "seed"})
    await gateway.chat(key, temperature=0.0, logit_bias={"9": -5})
    sent = gateway.sent
    first, second = [turn.sampling for turn in await gateway.turns("s")]

    assert first is not None
    assert second is not None
    used = first.model_dump()
    asked = {name: v for name, v in sent[0].items() if name in used}
    assert {*WISHES, "max_tokens", "stop_token_ids"} - set(asked) == {"seed"}
    assert {name: used[name] for name in asked} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()
    }
    assert (second.temperature, json.loads(second.logit_bias)) == (0.0, {"9": -5})


# --- seeds ----------------------------------------------------------------------------------


async def _seeds(gateway: Gateway, name: str, sample: str, **fields: Any) -> list[int]:
    before = len(gateway.sent)
    rules = Sampling(seed=7, **fields)
    key = await gateway.local.open(name, sampling=rules, sample=sample)
    hi = {"role": "user", "content": "Hi"}
    await gateway.chat(key, seed=3)
    await gateway.chat(
        key,
        seed=3,
        messages=[hi, {"role": "assistant", "content": "One. Stop here. Two."}, hi],
    )
    return [sent["seed"] for sent in gateway.sent[before:]]


async def test_samples_and_calls_have_different_seeds(gateway: Gateway) -> None:
    """Two samples of an instance share no seed, nor do two calls; the agent's seed has no
    effect."""
    seeds = [await _seeds(gateway, f"s{n}", f"d/i/{n}") for n in range(2)]

    assert len({seed for pair in seeds for seed in pair}) == 4


async def test_a_repeated_request_has_the_same_seeds(gateway: Gateway) -> None:
    """The same sample of another run gets the same seeds."""
    assert await _seeds(gateway, "a", "d/i/0") == await _seeds(gateway, "b", "d/i/0")


async def test_an_agents_constant_seed_does_not_make_samples_equal(gateway: Gateway) -> None:
    """If the agent decides, its seed is a base like the rollout's."""
    seeds = [await _seeds(gateway, f"s{n}", f"d/i/{n}", decided_by="agent") for n in range(2)]

    assert len({seed for pair in seeds for seed in pair}) == 4


def test_a_continuation_does_not_repeat_random_draws() -> None:
    """Tokens after a lost engine must not repeat the draws of the tokens before them."""
    salvage = Salvage()
    call = GenerateCall([1, 2], {"max_tokens": 9, "seed": 7}, "s", "s-1", {}, salvage)
    whole = call.ask("m").sampling["seed"]
    salvage.add([5, 6], [-0.1, -0.2], version=None)
    rest = call.ask("m").sampling["seed"]

    assert (whole, rest == whole, call.ask("m").sampling["seed"] == rest) == (7, False, True)


# --- stop texts -----------------------------------------------------------------------------


async def test_a_stop_text_ends_an_answer_as_openai_does(gateway: Gateway) -> None:
    """The agent reads the text before it, and the next prompt has everything that was sampled."""
    key = await gateway.local.open("s", sampling=AGENT)
    choice = (await gateway.chat(key, stop=[" here"])).json()["choices"][0]
    hi = {"role": "user", "content": "Hi"}
    await gateway.chat(key, messages=[hi, choice["message"], hi])

    assert (choice["message"]["content"], choice["finish_reason"]) == ("One. Stop", "stop")
    assert [turn.bridged for turn in await gateway.turns("s")] == [False, True]


async def test_a_stop_text_ends_an_answer_as_anthropic_does(gateway: Gateway) -> None:
    """The stop reason is `stop_sequence`, and the answer names the text."""
    key = await gateway.local.open("s", sampling=AGENT)
    answer = (await gateway.anthropic(key, stop_sequences=["Two", " here"])).json()

    assert answer["content"] == [{"type": "text", "text": "One. Stop"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " here")


async def test_a_stop_text_of_the_rollout_stays_in_the_answer(gateway: Gateway) -> None:
    """The agent did not set it, so its answer is the sampled text."""
    rules = Sampling(stop=(" here",))
    choice = (await gateway.chat(await gateway.local.open("s", sampling=rules))).json()["choices"][
        0
    ]

    assert choice["message"]["content"] == "One. Stop here"


# --- tool choice, response format, logit bias -------------------------------------------------


def _asked(model_format: Format = QWEN3, rules: Sampling = AGENT, **body: Any) -> dict[str, Any]:
    request = ModelRequest("m", [], body.get("tools"), {}, None, body)
    return constraints(model_format, rules, request)


@pytest.mark.parametrize(
    ("wished", "outputs"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (JSON_SCHEMA, {"json": SCHEMA}),
    ],
)
def test_a_response_format_becomes_a_grammar(wished: Any, outputs: Any) -> None:
    """vLLM's structured outputs enforce the schema."""
    assert _asked(response_format=wished).get("structured_outputs") == outputs


async def test_every_dialect_can_request_a_schema(gateway: Gateway) -> None:
    """`response_format`, `output_config.format` and `text.format` have the same effect."""
    key = await gateway.local.open("s")
    flat = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    await gateway.chat(key, response_format=JSON_SCHEMA)
    await gateway.anthropic(key, output_config={"format": flat})
    await gateway.post("responses", key, {"model": "m", "input": "Hi!", "text": {"format": flat}})

    assert [sent["structured_outputs"] for sent in gateway.sent] == [{"json": SCHEMA}] * 3


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["bash", "q"]),
        ({"type": "function", "function": {"name": "q"}}, ["q"]),
    ],
)
def test_a_forced_call_is_written_as_the_model_does(choice: Any, names: list[str]) -> None:
    """The grammar is one call that the model's own parser reads."""
    outputs = _asked(tools=TOOLS, tool_choice=choice)["structured_outputs"]
    form = json.loads(outputs["structural_tag"])["format"]
    calls = form.get("elements", [form])

    assert [call["begin"] for call in calls] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
    ]
    written = "".join([calls[0]["begin"], "{}", calls[0]["end"]])
    ids = [*_ids(written), *QWEN3.renderer.get_stop_token_ids()[:1]]
    parsed = QWEN3.renderer.parse_response(ids, tools=TOOLS)
    assert [call.name for call in parsed.tool_calls] == names[:1]


def _ids(text: str) -> list[int]:
    start, rest = text.split("<tool_call>")
    inner, end = rest.split("</tool_call>")
    plain, known = QWEN3.tokenizer.encode_plain, QWEN3.tokenizer.convert_tokens_to_ids
    return [*plain(start), known("<tool_call>"), *plain(inner), known("</tool_call>"), *plain(end)]


async def test_forbidden_calls_stay_text(gateway: Gateway) -> None:
    """With `tool_choice: none`, the agent gets no call, whatever the model samples."""
    hi = [{"role": "user", "content": "call it"}]
    key = await gateway.local.open("s")
    answer = await gateway.chat(key, messages=hi, tools=TOOLS, tool_choice="none")

    message = answer.json()["choices"][0]["message"]
    assert ("tool_calls" in message, '"name": "bash"' in message["content"]) == (False, True)


async def test_the_responses_dialect_passes_its_tool_choice(gateway: Gateway) -> None:
    """The flat form names the same function."""
    tool = {"type": "function", "name": "q", "parameters": {}}
    body = {"model": "m", "input": "Hi", "tools": [tool]}
    key = await gateway.local.open("s")
    await gateway.post("responses", key, body | {"tool_choice": {"type": "function", "name": "q"}})

    assert '"q' in gateway.sent[0]["structured_outputs"]["structural_tag"].replace("\\", "")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": JSON_SCHEMA, "tools": TOOLS}, "response_format"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS},
            "tool_choice",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    """The error names the field; nothing is dropped."""
    with pytest.raises(Refused) as caught:
        _asked(**body)

    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_logit_bias_is_refused_if_the_rollout_decides() -> None:
    """It would change the distribution that the trainer assumes."""
    with pytest.raises(Refused, match="decided_by: agent"):
        _asked(rules=Sampling(), logit_bias={"5": 1})


def test_a_call_is_not_forced_for_a_parser_without_a_grammar() -> None:
    """For models with another tool-call parser the call is refused instead of being ignored."""
    with pytest.raises(Refused, match="'tool_choice' cannot be forced"):
        _asked(_writing("glm45"), tools=TOOLS, tool_choice="required")


def test_a_model_without_calls_gets_no_tools() -> None:
    """If the template cannot show tools, they are refused with the setting's name, not dropped."""
    with pytest.raises(Refused, match="'tools' cannot be used: PERDURE_ENGINE__TOOL_CALL_PARSER"):
        _asked(_writing("text"), tools=TOOLS)


def _writing(parser: str) -> Format:
    renderer: Any = SimpleNamespace(parser=TOOL_CALL_PARSERS[parser])
    return QWEN3._replace(renderer=renderer)
