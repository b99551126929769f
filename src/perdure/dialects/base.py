"""The contract of a dialect, a module that reads and writes one protocol of agents.

A new dialect is one module with these names and one line in `http_app.DIALECTS`. The gateway handles
sessions, keys and limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.errors import PerdureError
from perdure.types import Purpose

MAIN = "main"
"""The main agent's chain. A sub-agent's chain has the name that its harness gives it."""


class Refused(PerdureError):
    """A call that the gateway answers with an error in the caller's dialect, and does not retry.

    Example:
        Refused(400, "context_length_exceeded", "This model's maximum context length is ...")
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class ContextExhausted(Refused):
    """The context budget is used up. Each dialect writes the error that its clients recognize.

    `prompt_tokens` and `limit` are counts of tokens.
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


@dataclass(frozen=True)
class ModelRequest:
    """One model call in the gateway's own message form, which is the same for all dialects.

    `messages`: dicts with role (system, user, assistant, tool), content (text) and, if given,
    reasoning_content, tool_calls, tool_call_id, name. A system message may have any position and is
    rendered there. `tools`: OpenAI function tools. `body`: the request as an OpenAI Chat Completions
    body, which hosted engines get and which holds tool choice and response format. `chain`,
    `parent_chain` and `purpose` come from marks that the client sets (headers, forms of the request),
    never from guesses. `mark` is what the client sent in the header `AGENT_HEADER`, which the gateway
    reads.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    max_tokens: int | None
    body: dict[str, Any]
    chain: str = MAIN
    parent_chain: str = ""
    purpose: Purpose = Purpose.STEP
    mark: str = ""


@dataclass(frozen=True)
class Answer:
    """The agent's answer in a neutral form, which each dialect frames as one JSON object or a stream.

    Example:
        Answer("chatcmpl-...", 1763700000, "policy",
               {"role": "assistant", "content": "...", "tool_calls": [...]}, "tool_calls",
               {"prompt_tokens": 812, "completion_tokens": 64, "total_tokens": 876})
    """

    id: str
    created: int
    model: str
    message: dict[str, Any]
    finish_reason: str
    usage: dict[str, Any]
    stop_sequence: str | None = None
    """The request's stop text that ended the answer. `message` ends before it."""


class ParsedCall(Protocol):
    """One parsed model call, which frames its own answer."""

    @property
    def request(self) -> ModelRequest: ...

    @property
    def stream(self) -> bool: ...

    def whole(self, answer: Answer) -> bytes:
        """The answer as one JSON object."""
        ...

    def events(self, answer: Answer) -> bytes:
        """The answer as one complete event stream. The same answer gives the same bytes."""
        ...


class Dialect(Protocol):
    """Implemented by the modules `anthropic`, `openai_chat` and `openai_responses`, and by
    `gemini.Gemini`."""

    @property
    def PING(self) -> bytes:
        """Bytes that keep an open stream alive until its answer is ready."""
        ...

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> ParsedCall:
        """`headers`: by lower-case name. Raises: Refused (400), which names the field."""
        ...

    def status(self, refused: Refused) -> int:
        """The HTTP status to which this dialect's clients react as intended."""
        ...

    def error(self, refused: Refused) -> bytes:
        """The body of an error answer."""
        ...

    def error_event(self, refused: Refused) -> bytes:
        """The last event of a stream that had sent its headers before the call failed."""
        ...

    def models(self, names: Sequence[str]) -> bytes:
        """The answer to `GET /v1/models`. It is for display only: requests may name any model."""
        ...


class CountingDialect(Dialect, Protocol):
    """A dialect whose clients can ask how many tokens a request has."""

    def token_count(self, count: int) -> bytes:
        """The answer to such a call."""
        ...
