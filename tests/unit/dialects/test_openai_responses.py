"""OpenAI Responses: codex's items are read, its events come in order, and reasoning round-trips."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perdure.dialects import openai_responses as dialect
from perdure.dialects.base import MAIN, Answer, ModelRequest, Refused
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import Faults, ScriptedEngine
from perdure.types import Purpose, Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI

EXEC = {"type": "function", "name": "exec", "parameters": {"type": "object"}, "strict": False}
SPAWN = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
TOOLS = [EXEC, SPAWN, PATCH, {"type": "web_search"}]
SCRIPTS = {
    "scripts": [
        {
            "match": "list the files",
            "turns": [
                {
                    "content": "I look.",
                    "reasoning": "Where \u00e9 is it?",
                    "tool_calls": [
                        {"name": "exec", "arguments": {"command": "ls"}},
                        {"name": "agents__spawn", "arguments": {"task": "look"}},
                        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
                    ],
                },
                {"content": "There is one file."},
            ],
        },
        {"match": "long answer", "turns": [{"content": "word " * 100}]},
    ],
    "default": {"turns": [{"content": "Hello."}]},
}


def _parse(body: dict[str, Any], headers: dict[str, str] | None = None) -> dialect.ParsedRequest:
    return dialect.parse(json.dumps({"model": "m", **body}).encode(), headers or {})


def _request(*items: dict[str, Any], **fields: Any) -> ModelRequest:
    return _parse({"input": list(items), **fields}).request


def _said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": "exec",
        "arguments": "{}",
        **fields,
    }


# --- requests --------------------------------------------------------------------------------


def test_items_of_one_answer_are_one_message() -> None:
    """Adjacent reasoning, text and calls come from one turn of the model."""
    reasoning = {"type": "reasoning", "summary": [], "content": [_part("reasoning_text", "Hm.")]}
    answer: list[Any] = [reasoning, _said("assistant", "I look."), _called("a"), _called("b")]

    messages = _request(_said("user", "x"), *answer).messages

    function = {"name": "exec", "arguments": "{}"}
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": i, "type": "function", "function": function} for i in "ab"],
        }
    ]


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_an_item_out_of_order_begins_another_answer() -> None:
    """Text after a call belongs to the next answer."""
    items = [_called("a"), _said("assistant", "Done."), _said("assistant", "Really.")]

    messages = _request(*items).messages

    assert [m["content"] for m in messages] == ["", "Done.", "Really."]


def test_results_are_matched_by_call_id() -> None:
    """A result is text, or parts in which images become notes."""
    parts = [_part("input_text", "one"), {"type": "input_image", "image_url": "data:"}]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": "a", "output": "two"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": parts},
    ]

    messages = _request(*results).messages

    assert [(m["role"], m["tool_call_id"], m["content"]) for m in messages] == [
        ("tool", "a", "two"),
        ("tool", "b", "one\n[input_image not shown: this model reads text]"),
    ]


def test_an_image_of_the_user_becomes_a_note() -> None:
    """The rollout continues, and a note tells the model that it cannot see the image."""
    content = [{"type": "input_image", "image_url": "data:"}, _part("input_text", "What?")]
    (message,) = _request({"type": "message", "role": "user", "content": content}).messages

    assert message["content"] == "[input_image not shown: this model reads text]\nWhat?"


def test_instructions_and_developer_messages_are_system_messages() -> None:
    """Both keep the client's positions."""
    messages = _request(_said("developer", "b"), _said("user", "c"), instructions="a").messages

    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "a"),
        ("system", "b"),
        ("user", "c"),
    ]


def test_tools_in_a_namespace_get_flat_names_and_built_in_ones_are_left_out() -> None:
    """The model gets the tools that the client can run, each under one name."""
    tools = _request(_said("user", "x"), tools=TOOLS).tools or []

    names = [tool["function"]["name"] for tool in tools]
    assert names == ["exec", "agents__spawn", "apply_patch"]


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({"session-id": "t0", "thread-id": "t0"}, (MAIN, "", Purpose.STEP)),
        (
            {
                "x-openai-subagent": "collab_spawn",
                "session-id": "t0",
                "thread-id": "t1",
                "x-codex-parent-thread-id": "t0",
            },
            ("t1", MAIN, Purpose.STEP),
        ),
        (
            {
                "x-openai-subagent": "collab_spawn",
                "session-id": "t0",
                "thread-id": "t2",
                "x-codex-parent-thread-id": "t1",
            },
            ("t2", "t1", Purpose.STEP),
        ),
        ({"x-openai-subagent": "review"}, ("review", MAIN, Purpose.STEP)),
        ({"x-openai-subagent": "compact", "thread-id": "t0"}, (MAIN, "", Purpose.COMPACTION)),
        (
            {"x-codex-turn-metadata": '{"request_kind": "compaction"}', "thread-id": "t0"},
            (MAIN, "", Purpose.COMPACTION),
        ),
        (
            {
                "x-openai-subagent": "collab_spawn",
                "thread-id": "t1",
                "x-codex-turn-metadata": '{"request_kind": "compaction"}',
            },
            ("t1", MAIN, Purpose.COMPACTION),
        ),
        ({"x-codex-turn-metadata": '{"request_kind": "turn"}'}, (MAIN, "", Purpose.STEP)),
        ({"x-codex-turn-metadata": "[" * 100}, (MAIN, "", Purpose.STEP)),
        (
            {"x-openai-subagent": "memory_consolidation"},
            ("memory_consolidation", MAIN, Purpose.SIDE),
        ),
    ],
)
def test_headers_name_chain_and_purpose(
    headers: dict[str, str], origin: tuple[str, str, Purpose]
) -> None:
    """codex names the kind of its sub-agent, its thread, and the parent thread."""
    request = _parse({"input": "x"}, headers).request

    assert (request.chain, request.parent_chain, request.purpose) == origin


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [_said("robot", "x")]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_video"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [_called("")]}, "input[0].call_id"),
        ({"input": "x", "tools": [{"name": "x"}]}, "tools[0].type"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "perdure1:%"}]},
            "input[0].encrypted_content",
        ),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    """Every refusal names the wrong field."""
    with pytest.raises(Refused) as refused:
        _parse(body)

    assert (refused.value.status, refused.value.param) == (400, field)


def test_codex_gets_a_status_after_which_it_retries() -> None:
    """codex gives up at once on 429; after 503 it retries."""
    assert dialect.status(Refused(429, "too_many_calls", "busy")) == 503


def test_a_custom_tool_call_without_input_keeps_its_arguments() -> None:
    """The agent gets the sampled input of a free-text tool in any form."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "apply_patch", "arguments": "[1]"},
    }
    answer = Answer("chatcmpl-1", 0, "m", {"content": "", "tool_calls": [call]}, "tool_calls", {})

    item = json.loads(_parse({"input": "x", "tools": TOOLS}).whole(answer))["output"][0]

    assert (item["type"], item["input"]) == ("custom_tool_call", "[1]")


# --- the real client -------------------------------------------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(SCRIPTS) as engine:
        yield engine


@pytest.fixture
async def gateway(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: LocalGateway) -> AsyncIterator["AsyncOpenAI"]:
    from openai import AsyncOpenAI

    key = await gateway.open("s")
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def _ask(**fields: Any) -> Any:
    """A request as codex sends it: nothing is stored, and the client carries the reasoning."""
    return {
        "model": "any",
        "input": [_said("user", "list the files")],
        "tools": TOOLS,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "prompt_cache_key": "t0",
        **fields,
    }


async def test_a_stream_adds_up_to_the_whole_answer(client: "AsyncOpenAI") -> None:
    """OpenAI's own client assembles from the stream what it also gets in one piece."""
    whole = await client.responses.create(**_ask())
    stream = await client.responses.create(**_ask(), stream=True)
    events = [event async for event in stream]

    assert events[-1].response.to_dict() == whole.to_dict()


async def test_deltas_add_up_to_the_items(client: "AsyncOpenAI") -> None:
    """The client's accumulator rebuilds the texts and the arguments from the deltas alone."""
    async with client.responses.stream(**_ask(tools=[EXEC, SPAWN])) as stream:
        numbers, deltas = [], []
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type.endswith(".delta"):
                deltas.append(event.delta)  # type: ignore[union-attr]

    arguments = ['{"command": "ls"}', '{"task": "look"}', '{"input": "*** Begin"}']
    assert numbers == list(range(len(numbers)))
    assert deltas == ["Where \u00e9 is it?", "I look.", *arguments]


async def test_calls_have_the_clients_own_names(client: "AsyncOpenAI") -> None:
    """Namespaces and free-text tools are restored in the client's answer."""
    output = (await client.responses.create(**_ask())).to_dict()["output"]

    calls = output[-3:]
    assert [(c["type"], c["name"], c.get("namespace")) for c in calls] == [
        ("function_call", "exec", None),
        ("function_call", "spawn", "agents"),
        ("custom_tool_call", "apply_patch", None),
    ]


@pytest.mark.parametrize("kept", ["encrypted_content", "content"])
async def test_an_echoed_turn_is_bridged(
    gateway: LocalGateway, engine: ScriptedEngine, client: "AsyncOpenAI", kept: str
) -> None:
    """Items that come back with their results extend the recorded tokens, including reasoning."""
    ask = _ask()
    items: list[Any] = (await client.responses.create(**ask)).to_dict()["output"]
    items[0] = {"type": "reasoning", "id": "rs_1", "summary": [], kept: items[0][kept]}
    calls = [(i["type"], i["call_id"]) for i in items if "call_id" in i]
    results = [{"type": f"{kind}_output", "call_id": i, "output": "ok"} for kind, i in calls]

    await client.responses.create(**_ask(input=[*ask["input"], *items, *results]))

    assert (await gateway.control.get("s")).bridge_misses == {"first": 1}


async def test_a_truncated_answer_says_so_and_completes_the_stream(
    client: "AsyncOpenAI",
) -> None:
    """codex takes `response.incomplete` for a broken stream; other clients read the status."""
    ask = _ask(input=[_said("user", "long answer")], max_output_tokens=16, stream=True)
    last = [event async for event in await client.responses.create(**ask)][-1]

    assert (last.type, last.response.status) == ("response.completed", "incomplete")


async def test_errors_are_the_clients_own_types(
    engine: ScriptedEngine,
    gateway: LocalGateway,
    client: "AsyncOpenAI",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exhausted context, a bad request, a failing engine and a closed session raise typed
    errors."""
    import openai

    monkeypatch.setattr("perdure.engines.pool.engine_pool.MOST_MOVES", 0)
    key = await gateway.open("tiny", sampling=Sampling(max_context_tokens=20))
    with pytest.raises(openai.BadRequestError) as exhausted:
        await client.with_options(api_key=key).responses.create(**_ask(stream=True))
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(**_ask(previous_response_id="resp_1"))
    # An engine that refuses before it has ever served has a wrong setting, which is another error.
    served = await gateway.open("served")
    await client.with_options(api_key=served).responses.create(**_ask())
    engine.faults = Faults(kind="status", status=400)
    with pytest.raises(openai.InternalServerError, match="the engine"):
        await client.responses.create(**_ask())
    await gateway.control.close("s")
    with pytest.raises(openai.PermissionDeniedError):
        await client.responses.create(**_ask())

    assert exhausted.value.code == "context_length_exceeded"
