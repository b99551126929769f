"""Finds the values of the settings: a variable, an alias, `perdure.toml`, or the default."""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python
from pydantic_settings import SettingsError

from perdure.errors import ConfigurationError
from perdure.settings import process_environment, variable_aliases
from perdure.settings.process_environment import toml_file
from perdure.settings.settings_tree import DELIMITER, PREFIX, Settings

OBJECTS = ("sandbox.caps", "sandbox.open_hours", "engine.limits")
"""Settings whose value is a table. In a variable it is JSON."""
FOR_TESTS = "PERDURE_TEST_"
"""Prefix of the variables that Perdure's tests read."""


class Origin(NamedTuple):
    """Where a value came from: `default`, a variable's name, or the TOML file."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


def load_settings() -> Settings:
    """The settings of this process.

    Raises: ConfigurationError, which names the variable or the TOML key, and the fix.
    """
    _refuse_unknown_variables()
    _refuse_missing_file()
    try:
        return Settings()
    except ValidationError as error:
        raise ConfigurationError(_complaint(error.errors(include_url=False)[0])) from error
    except SettingsError as error:
        raise ConfigurationError(_no_json(error)) from error
    except ValueError as error:  # the TOML file is malformed
        raise ConfigurationError(f"{toml_file()}: {error}") from error


def fields() -> dict[str, FieldInfo]:
    """All settings by path.

    Example: {"home": ..., "gateway.port": ...}
    """
    found: dict[str, FieldInfo] = {}
    for name, field in Settings.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            found |= {f"{name}.{inner}": one for inner, one in model.model_fields.items()}
        else:
            found[name] = field
    return found


def variable(path: str) -> str:
    """The variable of a setting.

    Example: "gateway.port" -> "PERDURE_GATEWAY__PORT"
    """
    return PREFIX + path.upper().replace(".", DELIMITER)


def value(settings: Settings, path: str) -> Any:
    """The value of one setting."""
    owner, name = _owner(settings, path)
    return getattr(owner, name)


def is_set(settings: Settings, path: str) -> bool:
    """Whether the user gave this setting a value, which may equal the default."""
    owner, name = _owner(settings, path)
    group = path.partition(".")[0]
    return group in settings.model_fields_set and name in owner.model_fields_set


def origin(path: str, settings: Settings) -> Origin:
    """Where the value of one setting came from."""
    if _is_given(path):
        return Origin("environment", variable(path))
    if alias := variable_aliases.find_set_alias(path):
        return Origin("environment", alias.name)
    if is_set(settings, path):
        return Origin("file", toml_file().name)
    return Origin("default", "default")


def _is_given(path: str) -> bool:
    """Whether a `PERDURE_*` variable sets this setting or a part of it."""
    name = variable(path)
    names = {one.upper() for one in process_environment.variables()}
    return name in names or any(one.startswith(name + DELIMITER) for one in names)


def as_variables(settings: Settings) -> dict[str, str]:
    """The variables that give a child process the same settings, wherever it runs.

    They contain the values that were set, with absolute paths. The child reads no file.
    """
    found = {"PERDURE_CONFIG": "/dev/null"}
    for path in fields():
        if is_set(settings, path):
            found[variable(path)] = _as_text(settings, path)
    return found


def for_child(settings: Settings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: the inherited variables, and these settings."""
    ours = {variable(path) for path in fields()}
    kept = {name: text for name, text in inherited.items() if name.upper() not in ours}
    return kept | as_variables(settings)


def _as_text(settings: Settings, path: str) -> str:
    found = value(settings, path)
    if isinstance(found, SecretStr):
        return found.get_secret_value()
    if isinstance(found, Path):
        return str(found.absolute())
    if path == "store" and "://" not in found:
        return str(Path(found).absolute())
    if isinstance(found, dict | BaseModel):
        return json.dumps(jsonable(found))
    return "" if found is None else str(found)


def jsonable(table: dict[str, Any] | BaseModel) -> Any:
    """The value of a setting of OBJECTS for JSON."""
    if isinstance(table, BaseModel):
        return table.model_dump(mode="json", exclude_defaults=True)
    return to_jsonable_python(table)


def _owner(settings: Settings, path: str) -> tuple[BaseModel, str]:
    group, dot, name = path.rpartition(".")
    return (getattr(settings, group), name) if dot else (settings, name)


# -- complaints -----------------------------------------------------------------------------------

_SERVICE_LINK = re.compile(r"PERDURE_\w+_SERVICE_(HOST|PORT)(_\w+)?|PERDURE_SERVICE_(HOST|PORT)\w*")


def _refuse_unknown_variables() -> None:
    known = [variable(path) for path in fields()]
    objects = tuple(variable(path) + DELIMITER for path in OBJECTS)
    allowed = {*known, *process_environment.OWN, *process_environment.INSIDE}
    for name, text in process_environment.variables().items():
        ours = name.startswith(PREFIX) and not name.startswith((FOR_TESTS, *objects))
        if ours and name not in allowed and not _is_service_link(name, text):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "`perdure settings` lists them."
            raise ConfigurationError(f"{name} is not a setting: {hint} Otherwise unset it")


def _is_service_link(name: str, text: str) -> bool:
    """Whether Kubernetes set this variable, as it does in every pod for each service of the
    namespace. A service may be named `perdure-...`."""
    return text.startswith(("tcp://", "udp://")) or _SERVICE_LINK.fullmatch(name) is not None


def _refuse_missing_file() -> None:
    """Refuse a missing file that the user named. The default file need not exist."""
    named = process_environment.variables().get("PERDURE_CONFIG")
    if named and not toml_file().exists():
        raise ConfigurationError(f"PERDURE_CONFIG={named!r}: there is no such file")


def _complaint(wrong: ErrorDetails) -> str:
    """One line that names the variable or the TOML key."""
    where = [str(part) for part in wrong["loc"]]
    known = fields()
    depth = next((n for n in (1, 2) if ".".join(where[:n]) in known), 0)
    if not depth:
        return _unknown_key(".".join(where))
    path, inner = ".".join(where[:depth]), ".".join(where[depth:])
    message = wrong["msg"].removeprefix("Value error, ")
    told = f"{message[:1].lower()}{message[1:]}"
    source = _source(path)
    if inner:
        unknown = wrong["type"] == "extra_forbidden"
        return f"{source}: {inner!r} " + (
            "is not a field of it" if unknown else f"is wrong: {told}"
        )
    if known[path].annotation is SecretStr:
        return f"{source}: {told}"
    return f"{source}={wrong['input']!r}: {told}"


def _source(path: str) -> str:
    """The name that the user wrote: the variable, its alias, or the key in the file."""
    if _is_given(path):
        return variable(path)
    if alias := variable_aliases.find_set_alias(path):
        return alias.name
    return f"{toml_file().name}: {path}"


def _unknown_key(name: str) -> str:
    groups = [one for one in Settings.model_fields if one not in fields()]
    if name in groups:
        return f"{toml_file().name}: {name!r} is a table: write [{name}] and its keys below"
    close = difflib.get_close_matches(name, [*fields(), *groups], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else "`perdure settings` lists them"
    return f"{toml_file().name}: {name!r} is not a setting: {hint}"


def _no_json(error: SettingsError) -> str:
    """The message for a variable whose value must be a JSON object and is not."""
    found = process_environment.variables()
    wrong = (one for one in map(variable, OBJECTS) if one in found and not _is_json(found[one]))
    name = next(wrong, PREFIX)
    return f"{name}={found.get(name, '')!r} is not JSON: {error.__cause__}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
