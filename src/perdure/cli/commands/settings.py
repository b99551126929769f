"""`perdure settings`: lists every setting, its value and where the value comes from."""

from typing import Any

import click

from perdure.cli.console import answer, json_option
from perdure.settings import settings_loader
from perdure.settings.settings_page import meaning, page, shown
from perdure.settings.settings_tree import Settings


@click.command()
@click.option("--markdown", is_flag=True, help="Print the page docs/settings.md.")
@json_option
def settings(markdown: bool, as_json: bool) -> None:
    """List every setting, its value and where the value comes from."""
    if markdown:
        click.echo(page())
        return
    resolved = settings_loader.load_settings()
    rows = [_row(path, resolved) for path in settings_loader.fields()]
    if as_json:
        answer({row["name"]: row for row in rows})
        return
    for row in rows:
        click.secho(f"{row['variable']}={row['value']}", bold=row["origin"] != "default", nl=False)
        click.secho(f"   ({row['origin']})", dim=True)
        click.echo(f"    {row['meaning']}")


def _row(path: str, resolved: Settings) -> dict[str, Any]:
    return {
        "name": path,
        "variable": settings_loader.variable(path),
        "value": shown(settings_loader.value(resolved, path)),
        "origin": str(settings_loader.origin(path, resolved)),
        "meaning": meaning(path),
    }
