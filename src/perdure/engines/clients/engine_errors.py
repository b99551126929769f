"""Decides what an engine's answer without a completion means, and words it for users.

Only the content of the request may end a rollout with a verdict. The policy is not to blame for what an
engine, or a proxy in front of it, can cause. So an answer counts as a refusal of the content only if its
status and its error body both say so. After any other answer, the call waits or moves to another engine.
"""

import json
import re
from typing import Any

import httpx

from perdure.dialects.base import Refused

CONTENT_STATUSES = frozenset({400, 413, 422})
"""Statuses with which servers refuse a request because of its content."""
KEY_STATUSES = frozenset({401, 403})
TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
"""Statuses of a server that is temporarily busy, in addition to 5xx."""
TOO_LONG = re.compile(
    r"context.?length|maximum model length|maximum context|max_model_len"
    r"|(?:prompt|input|context|messages?|request)\b[^.]{0,40}\btoo (?:long|large)"
    r"|too many (?:input |prompt )?tokens|string_above_max_length|request_too_large",
    re.IGNORECASE,
)
"""How servers word that a prompt is too long: OpenAI, Anthropic, vLLM, SGLang, TGI."""
CONTENT_POLICY = re.compile(
    r"content.?filter|content.?policy|content management policy|usage polic|safety system"
    r"|ResponsibleAIPolicyViolation",
    re.IGNORECASE,
)
NAMES = (
    r"(?:messages?|tools?|tool_choice|tool_calls?|tool_use|tool_result|functions?|input_schema"
    r"|json_schema|response_format|system|stop|stop_sequences|max_tokens|max_completion_tokens"
    r"|max_new_tokens|temperature|top_p|top_k|min_p|seed|(?:presence|frequency|repetition)_penalty"
    r"|logprobs|structured_outputs|image_url|image)"
)
"""Fields of a model call. `model` is not among them, because the settings decide it."""
FIELD = re.compile(rf"\b{NAMES}\b")
"""A field that a server names in `param` or `loc`."""
FIELD_IN_PROSE = re.compile(
    rf"[`'\"]{NAMES}\b|\b{NAMES}(?:\.\d|\[\d|:)"
    r"|\b(?:max_(?:\w+_)?tokens|temperature|top_[pk]|min_p|tool_choice|tool_(?:use|result)"
    r"|(?:presence|frequency|repetition)_penalty|response_format|(?:json|input)_schema"
    r"|structured_outputs|logprobs)\b|\bfunction '"
)
"""A field in a sentence: quoted, with an index or a colon, or a name that is not an English word. "The
system is overloaded" names none."""
NO_CREDIT = (
    *("insufficient_quota", "exceeded your current quota", "billing hard limit"),
    *("credit balance is too low", "reached your specified api usage limits"),
)
"""How OpenAI and Anthropic word that an account has no credit, or has spent what its owner allows."""
RATE = "resource_exhausted"
"""Gemini's status for a rate limit, whose message is OpenAI's message for an empty account."""
SECRET = re.compile(r"[\w*.-]{20,}")
"""Text that may be a key, or a part of one, in the answer of a server that refused it."""
TOLD = ("message", "code", "type", "error")
"""Fields of an error object that describe the error."""
READ_CHARS = 5000
"""Characters of an error body that are searched."""


def content_refusal(name: str, status: int, text: str) -> Refused | None:
    """The refusal for the agent, if the content of its request caused the answer; otherwise None."""
    told = _error_object(text) if status in CONTENT_STATUSES else None
    if told is None or lacks_credit(status, text):
        return None
    said = f"the engine {name} answered {status}: {sentence(text)}"
    shown = " ".join(_text(told.get(name)) for name in TOLD)[:READ_CHARS]
    if TOO_LONG.search(shown):
        return Refused(400, "context_length_exceeded", said)
    if CONTENT_POLICY.search(shown) or _names_a_field(told):
        return Refused(400, "engine_refused", said)
    return None


def trouble(name: str, status: int, text: str, key_source: str = "") -> str:
    """A sentence for users about an answer that the request did not cause: the answer, and the fix.

    `key_source`: the environment variable of the key. The key itself is never shown.
    """
    key = f"the key in {key_source}" if key_source else "the engine's key"
    said = f"the engine {name} answered {status}: {sentence(text)}"
    if lacks_credit(status, text):
        return f"{said}. Add credit to the account of {key}, then `perdure accounts open`"
    if status in KEY_STATUSES:
        hidden = SECRET.sub("…", sentence(text))
        return f"the engine {name} answered {status}: {hidden}. Check {key}"
    if status == httpx.codes.NOT_FOUND:
        return f"{said}. Name a model that it serves with --model or PERDURE_ENGINE__MODEL"
    return said


def is_transient(status: int, text: str) -> bool:
    """Whether the error may pass without action. Otherwise a user may have to fix a key, a model name or
    the account's credit."""
    return (status >= 500 or status in TRANSIENT_STATUSES) and not lacks_credit(status, text)


def lacks_credit(status: int, text: str) -> bool:
    """Whether the account has no credit. Hosted APIs send 402, 400, 403 or 429 for this."""
    said = text[:READ_CHARS].lower()
    if status == httpx.codes.PAYMENT_REQUIRED:
        return True
    return status < 500 and RATE not in said and any(words in said for words in NO_CREDIT)


def sentence(text: str) -> str:
    """The message of an error answer, without the JSON around it."""
    try:
        told = json.loads(text)
    except ValueError:
        return excerpt(text)
    for name in ("error", "message", "detail"):
        if isinstance(told, dict) and name in told:
            told = told[name]
    return excerpt(told if isinstance(told, str) else text).rstrip(".")


def excerpt(text: str) -> str:
    return " ".join(text[:500].split())


def _error_object(text: str) -> dict[str, Any] | None:
    """The error of a JSON answer: `error` from OpenAI and Anthropic, SGLang's flat form, `detail` from
    FastAPI. None if the answer does not come from an inference API."""
    try:
        told = json.loads(text)
    except ValueError:
        return None
    if not isinstance(told, dict):
        return None
    error = told.get("error")
    if isinstance(error, dict):
        return error
    return told if error or "message" in told or "detail" in told else None


def _names_a_field(error: dict[str, Any]) -> bool:
    """Whether the error names a field of the request."""
    detail = error.get("detail")
    found = detail if isinstance(detail, list) else []
    places = [error.get("param"), *(one.get("loc") for one in found if isinstance(one, dict))]
    told = [error.get("message"), error.get("error")]
    return any(FIELD.search(_text(one)) for one in places) or any(
        isinstance(one, str) and FIELD_IN_PROSE.search(one) for one in told
    )


def _text(named: object) -> str:
    return " ".join(map(str, named)) if isinstance(named, list | tuple) else str(named or "")
