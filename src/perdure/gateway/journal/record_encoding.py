"""Encodes journal records: one line `crc32 length json` each, so that a changed byte is detected."""

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from perdure.errors import Boundary, PerdureError


class JournalDamaged(PerdureError):
    """A durable record cannot be read: its object was changed or deleted.

    `intact`: the session's records before it.
    """

    boundary = Boundary.GATEWAY

    def __init__(self, message: str, intact: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.intact = list(intact)


def frame(record: dict[str, Any]) -> bytes:
    payload = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %d %s\n" % (zlib.crc32(payload), len(payload), payload)


def unframe(data: bytes) -> dict[str, Any] | None:
    """The record, or None if the bytes are not those that were written."""
    crc, _, rest = data.partition(b" ")
    length, _, payload = rest.removesuffix(b"\n").partition(b" ")
    if length != b"%d" % len(payload) or crc != b"%08x" % zlib.crc32(payload):
        return None
    record: dict[str, Any] = json.loads(payload)
    return record


def pack(values: "array[Any]") -> str:
    """Little-endian int32 or float64, as base64."""
    return base64.b64encode(_little_endian(values)).decode("ascii")


def unpack(code: str, text: str) -> "array[Any]":
    values = array(code)
    values.frombytes(base64.b64decode(text))
    return _little_endian(values)


def _little_endian(values: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values
