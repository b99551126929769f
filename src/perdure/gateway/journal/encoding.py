"""Records as bytes, on disk and in the store: one line `crc32 length json` each.

A torn last line is ignored: its writer was killed before it answered. Damage anywhere else is an error.
"""

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from perdure.errors import Boundary, PerdureError


class JournalDamaged(PerdureError):
    """A durable record does not read back: the file or object was changed.

    `intact`: what was read of the session before that record.
    """

    boundary = Boundary.GATEWAY

    def __init__(self, message: str, intact: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.intact = list(intact)


class DecodedRecords(NamedTuple):
    """Records read from bytes, and how many of those bytes they take; the rest is a torn tail."""

    records: list[dict[str, Any]]
    end: int


def frame(record: dict[str, Any]) -> bytes:
    payload = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %d %s\n" % (zlib.crc32(payload), len(payload), payload)


def split(data: bytes, source: object) -> DecodedRecords:
    """Every record of `data` up to a torn tail.

    Raises: JournalDamaged, naming `source`, when a record follows what looks torn.
    """
    records: list[dict[str, Any]] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position)
        record = _parse(data[position:end]) if end != -1 else None
        if record is None:
            _check_torn(data, position, source, records)
            break
        records.append(record)
        position = end + 1
    return DecodedRecords(records, position)


def _check_torn(
    data: bytes, position: int, source: object, records: Sequence[dict[str, Any]]
) -> None:
    if any(_parse(line) is not None for line in data[position:].split(b"\n")[1:]):
        raise JournalDamaged(
            f"{source} is damaged at byte {position}, before its last record", records
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of one line, or None when it is torn or damaged."""
    crc, _, rest = line.partition(b" ")
    length, _, payload = rest.partition(b" ")
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
