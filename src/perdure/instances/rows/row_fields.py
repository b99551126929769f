"""Reads one row's fields in every form that public datasets use. Each error names the row, the
field and the fix. The formats decide what a field means.
"""

import ast
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from perdure.errors import InstanceError

ID_FORM = "letters, digits, '.', '_' and '-', at most 200, and begin with a letter or digit"
_PARSING = threading.Lock()
"""Held while Python text is parsed: rows are read by several threads, and the parser counts its depth
once for all of them (python/cpython#106905)."""
STRINGS_FIX = "give a list of strings, or a JSON or Python literal of one"


@dataclass(frozen=True)
class Row:
    """A row's fields, with the row number for error messages. All readers raise InstanceError."""

    number: int
    fields: Mapping[str, Any]
    folder: Path = Path()
    """The folder of the row's file; relative paths in the row start there."""

    def lacks(self, name: str, fix: str) -> InstanceError:
        return InstanceError(f"row {self.number} lacks `{name}`: {fix}")

    def wrong(self, name: str, problem: str) -> InstanceError:
        return InstanceError(f"row {self.number} has a bad `{name}`: {problem}")

    def refused(self, problem: str) -> InstanceError:
        return InstanceError(f"row {self.number}: {problem}")

    def replaced(self, **fields: Any) -> "Row":
        """The same row with other fields."""
        return replace(self, fields={**self.fields, **fields})

    def beside(self, path: str) -> Path:
        """The path of a file that the row names."""
        return self.folder / path

    def has(self, name: str) -> bool:
        return self.fields.get(name) not in (None, "", [], {}, ())

    def text(self, name: str, fix: str) -> str:
        """A required string that is not blank."""
        value = self.optional_text(name)
        if not value.strip():
            raise self.lacks(name, fix)
        return value

    def optional_text(self, name: str, default: str = "") -> str:
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, f"give a string, not {_kind(value)}")
        return value or default

    def patch(self, name: str, fix: str | None = None) -> bytes:
        """A diff with unchanged line endings. `fix` makes it required, and is in the error."""
        text = self.text(name, fix) if fix else self.optional_text(name)
        return text.encode("utf-8", "surrogateescape")

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings in any form; empty if the field is absent, null or ""."""
        value = self.fields.get(name)
        if value is None or value == "":
            return ()
        values = _literal(value) if isinstance(value, str) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
            raise self.wrong(name, STRINGS_FIX)
        return tuple(values)

    def lines(self, name: str) -> tuple[str, ...]:
        """Shell lines: a list in any form, or one string, split at newlines.

        Some rows escape newlines: a string without a real newline is split at literal \\n.
        """
        value = self.fields.get(name)
        if isinstance(value, str) and not isinstance(_literal(value), (list, tuple)):
            split = value.split("\n" if "\n" in value else "\\n")
            return tuple(line for line in split if line.strip())
        return self.strings(name)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, or JSON text of one, without null members; empty if absent."""
        value = self.fields.get(name)
        if value is None or value == "":
            return {}
        value = _literal(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise self.wrong(name, "give an object, or JSON text of one")
        return {key: member for key, member in value.items() if member is not None}

    def kept(self, *names: str) -> dict[str, JsonValue]:
        """The named fields that are plain values, for an instance's metadata."""
        values = {name: self.fields.get(name) for name in names}
        return {k: v for k, v in values.items() if isinstance(v, (str, int, float)) and v != ""}

    def invalid(self, error: ValidationError, prefix: str = "") -> InstanceError:
        """An error with the model's first validation error, this row's number and the field."""
        first = error.errors(include_url=False)[0]
        name = ".".join([*([prefix] if prefix else []), *(str(part) for part in first["loc"])])
        if first["type"] == "string_pattern_mismatch" and name == "instance_id":
            return self.wrong(name, f"{first['input']!r} must be {ID_FORM}")
        problem = first["msg"].removeprefix("Value error, ")
        problem = problem[:1].lower() + problem[1:]
        return self.wrong(name or "row", f"{problem}, got {str(first['input'])[:80]!r}")


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    kinds = {bool: "true or false", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"the number {value}")


def _literal(text: str) -> Any:
    """The value of JSON or of a Python literal; None if it is neither. It evaluates no code."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        with _PARSING:
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
