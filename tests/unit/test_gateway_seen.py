"""Messages read before are recognised, and only those."""

from typing import Any

import pytest

from perdure.gateway.dialects import seen as seen_module
from perdure.gateway.dialects.seen import Seen


def _wire(text: str, **block: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "content": text, **block}]}


def _count(seen: Seen, wire: dict[str, Any], calls: list[dict[str, Any]]) -> Any:
    def translate() -> list[dict[str, Any]]:
        calls.append(wire)
        return [{"role": "tool", "content": wire["content"][-1]["content"]}]

    return seen.translated(wire, translate)


def test_an_equal_message_is_translated_once() -> None:
    """The second equal message gets the very translation of the first."""
    seen, calls = Seen(), list[dict[str, Any]]()
    first = _count(seen, _wire("a", tool_use_id="1"), calls)

    assert _count(seen, _wire("a", tool_use_id="1"), calls) is first
    assert len(calls) == 1


def test_a_changed_message_is_translated_anew() -> None:
    """The same id with another text is another message."""
    seen, calls = Seen(), list[dict[str, Any]]()
    _count(seen, _wire("a", tool_use_id="1"), calls)

    assert _count(seen, _wire("b", tool_use_id="1"), calls)[0]["content"] == "b"


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of text the message not met for longest is forgotten."""
    monkeypatch.setattr(seen_module, "KEPT_CHARS", 10)
    seen, calls = Seen(), list[dict[str, Any]]()
    for name in ("1", "2", "3", "2", "1"):
        _count(seen, _wire("five5", tool_use_id=name), calls)

    assert [wire["content"][0]["tool_use_id"] for wire in calls] == ["1", "2", "3", "1"]
