"""`perdure accounts`: model and sandbox accounts whose rollouts are parked."""

import asyncio
import time
from typing import TYPE_CHECKING

import click

from perdure.cli.console import answer, json_option, many
from perdure.settings.settings_loader import load_settings

if TYPE_CHECKING:
    from perdure.engines.quota_resets import QuotaReset


@click.group()
def accounts() -> None:
    """List accounts at their quota or without credits; open them early."""


@accounts.command("list")
@json_option
def list_closed(as_json: bool) -> None:
    """List closed accounts, and when they open.

    Their rollouts are parked until then.
    """
    closed = asyncio.run(_closed())
    if as_json:
        answer([one.model_dump() for one in closed])
    elif not closed:
        click.echo("No account is closed.")
    else:
        _show(closed)


@accounts.command("open")
@json_option
def open_now(as_json: bool) -> None:
    """Continue all parked rollouts now.

    For example after you bought credits. An account that still refuses parks them again.
    """
    closed, parked = asyncio.run(_open())
    if as_json:
        answer({"opened": [one.model_dump() for one in closed], "continued": parked})
    else:
        _show(closed)
        click.echo(f"{many(parked, 'parked rollout')} continue{'s' if parked == 1 else ''} now")


def _show(closed: "list[QuotaReset]") -> None:
    for one in closed:
        click.echo(f"{one.account}: {one.reason}")


async def _closed() -> "list[QuotaReset]":
    from perdure.engines.quota_resets import closed_accounts
    from perdure.storage.store_url import open_store

    return await closed_accounts(open_store(load_settings()), time.time())


async def _open() -> "tuple[list[QuotaReset], int]":
    """The accounts that were closed, and the number of parked rollouts."""
    from temporalio.service import RPCError, RPCStatusCode

    from perdure.cli.temporal_connection import connect
    from perdure.client import rollout_listing, temporal_names
    from perdure.engines.quota_resets import open_accounts
    from perdure.storage.store_url import open_store

    settings = load_settings()
    client = (await connect(settings)).perdure.client
    closed = await _closed()
    await open_accounts(open_store(settings))
    parked = await rollout_listing.parked(client)
    for workflow_id in parked:
        try:
            await client.get_workflow_handle(workflow_id).signal(temporal_names.OPENED)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:  # it has ended since
                raise
    return closed, len(parked)
