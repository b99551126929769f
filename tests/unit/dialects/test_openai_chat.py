"""OpenAI Chat Completions: what its many clients send in addition to plain chat."""

import json
from typing import Any

import pytest

from perdure.dialects import openai_chat as dialect
from perdure.dialects.base import MAIN, ContextExhausted, ModelRequest, Refused
from perdure.types import Purpose

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
OPENCODE = {"x-session-affinity": "ses_1", "x-session-id": "ses_1"}
QWEN = {"user-agent": "QwenCode/0.15.10 (linux; x64)"}


TITLE = {"messages": [{"role": "system", "content": "You are a title generator. You output ONLY"}]}
SUMMARY = "You are a context summarization agent. You are given a conversation between a user"


def _parse(body: dict[str, Any], headers: dict[str, str] | None = None) -> ModelRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **body}
    return dialect.parse(json.dumps(body).encode(), headers or {}).request


@pytest.mark.parametrize(
    ("headers", "body", "purpose"),
    [
        (OPENCODE, TITLE, Purpose.SIDE),
        (OPENCODE, {**TITLE, "tools": [TOOL]}, Purpose.STEP),
        (OPENCODE, {"reasoning_effort": "low"}, Purpose.STEP),
        ({}, TITLE, Purpose.STEP),
        (OPENCODE, {}, Purpose.STEP),
        ({}, {"reasoning_effort": "low"}, Purpose.STEP),
        (QWEN, {"stream": False}, Purpose.SIDE),
        (QWEN, {"stream": True}, Purpose.STEP),
        (QWEN, {"tools": [TOOL]}, Purpose.STEP),
        ({}, {"stream": False}, Purpose.STEP),
    ],
)
def test_side_requests_are_detected_by_unambiguous_marks(
    headers: dict[str, str], body: dict[str, Any], purpose: Purpose
) -> None:
    """A title request is not a step; steps of an agent without any tools still are."""
    assert _parse(body, headers).purpose is purpose


def test_opencodes_summary_is_a_compaction() -> None:
    """The main agent continues from the summary."""
    messages = [{"role": "system", "content": SUMMARY}, {"role": "user", "content": "[User]: fix"}]

    assert _parse({"messages": messages}, OPENCODE).purpose is Purpose.COMPACTION


def test_openhands_summary_is_a_compaction() -> None:
    """It sends no name, but no agent step without tools has this system text."""
    text = "You are maintaining a context-aware state summary for an interactive agent."
    messages = [{"role": "system", "content": [{"type": "text", "text": text}]}]

    assert _parse({"messages": messages}).purpose is Purpose.COMPACTION
    assert _parse({"messages": messages, "tools": [TOOL]}).purpose is Purpose.STEP


def test_qwen_codes_summary_is_a_compaction() -> None:
    """The history continues from it, so it is not a side request."""
    last = {"role": "user", "content": "Then, generate the <state_snapshot>."}

    assert _parse({"messages": [last]}, QWEN).purpose is Purpose.COMPACTION


@pytest.mark.parametrize(
    ("headers", "chain", "parent"),
    [
        ({}, MAIN, ""),
        (OPENCODE, MAIN, ""),
        ({"x-session-id": "anything at all"}, MAIN, ""),
        ({"x-session-affinity": "ses_2", "x-parent-session-id": "ses_1"}, "ses_2", MAIN),
    ],
)
def test_a_session_header_names_a_chain_only_with_a_parent(
    headers: dict[str, str], chain: str, parent: str
) -> None:
    """The session key identifies the rollout; opencode's sub-agents have separate sessions."""
    request = _parse({}, headers)

    assert (request.chain, request.parent_chain) == (chain, parent)


def test_an_assistant_message_that_was_never_sampled_is_context() -> None:
    """Qwen Code starts with a reply that no model gave; parts, nulls and unknown fields are
    accepted."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "Got it.", "provider_specific_fields": {}, "audio": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]

    found = _parse({"messages": messages}).messages

    assert [message["content"] for message in found] == ["ab", "Got it.", "No."]


@pytest.mark.parametrize("role", ["tool", "user"])
def test_an_image_becomes_a_note(role: str) -> None:
    """The rollout continues, and a note tells the model that it cannot see the image."""
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    message = {"role": role, "tool_call_id": "a", "content": [part]}

    content = _parse({"messages": [message]}).messages[0]["content"]

    assert content == "[image_url not shown: this model reads text]"


def test_common_fields_of_clients_are_accepted() -> None:
    """Unused fields have no effect, and the smaller token limit applies."""
    fields = {
        "max_tokens": 8000,
        "max_completion_tokens": 4000,
        "reasoning_effort": "high",
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "stream_options": {"include_usage": True},
        "stop": "END",
        "temperature": None,
        "user": "u",
    }

    request = _parse(fields)

    assert (request.max_tokens, request.sampling) == (4000, {"stop": ["END"]})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "x", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL] * 10_000}, "tools"),
        ({"messages": [{"role": "user", "content": ""}] * 20_000}, "messages"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 1 << 70}, "seed"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    """Every refusal names the wrong field."""
    with pytest.raises(Refused) as refused:
        _parse(body)

    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": 1e999}',
        b'{"a": -Infinity}',
        b'{"a": "\xed\xa0\x80"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}",
        b'{"a": [' + b"0," * 600_000 + b"0]}",
        b'{"a": [' + b'"",' * 600_000 + b"0]}",
        b'{"a": "' + b',"' * 2_000_000,
    ],
    ids=["too large", "infinite", "half a pair", "utf-16", "deep", "wide", "texts", "unclosed"],
)
def test_json_above_the_limits_is_refused(raw: bytes) -> None:
    """The limits cover numbers, encodings, depth and size that later stages could not handle."""
    with pytest.raises(Refused) as refused:
        dialect.parse(raw)

    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_a_text_full_of_json_is_not_many_values() -> None:
    """The content of a string is text, even if it looks like JSON."""
    text = '[{"a": "b\\\\"}, ' * 300_000

    assert _parse({"messages": [{"role": "user", "content": text}]}).messages[0]["content"] == text


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    """JavaScript agents cut strings between surrogates; whole pairs stay unchanged."""
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d\\ude00 \\ud83d"}]}'

    content = dialect.parse(raw).request.messages[0]["content"]

    assert content == "\U0001f600 \ufffd"


def test_an_exhausted_context_has_the_code_that_clients_check() -> None:
    """opencode and Qwen Code check the code, other clients the text."""
    error = json.loads(dialect.error(ContextExhausted(210, 200)))["error"]

    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 200 tokens" in error["message"]
