"""Generates docs/settings.md from the tree of settings and the tables of variables."""

from inspect import cleandoc
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from perdure.settings import process_environment, settings_loader, variable_aliases
from perdure.settings.settings_tree import Settings

HEAD = """# Settings

<!-- Written by `perdure settings --markdown`; edit the docstrings in src/perdure/settings instead. -->

`perdure settings` prints each setting with its value and where that came from. Below, defaults are
in brackets. A process takes a setting from the first of these places that has it:

1. its `PERDURE_*` variable;
2. a variable of another system that [sets it](#variables-of-other-systems);
3. `perdure.toml` in the working directory, or the file that `PERDURE_CONFIG` names;
4. its default.

A variable's name is the path of its key: `port` in the table `[gateway]` is
`PERDURE_GATEWAY__PORT`. An empty variable counts as unset. Unknown variables and keys are errors.

```toml
store = "s3://bucket/prefix"

[gateway]
processes = 2

[sandbox.caps.e2b]
live = 20
```
"""


def page() -> str:
    """The whole page."""
    groups = [one for one in Settings.model_fields if one not in settings_loader.fields()]
    parts = [HEAD, _table("", "At the top of the file, before any table.")]
    parts += [_table(group, model(group).__doc__ or "") for group in groups]
    parts += [_aliases(), _others()]
    return "\n".join(parts).rstrip()


def meaning(path: str) -> str:
    """The description of one setting."""
    return " ".join((settings_loader.fields()[path].description or "").split())


def shown(found: Any) -> Any:
    """A printable form of a value. For a secret, it only shows whether one is set."""
    if isinstance(found, SecretStr):
        return "**********" if found.get_secret_value() else ""
    if isinstance(found, Path):
        return str(found)
    if isinstance(found, dict | BaseModel):
        return settings_loader.jsonable(found)
    return found


def model(group: str) -> type[BaseModel]:
    """The model of one table."""
    found = Settings.model_fields[group].annotation
    assert isinstance(found, type)
    assert issubclass(found, BaseModel)
    return found


def _table(group: str, about: str) -> str:
    title = f"[{group}]" if group else "Top level"
    rows = [
        f"## {title}",
        "",
        cleandoc(about),
        "",
    ]
    for path, field in settings_loader.fields().items():
        if path.rpartition(".")[0] == group:
            default = shown(field.get_default(call_default_factory=True))
            told = f" (`{default}`)" if default not in (None, "", {}) else ""
            rows.append(f"- `{settings_loader.variable(path)}`{told}: {meaning(path)}")
    return "\n".join(rows) + "\n"


def _aliases() -> str:
    rows = ["## Variables of other systems", ""]
    rows += ["A variable that sets a field of a request sets the client's default.", ""]
    rows += ["| variable | sets |", "|---|---|"]
    names: dict[str, list[str]] = {}
    for one in variable_aliases.ALIASES:
        target = f"`{settings_loader.variable(one.stands_for)}`"
        if one.kind == "field":
            value = "=partial" if one.value == "dense" else ""
            agent = f" ({one.agent})" if one.agent else ""
            target = f"`{one.stands_for}{value}` of a request{agent}"
        names.setdefault(target, []).append(f"`{one.name}`")
    for name, reason in variable_aliases.NOT_APPLICABLE.items():
        names.setdefault(f"nothing: {reason}", []).append(f"`{name}`")
    rows += [f"| {', '.join(found)} | {target} |" for target, found in names.items()]
    return "\n".join(rows) + "\n"


def _others() -> str:
    rows = ["## Variables of other tools", ""]
    rows += ["Perdure uses them under their own names.", ""]
    for tool in process_environment.FOREIGN:
        names = ", ".join(f"`{name}`" for name in tool.names)
        rows.append(f"- {tool.tool} ({names}): {tool.about}")
    rows += ["", "## Variables without a setting", ""]
    rows += [f"- `{name}`: {text}." for name, text in process_environment.OWN.items()]
    return "\n".join(rows)
