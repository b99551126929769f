"""Environment variables of slime and its coding-agent example, used as defaults of a request.

`perdure.settings.variable_aliases` says which field each variable sets. A field that the request sets
overrides the variable.
"""

from collections.abc import Mapping
from typing import Any

from perdure.errors import ConfigurationError
from perdure.settings.process_environment import variables
from perdure.settings.variable_aliases import FIELDS, Alias
from perdure.types import RolloutRequest, RunRequest


def defaults_for(
    rollout: Mapping[str, Any], agent: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`rollout`, which has fields of a RolloutRequest, with defaults for the fields it does not
    set.

    Raises: ConfigurationError, which names the variable, if a value is not a number of seconds.
    """
    environment = variables() if environment is None else environment
    filled = dict(rollout)
    for variable in FIELDS:
        text = environment.get(variable.name, "").strip()
        if text and variable.agent in ("", agent) and (value := _value(variable, text)) is not None:
            _fill(filled, variable, value)
    return filled


def rollout_with_defaults(request: RolloutRequest) -> RolloutRequest:
    """Raises: ConfigurationError, as `defaults_for`."""
    given = request.model_dump(mode="json", exclude_unset=True)
    return RolloutRequest.model_validate(defaults_for(given, request.agent))


def run_with_defaults(request: RunRequest) -> RunRequest:
    """Raises: ConfigurationError, as `defaults_for`."""
    agent = request.rollout.get("agent", RolloutRequest.model_fields["agent"].default)
    return request.model_copy(update={"rollout": defaults_for(request.rollout, str(agent))})


def _fill(rollout: dict[str, Any], variable: Alias, value: float | str) -> None:
    field, _, option = variable.stands_for.partition(".")
    if not option:
        rollout.setdefault(field, value)
        return
    options = dict(rollout.get(field) or {})
    if variable.name not in options:  # the variable's name is an alias of the option
        options.setdefault(option, value)
    rollout[field] = options


def _value(variable: Alias, text: str) -> float | str | None:
    """None if the variable sets nothing."""
    match variable.value:
        case "text":
            return text
        case "seconds":
            return _seconds(variable.name, text)
        case "dense":
            return None if text == "0" else "partial"


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(f"{name}={text}: write a number of seconds above 0, or unset it")
    return seconds
