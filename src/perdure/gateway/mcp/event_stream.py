"""Server-sent events as bytes: split from a stream's chunks, and read."""

import itertools
import json
import re
from typing import Any

LARGEST_ANSWER = 8 << 20
"""Bytes of one answer with all its events."""

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


def taken_events(rest: bytearray, chunk: bytes) -> list[bytes]:
    """Add the chunk to the incomplete rest, and take the complete events, each with its terminator. The
    rest is not searched again, so tiny chunks cost no more than large ones."""
    searched = max(0, len(rest) - 3)
    rest += chunk
    ends = [0, *(found.end() for found in _EVENT_END.finditer(rest, searched))]
    events = [bytes(rest[a:b]) for a, b in itertools.pairwise(ends)]
    del rest[: ends[-1]]
    return events


def field_of(event: bytes, name: str) -> bytes:
    """The event's lines of this field, joined."""
    start = name.encode() + b":"
    lines = (line for line in event.splitlines() if line.startswith(start))
    return b"\n".join(line[len(start) :].lstrip() for line in lines)


def message_of(event: bytes) -> dict[str, Any]:
    """Its JSON-RPC message; empty if it has none."""
    return json_of(field_of(event, "data"))


def json_of(content: bytes) -> dict[str, Any]:
    """Empty if it is not a JSON object."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
