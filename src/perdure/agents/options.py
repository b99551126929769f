"""`agent_options` of a request, checked: a wrong or unknown one is refused by its name."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import JsonValue, ValidationError

from perdure.errors import ConfigurationError
from perdure.types import Request


class NoOptions(Request):
    """For agents that take none."""


Options = TypeVar("Options", bound=Request)


def parse(agent: str, model: type[Options], options: Mapping[str, JsonValue]) -> Options:
    """Raises: ConfigurationError naming the option, what is wrong, and the known ones."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        problem = "unknown" if first["type"] == "extra_forbidden" else first["msg"]
        known = ", ".join(model.model_fields) or "none"
        raise ConfigurationError(
            f"agent_options.{name}: {problem}; {agent} takes: {known}"
        ) from error
