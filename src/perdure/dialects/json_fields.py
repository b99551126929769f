"""Reads untrusted JSON with bounded work; every error names its field.

Checks sizes, nesting, types, and text that cannot be encoded. Dialects know what the fields mean.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from perdure.dialects.base import Refused

MAX_DEPTH = 100
MAX_VALUES = 500_000
"""Values in one body; 200 turns of history have about 5,000."""
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def bad(param: str, problem: str) -> Refused:
    """Example: bad("messages[2].role", "must be a string")"""
    return Refused(400, "invalid_value", f"'{param}' {problem}", param=param)


@dataclass(frozen=True)
class Fields:
    """A JSON object and its path in the body. Every read checks the type.

    Null counts as absent. Reads raise: Refused (400), which names the field and what it must be.
    """

    values: dict[str, Any]
    path: str = ""

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def bad(self, key: str, problem: str) -> Refused:
        return bad(self.name(key), problem)

    def text(self, key: str) -> str:
        """A required, non-empty text."""
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.bad(key, "must be a non-empty string")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.bad(key, "must be a string")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.bad(key, "must be true or false")
        return bool(value)

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.bad(key, f"must be a number from {low:g} to {high:g}")
        return value

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(key, f"must be an integer from {low} to {high}")
        return value

    def texts(self, key: str, most: int) -> list[str]:
        """A list of at most `most` non-empty texts. A single text counts as a list of one."""
        value = self.get(key)
        texts = [value] if isinstance(value, str) else value
        if texts is None:
            return []
        if not isinstance(texts, list) or len(texts) > most or not all(map(_is_text, texts)):
            raise self.bad(key, f"must be a list of at most {most} non-empty strings")
        return texts

    def object(self, key: str) -> "Fields":
        """An object; empty if absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.bad(key, "must be an object")
        return Fields(value or {}, self.name(key))

    def items(self, key: str, most: int = MAX_VALUES) -> Iterator[tuple[str, Any]]:
        """The items of a list, with their paths; none if absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.bad(key, "must be a list")
        if value and len(value) > most:
            raise self.bad(key, f"must have at most {most} items")
        return ((f"{self.name(key)}[{i}]", item) for i, item in enumerate(value or ()))

    def objects(self, key: str, most: int = MAX_VALUES) -> Iterator["Fields"]:
        """The objects of a list; none if absent."""
        return (as_fields(item, path) for path, item in self.items(key, most))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def as_fields(value: Any, path: str) -> Fields:
    if not isinstance(value, dict):
        raise bad(path, "must be an object")
    return Fields(value, path)


def read_body(raw: bytes) -> Fields:
    """The body of a request: an object of bounded depth and size, with only encodable text.

    Clients may cut a string between the halves of a surrogate pair; a lone half becomes U+FFFD.
    """
    check_size(raw)
    try:
        body = read_json(raw.decode())
    except (ValueError, RecursionError) as error:
        message = f"the request body is not valid JSON: {error}"
        raise Refused(400, "invalid_json", message) from None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", "the request body must be a JSON object")
    check_depth(body)
    return Fields(replace_lone_surrogates(body, raw))


def read_json(text: str) -> Any:
    """Strict JSON. Raises: ValueError, RecursionError."""
    return json.loads(text, **STRICT)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


STRICT: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
"""Options that make `json` refuse values that the standard does not allow."""


def arguments_object(arguments: str) -> dict[str, Any]:
    """A sampled call's arguments as an object. The agent checks them against the tool's schema."""
    try:
        value = read_json(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def check_size(raw: bytes) -> None:
    """Refuse a body with too many values before parsing it: tiny values take 100 times their size in
    memory."""
    if len(raw) <= 2 * MAX_VALUES or _marks(raw) <= MAX_VALUES:
        return  # a value takes at least two bytes: itself and a separator
    quotes = raw.count(b'"') - raw.count(rb"\"") + raw.count(rb'\\"')
    if quotes > 4 * MAX_VALUES or _marks(STRING.sub(b"", raw)) > MAX_VALUES:
        raise Refused(400, "invalid_json", f"the request has more than {MAX_VALUES} values")


def _marks(raw: bytes) -> int:
    """An upper bound for the number of values: each one is a container or follows one of these signs."""
    return sum(map(raw.count, (b",", b"[", b"{")))


def check_depth(body: dict[str, Any]) -> None:
    """Refuse deep nesting. Works level by level instead of by recursion, so any depth is safe."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if type(value) is dict else value)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    raise Refused(400, "invalid_json", f"the request is nested more than {MAX_DEPTH} deep")


def replace_lone_surrogates(value: dict[str, Any], raw: bytes) -> dict[str, Any]:
    """`value`, read from `raw`, with U+FFFD for each half of a surrogate pair."""
    halved = b"\\u" in raw and ESCAPED_SURROGATE.search(raw)
    found: dict[str, Any] = _encodable(value) if halved else value
    return found


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


def name_header(headers: Mapping[str, str], name: str) -> str:
    """A header whose value must match `NAME`; "" if absent."""
    value = headers.get(name, "").strip()
    if value and not NAME.fullmatch(value):
        raise Refused(
            400, "invalid_value", f"header '{name}' must be 1 to 200 of A-Z a-z 0-9 . _ : -"
        )
    return value


def joined(texts: list[str]) -> str:
    """Join text blocks with newlines.

    Clients add a newline to a block when they merge it with the next one, and drop it otherwise.
    """
    return "\n".join([*(text.removesuffix("\n") for text in texts[:-1]), *texts[-1:]])
