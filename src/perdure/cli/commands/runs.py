"""`perdure runs`: name, tag, archive and delete runs."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option, many, print_when_silent
from perdure.settings.settings_loader import load_settings

if TYPE_CHECKING:
    from perdure.cli.runs.run_deletion import FoundRun
    from perdure.rollouts.run_label import RunLabel

RUNS = click.argument(
    "run_ids", metavar="RUN...", nargs=-1, required=True, shell_complete=completion.runs
)


@click.group()
def runs() -> None:
    """Name, tag, archive and delete runs."""


@runs.command()
@RUNS
@click.option("--name", metavar="TEXT", help="Shown in lists and reports; '' removes it.")
@click.option("--note", metavar="TEXT", help="Shown by `perdure status RUN`; '' removes it.")
@click.option("--tag", "tags", multiple=True, metavar="T", help="Add a tag.")
@click.option("--untag", "gone", multiple=True, metavar="T", help="Remove a tag.")
@json_option
def edit(
    *,
    run_ids: tuple[str, ...],
    name: str | None,
    note: str | None,
    tags: tuple[str, ...],
    gone: tuple[str, ...],
    as_json: bool,
) -> None:
    """Change the name, note and tags of runs. `perdure status --tag T` lists the runs of a tag.

    The run id stays as it is.
    """
    texts = {key: one for key, one in (("name", name), ("note", note)) if one is not None}
    if not (texts or tags or gone):
        raise click.UsageError("nothing to change: give --name, --note, --tag or --untag")

    def changed(label: "RunLabel") -> dict[str, Any]:
        kept = dict.fromkeys(tag for tag in (*label.tags, *tags) if tag not in gone)
        return {**texts, "tags": tuple(kept)}

    _label(run_ids, changed, as_json)


@runs.command()
@RUNS
@json_option
def archive(run_ids: tuple[str, ...], as_json: bool) -> None:
    """Leave runs out of lists; `perdure status --archived` lists them."""
    _label(run_ids, lambda _: {"archived": True}, as_json)


@runs.command()
@RUNS
@json_option
def unarchive(run_ids: tuple[str, ...], as_json: bool) -> None:
    """Show archived runs in lists again."""
    _label(run_ids, lambda _: {"archived": False}, as_json)


@runs.command()
@RUNS
@click.option("--dry-run", is_flag=True, help="Print what would be deleted and exit.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def delete(run_ids: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete ended runs from the store and Temporal.

    This deletes episodes, patches, logs, recorded turns and workflows. It keeps instances and
    images, because other runs use them. If the command is interrupted, repeat it.
    """
    found = asyncio.run(_delete(run_ids, None))
    if not as_json:
        for one in found:
            click.echo(_deletes(one))
    if not dry_run:
        if not yes:
            click.confirm("Delete?", abort=True, err=True)
        with print_when_silent("deleting"):
            asyncio.run(_delete(run_ids, found))
    if as_json:
        answer([asdict(one) for one in found])
    elif not dry_run:
        click.echo(f"deleted {many(len(found), 'run')}")


async def _delete(run_ids: tuple[str, ...], found: "list[FoundRun] | None") -> "list[FoundRun]":
    """Without `found`, look at all runs and delete nothing. Otherwise delete `found`, to which the
    user has agreed."""
    from perdure.cli.runs import run_deletion
    from perdure.cli.temporal_connection import connect
    from perdure.storage.store_url import open_store

    settings = load_settings()
    client = (await connect(settings)).perdure.client
    store = open_store(settings)
    if found is None:
        wanted = dict.fromkeys(run_ids)
        return [await run_deletion.find(store, client, one) for one in wanted]
    for one in found:
        await run_deletion.delete(settings, store, client, one)
    return found


def _deletes(found: "FoundRun") -> str:
    journals = (
        f", with journals of {many(len(found.sessions), 'session')}" if found.sessions else ""
    )
    return (
        f"{found.run_id}: {many(found.objects, 'object')} in the store, {found.bytes / 1e6:,.1f} MB"
        f"{journals}; {many(found.workflows, 'workflow')} in Temporal; its rows in the viewer's index"
    )


def _label(run_ids: tuple[str, ...], changed: Any, as_json: bool) -> None:
    labels = asyncio.run(_change(run_ids, changed))
    if as_json:
        return answer({run_id: one.model_dump(mode="json") for run_id, one in labels.items()})
    for run_id, one in labels.items():
        shown = [one.heading, one.note, "archived" if one.archived else ""]
        click.echo(f"{run_id}: {', '.join(filter(None, shown)) or 'no name, note or tag'}")


async def _change(run_ids: tuple[str, ...], changed: Any) -> "dict[str, RunLabel]":
    """Raises: NotFound for an unknown run, before any is changed; ConfigurationError."""
    from perdure.rollouts import run_label
    from perdure.storage.store_url import open_store

    store = open_store(load_settings())
    wanted = dict.fromkeys(run_ids)
    for run_id in wanted:
        await run_label.check_exists(store, run_id)
    return {
        run_id: await run_label.change(
            store, run_id, lambda label: label.model_copy(update=changed(label))
        )
        for run_id in wanted
    }
