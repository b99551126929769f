"""A refusal counts as a verdict only if the content of the request caused it."""

import json

import pytest

from perdure.engines.clients.engine_errors import (
    content_refusal,
    is_transient,
    lacks_credit,
    trouble,
)

OPENAI = {"message": "Invalid schema for function 'bash'", "type": "invalid_request_error"}
CONTENT = {
    "vLLM: length": (400, {"error": {"message": "This model's maximum context length is 8192 tokens"}}),
    "vLLM: old form": (400, {"object": "error", "message": "prompt is too long", "code": 400}),
    "OpenAI: schema": (400, {"error": {**OPENAI, "param": "tools[0].function.parameters"}}),
    "OpenAI: policy": (400, {"error": {"message": "flagged", "code": "content_policy_violation"}}),
    "Azure: policy": (400, {"error": {"message": "m", "code": "content_filter"}}),
    "Anthropic: length": (400, {"type": "error", "error": {"message": "prompt is too long: 3 > 2"}}),
    "Anthropic: size": (413, {"type": "error", "error": {"type": "request_too_large", "message": "m"}}),
    "Anthropic: schema": (400, {"error": {"message": "messages.3: `tool_use` ids without results"}}),
    "FastAPI": (422, {"detail": [{"loc": ["body", "max_tokens"], "msg": "no integer"}]}),
    "SGLang": (400, {"object": "error", "message": "temperature must be at least 0"}),
}  # fmt: skip
TROUBLE = {
    "bare": (400, b""),
    "a proxy's page": (413, b"<html><h1>413 Request Entity Too Large</h1> context length</html>"),
    "a list": (400, b'["context length"]'),
    "no words": (400, b"{}"),
    "upstream": (400, {"error": "upstream connect error"}),
    "no deployment": (400, {"error": {"message": "Invalid model name passed in model=x"}}),
    "out of money": (400, {"error": {"message": "Your credit balance is too low for messages"}}),
    "a slow upstream": (400, {"error": {"message": "Upstream took too long to respond"}}),
    "a failing proxy": (400, {"error": {"message": "internal system error, retry later"}}),
    "an overload": (400, {"error": {"message": "the system is overloaded"}}),
    "a broken line": (400, {"message": "failed to decode upstream message"}),
    "a shutdown": (400, {"error": {"message": "stop requested, node is shutting down"}}),
    "a container": (422, {"error": "container image not ready"}),
    "disabled": (400, {"error": {"message": "This organization has been disabled."}}),
    "a key, in the content's words": (401, {"error": {"message": "messages", "param": "messages"}}),
    "a rate": (429, {"error": {"message": "too many tokens: maximum context length"}}),
    "a failure": (500, {"error": {"message": "maximum context length"}}),
}


@pytest.mark.parametrize("case", CONTENT)
def test_a_refusal_of_the_content_reaches_the_agent(case: str) -> None:
    """It is a 400, 413 or 422 with an error body about length, schema or content policy."""
    status, body = CONTENT[case]
    refused = content_refusal("e", status, json.dumps(body))

    assert refused is not None
    assert (refused.code == "context_length_exceeded") == ("length" in case or "size" in case or "old" in case)  # fmt: skip


@pytest.mark.parametrize("case", TROUBLE)
def test_any_other_answer_is_an_engine_failure(case: str) -> None:
    """The policy is not to blame for what an engine or a proxy can cause."""
    status, body = TROUBLE[case]
    text = body.decode() if isinstance(body, bytes) else json.dumps(body)

    assert content_refusal("e", status, text) is None
    assert trouble("e", status, text).startswith(f"the engine e answered {status}: ")


def test_only_three_statuses_can_refuse_the_content() -> None:
    """Other statuses cannot, even if their body says so."""
    body = json.dumps({"error": {"message": "maximum context length", "param": "messages"}})
    found = {status for status in range(100, 600) if content_refusal("e", status, body)}

    assert found == {400, 413, 422}


def test_temporary_errors_are_told_from_those_that_a_user_must_fix() -> None:
    """A server error or a busy server passes; a wrong key, a wrong model or an empty account may
    not."""
    assert [is_transient(status, "") for status in (429, 503, 529, 401, 402, 404, 302)] == [True] * 3 + [False] * 4  # fmt: skip
    assert not is_transient(429, '{"error": {"code": "insufficient_quota"}}')


CREDIT = {
    "OpenAI": (429, {"message": "You exceeded your current quota, please check your plan", "code": "insufficient_quota"}),
    "OpenAI: hard limit": (400, {"message": "Billing hard limit has been reached"}),
    "Anthropic": (400, {"message": "Your credit balance is too low to access the Anthropic API."}),
    "Anthropic: limit": (400, {"message": "You have reached your specified API usage limits."}),
    "OpenRouter": (402, {"message": "Insufficient credits. Add more.", "code": 402}),
    "DeepSeek": (402, {"message": "Insufficient Balance"}),
}  # fmt: skip
NOT_CREDIT = {
    "OpenAI: rate": (429, {"message": "Rate limit reached for gpt-x on requests per min (RPM)"}),
    "Gemini: rate": (429, {"message": "You exceeded your current quota", "status": "RESOURCE_EXHAUSTED"}),
    "a failure": (500, {"message": "Your credit balance is too low"}),
}  # fmt: skip


@pytest.mark.parametrize("case", [*CREDIT, *NOT_CREDIT])
def test_an_account_without_credit_is_told_from_a_rate_limit(case: str) -> None:
    """Its rollouts are parked, so a rate limit that passes in seconds must not count."""
    status, error = (CREDIT | NOT_CREDIT)[case]

    assert lacks_credit(status, json.dumps({"error": error})) == (case in CREDIT)
