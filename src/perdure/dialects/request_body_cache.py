"""A cache of request bodies: agents send their whole history each time, and only its end is new.

Finds, byte for byte, the part of a body that its sender has sent before. That part is not parsed, checked
or translated again, and its messages are not visited one by one. `json_fields` reads a body of an
unusual form as a whole.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perdure.dialects.json_fields import (
    STRICT,
    Fields,
    as_fields,
    check_depth,
    check_size,
    read_body,
    replace_lone_surrogates,
)

KEPT_BYTES = 64 << 20
"""Bytes of bodies in the cache. The least recently seen senders are dropped first. Parsed and translated
messages usually take twice as much in addition."""
KEPT_HISTORIES = 8
"""Histories kept per sender. Parallel sub-agents share the key of their session."""
ENDS = 4
"""A history replaces another one if it repeats all but this many of its last messages. Clients change
marks near the end of a history."""
SPACE = re.compile("[ \t\n\r]*")
DECODER = json.JSONDecoder(**STRICT)

Translate = Callable[[Fields], list[dict[str, Any]]]


class Messages(list[dict[str, Any]]):
    """Messages as they were sent, and the translations of the leading ones. Requests that repeat a message
    share its object and its translation, so callers must not change them."""

    def __init__(self, wire: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(wire)
        self.translations: list[dict[str, Any]] = []
        self.counts = [0]
        """How many of `translations` belong to the first 0, 1, 2, ... messages."""
        self.translate: Translate | None = None
        """The function that translated them, because two dialects may read the same list."""

    def beginning(self, length: int) -> "Messages":
        """A copy of the first `length` messages."""
        found = Messages(self[:length])
        found.counts = self.counts[: length + 1]
        found.translations = self.translations[: found.counts[-1]]
        found.translate = self.translate
        return found


def translated(
    body: Fields, listed: str, most: int, translate: Translate
) -> Sequence[dict[str, Any]]:
    """The results of `translate` for a list of at most `most` messages. `translate` is called once per
    message, and again if it raised."""
    body.items(listed, most)  # refuses a value that is not a list, or too long a list
    wire = body.get(listed) or ()
    messages = wire if type(wire) is Messages else Messages(wire)
    if messages.translate is not translate:
        messages.translations, messages.counts = [], [0]
        messages.translate = translate
    name, done = body.name(listed), messages.translations
    for number in range(len(messages.counts) - 1, len(messages)):
        done += translate(as_fields(messages[number], f"{name}[{number}]"))
        messages.counts.append(len(done))
    return done


class Part(NamedTuple):
    """The fields before or after the messages. Their meaning does not depend on the bytes that follow."""

    data: bytes
    fields: dict[str, Any]


class Shared(NamedTuple):
    """The part of a history that a body repeats: its head, and `messages` leading messages, which end at
    byte `end`. `messages` is -1 if the head differs."""

    messages: int
    end: int


NOTHING = Shared(-1, 0)


@dataclass(frozen=True)
class History:
    """One parsed body."""

    raw: bytes
    head: dict[str, Any]
    """The fields before the messages."""
    messages: Messages
    ends: list[int]
    """The positions at which the head ends and each message ends. A message's bytes include the `[` or
    `,` before it."""
    tail: Part

    def shared(self, raw: bytes) -> Shared:
        """Find the first message that differs, by binary search."""
        own, ends = memoryview(self.raw), self.ends
        if not raw.startswith(own[: ends[0]]):
            return NOTHING
        same, most = 0, len(self.messages)
        end = most  # usually the body repeats all of them
        while same < most:
            if raw.startswith(own[ends[same] : ends[end]], ends[same]):
                same = end
            else:
                most = end - 1
            end = (same + most + 1) // 2
        return Shared(same, ends[same])


class Bodies:
    """Example:
    bodies.read(raw, "messages", headers)       # equals read_body(raw)
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[History]] = OrderedDict()
        self._weight = 0

    def read(self, raw: bytes, listed: str, headers: Mapping[str, str]) -> Fields:
        """`listed`: the field that has the messages. Raises: Refused, like `read_body`."""
        check_size(raw)
        keys = (headers.get(name) for name in ("authorization", "x-api-key", "x-goog-api-key"))
        sender = f"{listed} {' '.join(map(str, keys))}"
        known, shared = _closest(self._known.get(sender, ()), raw)
        try:
            found = _read(raw, listed, known, shared)
        except (ValueError, RecursionError):
            return read_body(raw)  # names the error, or reads the unusual form
        goes_on = known is not None and shared.messages >= max(1, len(known.messages) - ENDS)
        self._keep(sender, found, instead_of=known if goes_on else None)
        return Fields({**found.head, listed: found.messages, **found.tail.fields})

    def _keep(self, sender: str, found: History, instead_of: History | None) -> None:
        before = self._known.pop(sender, [])
        others = [history for history in before if history is not instead_of]
        self._known[sender] = [*others, found][-KEPT_HISTORIES:]
        self._weight += _weight(self._known[sender]) - _weight(before)
        while self._weight > KEPT_BYTES:
            self._weight -= _weight(self._known.popitem(last=False)[1])


def _weight(histories: list[History]) -> int:
    return sum(len(history.raw) for history in histories)


def _closest(histories: Iterable[History], raw: bytes) -> tuple[History | None, Shared]:
    """The history of which `raw` repeats the most messages, and the repeated part."""
    best, most = None, NOTHING
    for history in histories:
        if (shared := history.shared(raw)) > most:
            best, most = history, shared
    return best, most


def _read(raw: bytes, listed: str, known: History | None, shared: Shared) -> History:
    """Raises: ValueError, RecursionError if the body does not have the usual form."""
    if known is None:
        return _read_all(raw, listed)
    start, tail = shared.end, known.tail
    end = len(raw) - len(tail.data)
    same_tail = end >= start and raw.endswith(tail.data)
    reader = _Reader(raw[start : end if same_tail else None].decode())
    new = reader.messages(opening="," if shared.messages else "[", end=same_tail)
    if not same_tail:
        tail = reader.tail(listed)
    check_depth({**tail.fields, listed: [message for _, message in new]})
    messages = known.messages.beginning(shared.messages)
    ends = known.ends[: shared.messages + 1]
    _append(new, messages, ends)
    return History(raw, known.head, messages, ends, tail)


def _read_all(raw: bytes, listed: str) -> History:
    reader = _Reader(raw.decode())
    head = reader.head(listed)
    new = reader.messages(opening="[")
    tail = reader.tail(listed)
    check_depth({**head.fields, listed: [message for _, message in new], **tail.fields})
    messages, ends = Messages(), [len(head.data)]
    _append(new, messages, ends)
    return History(raw, head.fields, messages, ends, tail)


def _append(
    new: Iterable[tuple[bytes, dict[str, Any]]], messages: Messages, ends: list[int]
) -> None:
    for data, message in new:
        messages.append(replace_lone_surrogates(message, data))
        ends.append(ends[-1] + len(data))


class _Reader:
    """Parses a body from its start, or from the end of a message; `json` parses the values.

    Every method raises: ValueError, RecursionError.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def head(self, listed: str) -> Part:
        """All fields before the list of messages."""
        self._expect("{")
        fields: dict[str, Any] = {}
        while (key := self._key()) != listed:
            fields[key] = self._value()
            self._expect(",")
        data = self._text[: self._at].encode()
        return Part(data, replace_lone_surrogates(fields, data))

    def messages(self, *, opening: str, end: bool = False) -> list[tuple[bytes, dict[str, Any]]]:
        """The messages up to the end of their list. `end`: whether the text ends with the last message."""
        found: list[tuple[bytes, dict[str, Any]]] = []
        while self._sign() != ("" if end else "]") or opening == "[":
            start = self._at
            self._expect(opening)
            message = self._value()
            if not isinstance(message, dict):
                raise ValueError("a message is not an object")
            found.append((self._text[start : self._at].encode(), message))
            opening = ","
        return found

    def tail(self, listed: str) -> Part:
        """All fields from the end of the list to the end of the body."""
        start = self._at
        self._expect("]")
        fields: dict[str, Any] = {}
        while self._sign() == ",":
            self._expect(",")
            key = self._key()
            fields[key] = self._value()
        self._expect("}")
        if self._sign() or listed in fields:
            raise ValueError("text after the body, or a second list of messages")
        data = self._text[start:].encode()
        return Part(data, replace_lone_surrogates(fields, data))

    def _sign(self) -> str:
        """The next character that is not white space; "" at the end."""
        at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # always matches
        return self._text[at : at + 1]

    def _expect(self, sign: str) -> None:
        at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # always matches
        if not self._text.startswith(sign, at):
            raise ValueError(f"no {sign} at {at}")
        self._at = at + len(sign)

    def _key(self) -> str:
        if self._sign() != '"':
            raise ValueError("no key")
        key: str = self._value()
        self._expect(":")
        return key

    def _value(self) -> Any:
        at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # always matches
        value, self._at = DECODER.raw_decode(self._text, at)
        return value


BODIES = Bodies()
"""The cache of this process."""
