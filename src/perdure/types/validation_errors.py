"""Formats a pydantic error as one line: each wrong field, the given value, and what is allowed."""

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from perdure.types.identifier_patterns import INSTANCE_REF, SLUG

MOST = 5
"""Maximum number of wrong fields in a message."""
NAME_FORM = "letters, digits, '.', '_' and '-' only, and a letter or digit first"
SHOWN = 80
"""Maximum characters of a given value."""
OBJECTS = ("model_type", "model_attributes_type", "dict_type")


def faults(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Example: `sampling.temprature: there is no such field; did you mean temperature?` `model`:
    the model that refused the input; without it, the message suggests no name."""
    wrong = error.errors(include_url=False)
    more = f"; and {len(wrong) - MOST} more" if len(wrong) > MOST else ""
    return "; ".join(_fault(dict(one), model) for one in wrong[:MOST]) + more


def _fault(wrong: dict[str, Any], model: type[BaseModel] | None) -> str:
    name = ".".join(str(part) for part in wrong["loc"])
    message = wrong["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    given = f", got {wrong['input']!r}"[:SHOWN]
    if wrong["type"] == "extra_forbidden":
        message, given = f"there is no such field{_meant(wrong['loc'], model)}", ""
    elif wrong["type"] == "missing":
        message, given = "it is missing", ""
    elif wrong["type"] == "string_pattern_mismatch":
        forms = {SLUG: NAME_FORM, INSTANCE_REF: "write it as <dataset>/<instance_id>"}
        message = forms.get(wrong["ctx"]["pattern"], message)
    elif wrong["type"] in OBJECTS:
        message, given = f"it is an object: set one of its fields, {name}.FIELD", ""
    elif wrong["type"] == "value_error":
        given = ""  # the validator's message names what matters
    return f"{name}: {message}{given}" if name else message


def _meant(where: tuple[int | str, ...], model: type[BaseModel] | None) -> str:
    for part in where[:-1]:
        model = _field_of(model, str(part))
    if model is None:
        return ""
    known = list(model.model_fields)
    for group in known:
        inner = _field_of(model, group)
        if inner is not None and where[-1] in inner.model_fields:
            return f"; did you mean {group}.{where[-1]}?"
    close = difflib.get_close_matches(str(where[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; the fields are {', '.join(known)}"


def _field_of(model: type[BaseModel] | None, name: str) -> type[BaseModel] | None:
    """The model class of a field, also if the field is optional."""
    if model is None or name not in model.model_fields:
        return None
    kind = model.model_fields[name].annotation
    for one in (kind, *get_args(kind)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None
