"""Anthropic Messages: the gateway reads Claude Code's requests, and Claude Code can read its
answers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perdure.dialects import anthropic as dialect
from perdure.dialects.base import MAIN, Answer, ContextExhausted, ModelRequest, Refused
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import Faults, ScriptedEngine
from perdure.types import Purpose, Sampling
from tests.checkout_paths import ROOT

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic  # takes a second, so it is imported once per process

TOOL = {"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}}
SCRIPTS = {
    "scripts": [
        {
            "match": "list the files",
            "turns": [
                {
                    "content": "I look.",
                    "reasoning": "Where is it?",
                    "tool_calls": [{"name": "Bash", "arguments": {"command": "ls"}}],
                },
                {"content": "There is one file."},
            ],
        },
        {"match": "say nothing", "turns": [{"content": "", "reasoning": "Hm."}]},
    ],
    "default": {"turns": [{"content": "Hello."}]},
}
RECORDINGS = ROOT.parent / "shared/data/trajectories/claude_code"


def _parse(body: dict[str, Any], headers: dict[str, str] | None = None) -> ModelRequest:
    return dialect.parse(json.dumps({"model": "m", **body}).encode(), headers or {}).request


def _messages(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return _parse({"messages": list(messages), **fields}).messages


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def _answer(**message: Any) -> Answer:
    usage = {"prompt_tokens": 812, "completion_tokens": 64}
    return Answer(
        "chatcmpl-1", 0, "m", {"role": "assistant", "content": "", **message}, "stop", usage
    )


CALL = {"id": "call_1", "type": "function", "function": {"name": "Bash", "arguments": '{"a": 1}'}}


def _framed(answer: Answer) -> dict[str, Any]:
    request = _parse({"messages": [_user("x")]})
    message: dict[str, Any] = json.loads(dialect.ParsedRequest(request, False).whole(answer))
    return message


# --- requests --------------------------------------------------------------------------------


def test_system_blocks_become_one_message_without_the_billing_block() -> None:
    """The client's own header block and all cache marks are left out of the model's text."""
    blocks = [
        _text("x-anthropic-billing-header: cc_version=2"),
        _text("You fix code.", cache_control={"type": "ephemeral"}),
        _text("Be brief."),
    ]

    system = _messages(_user("x"), system=blocks)[0]

    assert system == {"role": "system", "content": "You fix code.\n\nBe brief."}


def test_a_block_list_equals_its_text() -> None:
    """A message changes between list and string as the cache mark moves; it stays the same
    message."""
    marked = _text("Go on.", cache_control={"type": "ephemeral"})

    assert _messages(_user([marked])) == _messages(_user("Go on."))


def test_a_newline_added_in_merging_blocks_changes_nothing() -> None:
    """Claude Code ends an earlier text block with a newline when it merges blocks."""
    merged = _messages(_user([_text("one\n"), _text("two")]))

    assert merged == _messages(_user([_text("one"), _text("two")]))


def test_a_system_message_keeps_its_position() -> None:
    """Moving reminders to the start would rewrite the prefix of every turn."""
    found = _messages(_user("a"), {"role": "system", "content": "now"}, _user("b"))

    assert [message["role"] for message in found] == ["user", "system", "user"]


def test_tool_results_keep_their_order_and_text_follows() -> None:
    """Results arrive in order of completion; the user's text is a separate message."""
    content = [
        {"type": "tool_result", "tool_use_id": "b", "content": [_text("two"), _text("lines")]},
        {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "failed"},
        _text("Go on."),
    ]

    assert _messages(_user(content)) == [
        {"role": "tool", "tool_call_id": "b", "content": "two\nlines"},
        {"role": "tool", "tool_call_id": "a", "content": "failed"},
        {"role": "user", "content": "Go on."},
    ]


def test_an_image_of_the_user_becomes_a_note() -> None:
    """The note has the image's position, and the rollout continues."""
    content = [{"type": "image", "source": {}}, _text("What is it?")]

    assert _messages(_user(content)) == [
        {"role": "user", "content": "[image not shown: this model reads text]\nWhat is it?"}
    ]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "tool_reference", "tool_name": "Grep"}, "Tool Grep is available."),
        ({"type": "image", "source": {}}, "[image not shown: this model reads text]"),
    ],
)
def test_a_tool_result_becomes_text_whatever_it_holds(part: dict[str, Any], text: str) -> None:
    """An image that a tool happened to read does not end the rollout."""
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}

    assert _messages(_user([result]))[0]["content"] == text


def test_thinking_becomes_reasoning() -> None:
    """An assistant's blocks become one message with reasoning, text and calls."""
    content = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        _text("I look."),
        {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}},
    ]

    assistant = _messages(_user("x"), {"role": "assistant", "content": content})[1]

    function = {"name": "Bash", "arguments": '{"command": "ls"}'}
    assert assistant == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "t", "type": "function", "function": function}],
    }


def test_tools_with_and_without_a_schema_are_functions() -> None:
    """A built-in tool has no schema, so its description has its name and type."""
    builtin = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    custom = {**TOOL, "defer_loading": False, "cache_control": {"type": "ephemeral"}}

    tools = _parse({"messages": [_user("x")], "tools": [custom, builtin]}).tools

    assert [tool["function"] for tool in tools or ()] == [
        {"name": "Bash", "description": "Run.", "parameters": {"type": "object"}},
        {
            "name": "str_replace_based_edit_tool",
            "description": "The built-in tool text_editor_20250728.",
            "parameters": {"type": "object", "properties": {}},
        },
    ]


def test_settings_of_a_request_are_read() -> None:
    """Sampling, the token limit and the tool choice are read, and a hosted engine gets the same."""
    fields = {
        "max_tokens": 32000,
        "temperature": 0.5,
        "top_k": 20,
        "stop_sequences": ["END"],
        "thinking": {"type": "adaptive"},
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    }

    request = _parse({"messages": [_user("x")], **fields})

    sampling = {"temperature": 0.5, "top_k": 20, "stop": ["END"]}
    assert (request.max_tokens, request.sampling) == (32000, sampling)
    assert request.body["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("headers", "chain", "parent"),
    [
        ({}, MAIN, ""),
        ({"x-claude-code-agent-id": "a1"}, "a1", MAIN),
        ({"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}, "a2", "a1"),
    ],
)
def test_headers_name_the_chain(headers: dict[str, str], chain: str, parent: str) -> None:
    """A sub-agent is identified by its own id, and a nested one also by its parent's id."""
    request = _parse({"messages": [_user("x")]}, headers)

    assert (request.chain, request.parent_chain) == (chain, parent)


def test_an_invalid_agent_id_is_refused() -> None:
    """Chains are named in the journal, so their names are checked."""
    with pytest.raises(Refused, match="x-claude-code-agent-id"):
        _parse({"messages": [_user("x")]}, {"x-claude-code-agent-id": "../../etc"})


@pytest.mark.parametrize(
    ("content", "fields", "purpose"),
    [
        ("x", {"tools": [TOOL]}, Purpose.STEP),
        ("x", {"tools": []}, Purpose.STEP),
        ("<session>\nadd() subtracts\n</session>", {"tools": []}, Purpose.SIDE),
        ("<session>\nadd() subtracts\n</session>", {"tools": [TOOL]}, Purpose.STEP),
        (
            "x",
            {"tools": [], "output_config": {"format": {"type": "json_schema"}}},
            Purpose.SIDE,
        ),
        ([_text("a"), _text("CRITICAL: Respond with TEXT ONLY. Do")], {}, Purpose.COMPACTION),
        ([_text("CRITICAL: Respond with TEXT ONLY. Do"), _text("a")], {}, Purpose.STEP),
    ],
)
def test_the_purpose_is_decided_by_unambiguous_marks(
    content: Any, fields: dict[str, Any], purpose: Purpose
) -> None:
    """Titles and summaries are distinguished from the agent's own steps."""
    assert _parse({"messages": [_user(content)], **fields}).purpose is purpose


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not here")
def test_recorded_compactions_are_found() -> None:
    """In recorded traffic, exactly the requests for a summary count as compactions."""
    requests = json.loads((RECORDINGS / "compact.json").read_text())["requests"]
    parsed = [_parse(request["body"], request["headers"]) for request in requests]

    compactions = [i for i, r in enumerate(parsed) if r.purpose is Purpose.COMPACTION]

    assert compactions == [2, 4, 6]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [_user({"a": 1})]}, "messages[0].content"),
        ({"messages": [_user([{"type": "video"}])]}, "messages[0].content[0].type"),
        ({"messages": [_user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [_user("x")], "tools": [{}]}, "tools[0].name"),
        ({"messages": [_user("x")], "tools": [TOOL] * 10_000}, "tools"),
        ({"messages": [_user("x")], "max_tokens": 0}, "max_tokens"),
        ({"messages": [_user("x")], "temperature": "hot"}, "temperature"),
        ({"messages": [_user("x")], "tool_choice": {"type": 1}}, "tool_choice.type"),
        ({"messages": [_user("x")], "stream": 1}, "stream"),
        ({"messages": [_user("x")], "model": 7}, "model"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    """Every refusal names the wrong field."""
    with pytest.raises(Refused) as refused:
        _parse(body)

    assert (refused.value.status, refused.value.param) == (400, field)


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason", "stop_reason"),
    [
        ({"content": "x"}, "stop", "end_turn"),
        ({"content": "x"}, "length", "max_tokens"),
        ({"tool_calls": [CALL]}, "tool_calls", "tool_use"),
        ({"tool_calls": [CALL]}, "length", "tool_use"),
        ({"content": "x"}, "content_filter", "end_turn"),
    ],
)
def test_a_turn_ends_in_one_of_three_ways(
    message: dict[str, Any], reason: str, stop_reason: str
) -> None:
    """On any other stop reason, Claude Code ends or loops."""
    answer = _answer(**message)

    framed = _framed(Answer(**{**vars(answer), "finish_reason": reason}))

    assert framed["stop_reason"] == stop_reason


def test_text_comes_before_tool_use_and_after_thinking() -> None:
    """The client would move text before tool use itself. In this order, the echo equals the
    answer."""
    framed = _framed(_answer(content="Text.", reasoning_content="Hm.", tool_calls=[CALL]))

    assert [block["type"] for block in framed["content"]] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_answer_always_has_visible_text_and_its_echo_is_the_empty_text(content: str) -> None:
    """Claude Code drops a turn without visible output and asks again forever."""
    blocks = _framed(_answer(content=content, reasoning_content="Hm."))["content"]

    echoed = _messages(_user("x"), {"role": "assistant", "content": blocks})[1]

    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[1]["text"].strip() != "", echoed["content"]) == (True, "")


def test_sampled_arguments_that_are_not_standard_json_are_passed_as_text() -> None:
    """Python parses NaN, but clients do not, so an answer is always standard JSON."""
    call = {**CALL, "function": {"name": "Bash", "arguments": '{"a": NaN}'}}

    framed = _framed(_answer(tool_calls=[call]))

    assert framed["content"][0]["input"] == {"arguments": '{"a": NaN}'}


def test_events_come_in_the_documented_order() -> None:
    """Each block has a start, one delta and a stop; the stop reason and the end follow."""
    request = _parse({"messages": [_user("x")]})
    answer = _answer(content="Text.", reasoning_content="Hm.", tool_calls=[CALL])

    stream = dialect.ParsedRequest(request, True).events(answer).decode()

    names = [line.removeprefix("event: ") for line in stream.split("\n") if "event: " in line]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block * 3, "message_delta", "message_stop"]


def test_an_exhausted_context_has_the_text_that_triggers_compaction() -> None:
    """Claude Code compacts if it reads this text with both numbers; otherwise it exits."""
    error = json.loads(dialect.error(ContextExhausted(210_000, 200_000)))

    message = "prompt is too long: 210000 tokens > 200000 maximum"
    assert error == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": message},
    }


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
async def client(gateway: LocalGateway) -> "AsyncIterator[AsyncAnthropic]":
    from anthropic import AsyncAnthropic

    key = await gateway.open("s")
    async with AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
        yield client


def _ask(text: str = "list the files", **fields: Any) -> Any:
    return {"model": "any", "max_tokens": 500, "messages": [_user(text)], "tools": [TOOL], **fields}


async def test_a_stream_adds_up_to_the_whole_answer(client: "AsyncAnthropic") -> None:
    """Anthropic's own client assembles from the stream what it also gets in one piece."""
    whole = await client.messages.create(**_ask())
    async with client.messages.stream(**_ask()) as stream:
        streamed = await stream.get_final_message()

    assert streamed.model_dump(exclude_none=True) == whole.model_dump(exclude_none=True)


async def test_an_echoed_turn_is_bridged(gateway: LocalGateway, client: "AsyncAnthropic") -> None:
    """Blocks that come back with the tool result extend the recorded tokens."""
    first = await client.messages.create(**_ask())
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "a.py"}
    echo = {"role": "assistant", "content": json.loads(first.to_json())["content"]}

    await client.messages.create(**_ask(messages=[_user("list the files"), echo, _user([result])]))

    assert (await gateway.control.get("s")).bridge_misses == {"first": 1}


async def test_counted_tokens_equal_the_turns_prompt(
    client: "AsyncAnthropic",
) -> None:
    """Counting returns the turn's prompt tokens, samples nothing, and never returns 0."""
    ask = _ask()
    counted = await client.messages.count_tokens(
        model="any", messages=ask["messages"], tools=ask["tools"]
    )

    assert counted.input_tokens == (await client.messages.create(**ask)).usage.input_tokens


async def test_errors_are_the_clients_own_types(
    engine: ScriptedEngine, gateway: LocalGateway, client: "AsyncAnthropic"
) -> None:
    """A bad request, a wrong key and a closed session raise the matching errors of Anthropic's
    client."""
    import anthropic

    wrong = client.with_options(api_key="s.0")

    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(**_ask(extra_body={"temperature": -1}))
    with pytest.raises(anthropic.AuthenticationError):
        await wrong.messages.create(**_ask())
    await gateway.control.close("s")
    with pytest.raises(anthropic.PermissionDeniedError):
        await client.messages.create(**_ask())


async def test_an_exhausted_context_budget_has_the_clients_text(
    gateway: LocalGateway,
) -> None:
    """A session without remaining context gets 400 before a token is sampled."""
    import anthropic

    key = await gateway.open("tiny", sampling=Sampling(max_context_tokens=20))
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 20 max"
        ):
            await client.messages.create(**_ask())


async def test_an_engine_failure_is_an_error_and_not_an_empty_answer(
    engine: ScriptedEngine, client: "AsyncAnthropic", monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an engine refuses until the patience ends, the client gets an overload error, after which
    it may retry."""
    import anthropic

    monkeypatch.setattr("perdure.engines.pool.engine_pool.MOST_MOVES", 0)
    engine.faults = Faults(kind="status", status=400)

    with pytest.raises(anthropic.APIStatusError, match="the engine"):
        await client.messages.create(**_ask())


async def test_claude_codes_probes_are_answered(gateway: LocalGateway) -> None:
    """Claude Code checks whether the server answers before it sends its key."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
        answers = [await http.head("/"), await http.head("/api/hello")]

    assert [answer.status_code for answer in answers] == [200, 200]


async def test_models_are_listed_in_anthropics_form(client: "AsyncAnthropic") -> None:
    """The client's own header decides the list's form."""
    models = await client.models.list()

    assert [model.id for model in models.data] == ["policy"]


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not here")
async def test_recorded_requests_are_served(gateway: LocalGateway) -> None:
    """Every body of a recorded session, sent with its headers, gets a complete stream."""
    requests = json.loads((RECORDINGS / "subfg.json").read_text())["requests"]
    key = await gateway.open("recorded", sampling=Sampling(max_context_tokens=100_000))
    ends = []
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for request in requests:
            headers = {k: v for k, v in request["headers"].items() if k.startswith("x-claude")}
            headers["authorization"] = f"Bearer {key}"
            answer = await http.post(request["path"], json=request["body"], headers=headers)
            ends.append(answer.text.rstrip().rpartition("event: ")[2].partition("\n")[0])

    assert ends == ["message_stop"] * len(requests)
