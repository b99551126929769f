"""Checks the `agent_options` of a request, and names a wrong or unknown one."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails

from perdure.errors import ConfigurationError
from perdure.types import Request


class NoOptions(Request):
    """For agents without options."""


Options = TypeVar("Options", bound=Request)


def parse(agent: str, model: type[Options], options: Mapping[str, JsonValue]) -> Options:
    """Raises: ConfigurationError naming the option, the problem and the known options."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigurationError(_complaint(agent, model, error.errors()[0])) from error


def _complaint(agent: str, model: type[Request], wrong: ErrorDetails) -> str:
    name = ".".join(str(part) for part in wrong["loc"])
    known = list(model.model_fields)
    takes = f"{agent} takes: {', '.join(known) or 'none'}"
    if wrong["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f", did you mean {close[0]}?" if close else ""
        return f"agent_options.{name}: unknown{meant}; {takes}"
    problem = wrong["msg"].removeprefix("Value error, ")
    problem = problem[:1].lower() + problem[1:]
    return f"agent_options.{name}: {problem}, got {str(wrong['input'])[:80]!r}; {takes}"
