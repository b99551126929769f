"""What a dialect is: a wire format that agents speak, read and written by one module.

A new dialect is one module with these names and one line in `app.DIALECTS`. Sessions, keys and
limits are none of its business.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from perdure.gateway.base import Answer, ModelRequest, Refused


class Call(Protocol):
    """One model call as read from the wire; it knows how its answer is to be framed."""

    @property
    def request(self) -> ModelRequest: ...

    @property
    def stream(self) -> bool: ...

    def whole(self, answer: Answer) -> bytes:
        """The answer as one JSON object."""
        ...

    def events(self, answer: Answer) -> bytes:
        """The answer as one complete event stream; the same answer gives the same bytes."""
        ...


class Dialect(Protocol):
    """Modules implement it: `anthropic`, `openai_chat`, `openai_responses`."""

    @property
    def PING(self) -> bytes:
        """What keeps an open stream alive until its answer comes."""
        ...

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Call:
        """`headers` by lower-case name. Raises: Refused (400) naming the field."""
        ...

    def status(self, refused: Refused) -> int:
        """The HTTP status with which this dialect's clients do what we mean."""
        ...

    def error(self, refused: Refused) -> bytes:
        """The body of an error answer."""
        ...

    def error_event(self, refused: Refused) -> bytes:
        """The end of a stream whose headers were sent before the call failed."""
        ...

    def models(self, names: Sequence[str]) -> bytes:
        """The answer of `GET /v1/models`: a courtesy, any name is accepted."""
        ...
