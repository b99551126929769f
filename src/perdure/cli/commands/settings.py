"""`perdure settings`: every setting, its value here and where that came from."""

from pathlib import Path
from typing import Any

import click

from perdure.cli.console import answer, json_option
from perdure.settings import PREFIX, Settings
from perdure.stack import config

HEAD = """# Settings

Every process reads the same settings: a `PERDURE_*` variable first, then `perdure.toml` in the
working directory (or the file that `PERDURE_CONFIG` names), then the default. Temporal's own
address, namespace, TLS and profile come from Temporal's variables and files (`TEMPORAL_ADDRESS`,
`TEMPORAL_NAMESPACE`, `TEMPORAL_PROFILE`, ...). `perdure settings` prints what holds here.

<!-- Written by `perdure settings --markdown`. -->

| variable | `perdure.toml` | default | meaning |
|---|---|---|---|"""


@click.command()
@click.option("--markdown", is_flag=True, help="Print the page docs/settings.md.")
@json_option
def settings(markdown: bool, as_json: bool) -> None:
    """Every setting, its value and where that came from."""
    if markdown:
        click.echo(page())
        return
    resolved = config.load_settings()
    rows = [_row(name, resolved) for name in Settings.model_fields]
    if as_json:
        answer({row["name"]: row for row in rows})
        return
    for row in rows:
        click.secho(f"{row['variable']}={row['value']}", bold=row["origin"] != "default", nl=False)
        click.secho(f"   ({row['origin']})", dim=True)
        click.echo(f"    {row['meaning']}")


def page() -> str:
    """docs/settings.md: the same strings that `--help` and this command print."""
    lines = [HEAD]
    for name, field in Settings.model_fields.items():
        default = str(field.get_default(call_default_factory=True))
        shown = f"`{default}`" if default else "empty"
        lines.append(f"| `{PREFIX}{name.upper()}` | `{name}` | {shown} | {_meaning(name)} |")
    lines += ["", "Variables that are no settings:", ""]
    lines += [f"- `{name}`: {text}." for name, text in config.NOT_SETTINGS.items()]
    return "\n".join(lines)


def _row(name: str, resolved: Settings) -> dict[str, Any]:
    value = getattr(resolved, name)
    return {
        "name": name,
        "variable": PREFIX + name.upper(),
        "value": str(value) if isinstance(value, Path) else value,
        "origin": str(config.origin(name, resolved)),
        "meaning": _meaning(name),
    }


def _meaning(name: str) -> str:
    return " ".join((Settings.model_fields[name].description or "").split())
