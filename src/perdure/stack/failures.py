"""Turns an exception into one line that says what is wrong and what to do."""

from typing import TYPE_CHECKING

import click

from perdure.errors import ActionNeeded, InstanceError, PerdureError

if TYPE_CHECKING:
    from pydantic import ValidationError

USAGE, FAILURE = 2, 1


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and one line for any exception."""
    from pydantic import ValidationError

    if isinstance(error, click.ClickException):
        return error.exit_code, error.format_message()
    if isinstance(error, ValidationError):
        return USAGE, validation(error)
    if isinstance(error, PerdureError):
        code = USAGE if isinstance(error, ActionNeeded | InstanceError) else FAILURE
        return code, str(error)
    if type(error).__name__ == "RPCError":
        return FAILURE, f"Temporal refused: {str(error)[:300]}"
    return FAILURE, f"{type(error).__name__}: {error} (a bug; PERDURE_DEBUG=1 shows where)"


def validation(error: "ValidationError") -> str:
    """All wrong fields of a model with their dotted names, on one line."""
    from perdure.types import SLUG

    complaints = []
    for wrong in error.errors(include_url=False):
        name = ".".join(str(part) for part in wrong["loc"])
        message = wrong["msg"].removeprefix("Value error, ")
        if wrong["type"] == "extra_forbidden":
            message = "there is no such field"
        if wrong["type"] == "string_pattern_mismatch" and wrong["ctx"]["pattern"] == SLUG:
            message = "letters, digits, '.', '_' and '-' only, and a letter or digit first"
        if wrong["type"] in ("model_type", "model_attributes_type", "dict_type"):
            message = f"it has fields of its own: name one, {name}.FIELD"
        complaints.append(f"{name}: {message}" if name else message)
    return "; ".join(complaints)
