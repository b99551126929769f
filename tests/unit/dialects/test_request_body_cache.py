"""The cache reuses only what a sender sent before, and only if it matches byte for byte."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from perdure.dialects import anthropic, openai_chat, openai_responses, request_body_cache
from perdure.dialects.base import Refused
from perdure.dialects.json_fields import MAX_DEPTH, Fields, read_body
from perdure.dialects.request_body_cache import Bodies

TOOLS = [{"name": "bash", "input_schema": {"type": "object"}}]


def _body(messages: list[Any], **rest: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "tools": TOOLS, **rest}).encode()


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def _call(value: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "a", "name": "bash", "input": {"n": value}}
    return {"role": "assistant", "content": [use]}


def _read(known: Bodies, raw: bytes, key: str = "k") -> dict[str, Any]:
    return known.read(raw, "messages", {"x-api-key": key}).values


def _outcome(read: Callable[..., Fields], *arguments: Any) -> str:
    """The result of reading, including the types of numbers."""
    try:
        return repr(read(*arguments).values)
    except Refused as refused:
        return f"refused: {refused}"


def test_a_repeated_message_is_the_same_object() -> None:
    """A longer history shares its messages, and the fields around them, with the shorter one."""
    known = Bodies()
    first = _read(known, _body([_user("a"), _call(1)]))
    second = _read(known, _body([_user("a"), _call(1), _user("b")]))

    shared = zip(first["messages"], second["messages"], strict=False)
    assert all(one is other for one, other in shared)
    assert second["tools"] is first["tools"]
    assert second == json.loads(_body([_user("a"), _call(1), _user("b")]))


def test_a_moving_mark_costs_only_its_messages() -> None:
    """Clients mark the newest message for their cache; the messages before it stay cached."""
    known = Bodies()
    marked = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    before = [_user("a"), _call(1), {"role": "user", "content": [marked]}]
    first = _read(known, _body(before))
    second = _read(known, _body([*before[:2], _user("b"), _call(2)]))

    assert second["messages"][1] is first["messages"][1]
    assert second["messages"][2] == _user("b")


@pytest.mark.parametrize("numbers", [(1, 1.0), (1, True), (0, False), (1.0, True)])
def test_equal_numbers_of_two_kinds_stay_apart(numbers: tuple[Any, Any]) -> None:
    """An input that changes from 1 to 1.0 or true has changed, and the model reads the new one."""
    arguments = []
    for number in numbers:
        request = anthropic.parse(
            _body([_user("a"), _call(number), _user("b")], max_tokens=9), {"x-api-key": "numbers"}
        ).request
        arguments.append(request.messages[1]["tool_calls"][0]["function"]["arguments"])

    assert arguments == [json.dumps({"n": number}) for number in numbers]


def test_senders_share_nothing() -> None:
    """The same bytes under another session's key are parsed again."""
    known = Bodies()
    raw = _body([_user("a")])

    assert _read(known, raw, "one")["messages"][0] is not _read(known, raw, "other")["messages"][0]


def test_parallel_sub_agents_of_one_session_stay_cached() -> None:
    """Histories that alternate do not evict each other."""
    known = Bodies()
    openings = [_user(str(number)) for number in range(4)]
    first = [_read(known, _body([opening, _call(1)])) for opening in openings]
    again = [_read(known, _body([opening, _call(1), _user("x")])) for opening in openings]

    pairs = zip(first, again, strict=True)
    assert all(one["messages"][0] is two["messages"][0] for one, two in pairs)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, the least recently seen sender is dropped."""
    raw = _body([_user("a")])
    monkeypatch.setattr(request_body_cache, "KEPT_BYTES", 2 * len(raw))
    known = Bodies()
    first = {key: _read(known, raw, key)["messages"][0] for key in ("1", "2", "3")}

    kept = [key for key in ("3", "2", "1") if _read(known, raw, key)["messages"][0] is first[key]]
    assert kept == ["3", "2"]
    assert known._weight <= 2 * len(raw)


def test_every_read_equals_a_first_read() -> None:
    """Bodies that share any start or end, some of them broken, are read as without a cache."""
    dice = random.Random(3)
    bases = [
        _body([_user("a"), _call(1), _user('b"]}, {'), _call("\ud83d"), _user("é \U0001f600")]),
        _body([_user("a"), _call(1)], model="other", max_tokens=7),
        b'{"messages": [{"role": "user"}, {"role": "x"}], "model": 1, "model": 2}',
        b'{"model": 1, "messages": [ {} , {} ] , "messages": [{"a": 1}]} ',
        b'{"mess\\u0061ges": [{"a": NaN}, {"a": 1e999}, {"a": 1}]}',
        b'{"messages": [{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}]}",
        b'{"messages": [], "a": 1}',
        b'{"messages": [1, 2]}',
    ]
    known = Bodies()
    for _ in range(3000):
        raw = dice.choice(bases)
        for _ in range(dice.randint(0, 2)):
            at, end = sorted(dice.choices(range(len(raw) + 1), k=2))
            end = min(end, at + dice.randint(0, 12))
            middle = dice.choice([b"", b"", b",", b"{}", b"1", b"]", b"}", b" ", raw[at:end] * 2])
            raw = raw[:at] + middle + raw[end:]

        assert _outcome(known.read, raw, "messages", {}) == _outcome(read_body, raw)


FIRST = b'{"model": "m", "messages": [{"a": "x\\\\"}, {"a": "y"}], "tools": []}'


@pytest.mark.parametrize(
    "raw",
    [
        FIRST.replace(b'"y"}]', b'"y"}, {"a": 1}], "messages": [{"z": 1}]'),
        FIRST.replace(b'"y"}]', b'"y"}, {"a": 1}], "model": "other"'),
        FIRST.replace(b'"y"}]', b'"y", "a": 2}]'),
        FIRST.replace(b'"y"}]', b'"y"} {"a": 1}]'),
        FIRST.replace(b'"y"}]', b'"y"}, {"a": NaN}]'),
        FIRST.replace(b'"y"}]', b'"y"}, {"a": 1e999}]'),
        FIRST.replace(b'"y"}]', b'"y"}, {"a": "\xff"}]'),
        FIRST.replace(b'"y"}]', b'"y"}, {"a": "\\ud83d"}]'),
        FIRST.replace(b'"y"}]', b'"y"}, ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"]"),
        FIRST.replace(b'"y"}]', b'"y"} , {"a": "], \\"tools"} ] '),
        FIRST.replace(b'"y"}]', b'"y"},]'),
        FIRST.replace(b'"y"}]', b'"y"}, 1]'),
        FIRST.replace(b'"x', b'"\\"x'),
        FIRST.replace(b'"tools": []', b'"tools": [1]'),
        FIRST[: FIRST.index(b"]")] + b', {"a": "' + FIRST[FIRST.index(b"]") :],
        FIRST[: FIRST.index(b"]")] + b"}" + FIRST[FIRST.index(b"]") :],
        FIRST[: FIRST.index(b"]")],
        FIRST + b", {}",
        b'{"a": "' + FIRST.replace(b'"', b'\\"') + b'", "messages": [{"a": 1}]}',
    ],
)
def test_a_body_that_misuses_a_cached_start_is_read_as_a_whole(raw: bytes) -> None:
    """A cached start never decides what the rest of the body means."""
    known = Bodies()
    known.read(FIRST, "messages", {})

    assert _outcome(known.read, raw, "messages", {}) == _outcome(read_body, raw)
    assert _outcome(known.read, FIRST, "messages", {}) == _outcome(read_body, FIRST)


CHAT_CALL = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
ITEMS = [
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Go."}]},
    {"type": "function_call", "call_id": "a", "name": "bash", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "done"},
]


@pytest.mark.parametrize(
    ("dialect", "listed", "answers"),
    [
        (anthropic, "messages", [_call(1)]),
        (openai_chat, "messages", [{"role": "assistant", "tool_calls": [CHAT_CALL]}]),
        (openai_responses, "input", ITEMS),
    ],
)
def test_every_translation_equals_a_first_one(
    monkeypatch: pytest.MonkeyPatch, dialect: Any, listed: str, answers: list[Any]
) -> None:
    """Histories of alternating agents grow, shrink, compact, and get marks, changes and errors."""
    dice = random.Random(5)
    known = Bodies()
    histories: list[list[Any]] = [[_user("a")], [_user("a"), _user("b")], [_user("c")]]
    refused = 0

    def parsed(cache: Bodies, raw: bytes) -> str:
        monkeypatch.setattr(dialect, "BODIES", cache)
        try:
            request = dialect.parse(raw, {}).request
        except Refused as refused:
            return f"refused: {refused}"
        found = repr((request.messages, request.body))
        request.messages.clear()  # the request's own list: the cache does not change with it
        return found

    for _ in range(1500):
        which = dice.randrange(len(histories))
        history, at = list(histories[which]), dice.randrange(len(histories[which]) + 1)
        wrong: list[Any] = []
        match dice.randrange(8):
            case 0:
                del history[at:]
            case 1:
                history = [_user(f"summary {dice.random()}")]
            case 2:
                history[at : at + 1] = [_user(f"{dice.randrange(9)}")]
            case 3:
                several = [{"type": "text", "text": text} for text in "xy"]
                history.append({"role": "user", "content": several})
            case 4:
                wrong = [{"role": dice.choice(["tool", "nobody", None]), "content": "t"}]
            case 5:
                history += dice.choices(answers, k=3)
            case _:
                history += [_user(str(dice.randrange(9))) for _ in range(dice.randrange(4))]
        histories[which] = history[:60]
        body = {"model": "m", listed: [*histories[which], *wrong], "top_p": dice.choice([0, 1])}
        raw = json.dumps(body).encode()
        found = parsed(known, raw)
        refused += found.startswith("refused")

        assert found == parsed(Bodies(), raw)
    assert 100 < refused < 500


def test_two_dialects_translate_the_same_bytes_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """One session may use both, and only one of them has a role `tool`."""
    known = Bodies()
    monkeypatch.setattr(anthropic, "BODIES", known)
    monkeypatch.setattr(openai_chat, "BODIES", known)
    raw = json.dumps(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "tool", "tool_call_id": "c", "content": "b"},
            ],
        }
    ).encode()

    assert openai_chat.parse(raw, {}).request.messages[1]["role"] == "tool"
    with pytest.raises(Refused, match="role"):
        anthropic.parse(raw, {})
    assert openai_chat.parse(raw, {}).request.messages[1]["role"] == "tool"
