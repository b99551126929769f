"""`perdure engines list | add | drain | remove`: the engines that this home's gateways use."""

import asyncio
import time
from typing import TYPE_CHECKING, Literal

import click

from perdure.cli.commands.engines.engine_options import NAME, TOKENIZER, TOOL_CALL_PARSER, WEIGHT
from perdure.cli.console import answer, invoked_command, json_option
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle

if TYPE_CHECKING:
    from perdure.serving.replica_status import PoolStatus

SILENT_S = 60.0
"""The engine manager writes its status every few seconds. After this silence it must have ended."""


@click.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List every engine of the pool and every replica that Ray should run."""
    from perdure.cli.commands.engines.engine_replicas import print_replicas
    from perdure.stack.engine_presence import home_roster

    settings = load_settings()
    pools = [pool for pool in asyncio.run(_replicas(settings)) if pool.replicas]
    engines = asyncio.run(home_roster(settings).read()).engines
    known = [record for record in engines if not record.removed]
    if as_json:
        engines_here = [record.model_dump(mode="json") for record in known]
        replicas = [pool.model_dump(mode="json") for pool in pools]
        answer({"engines": engines_here, "replicas": replicas})
        return
    state = stack_lifecycle.running(settings)
    named_here = _names(settings.engine.url if state is None else state.engine)
    for record in known:
        version = "-" if record.version is None else record.version
        foreign = record.from_settings and named_here is not None and record.name not in named_here
        note = (
            "not used by this gateway (added under other settings); last known state"
            if foreign
            else record.reason
        )
        click.echo(
            f"{record.name:<24}{record.state.value:<10} model {record.model}  "
            f"generation {record.generation}  version {version}  weight {record.weight:g}  "
            f"{f'run {record.run}  ' if record.run else ''}{note}".rstrip()
        )
    if not known and not pools:
        add, up = (
            f"{invoked_command()} engines add URL",
            f"{invoked_command()} engines up --model M",
        )
        click.echo(f"No engines: add one with `{add}`, or start some with `{up}`")
    for pool in pools:
        print_replicas(pool)
        if (silent_s := time.time() - pool.at) > SILENT_S:
            click.echo(
                f"The engine manager last wrote this {silent_s / 60:.0f} min ago: "
                f"restart it with `{invoked_command()} engines up --served-model {pool.served_model}`"
            )
    if known and (state is not None or settings.gateway.url):
        gateway = state.gateway_url if state is not None else settings.gateway.url
        click.echo(f"Metrics {gateway}/metrics (perdure_engine_*)")


async def _replicas(settings: Settings) -> "list[PoolStatus]":
    from perdure.serving.replica_plan import find_pools
    from perdure.serving.replica_status import read_status
    from perdure.stack.engine_presence import home_roster_key
    from perdure.storage.store_url import open_store

    store = open_store(settings)
    pools = await find_pools(store, home_roster_key(settings))
    return [await read_status(store, pool) for pool in pools]


def _names(urls: str) -> set[str] | None:
    """Engines named in `URL=WEIGHT,URL`; None for a scripted engine, whose port is chosen at start."""
    from perdure.engines.reported_model import engine_names

    return None if urls.startswith("scripted:") else engine_names(urls)


@click.command()
@click.argument("url")
@WEIGHT
@click.option(
    "--kind",
    type=click.Choice(["vllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="Server whose token endpoint the engine has.",
)
@click.option(
    "--model",
    metavar="M",
    help="Name of the model that it serves; runs choose it with --model M.  [default: the engine's"
    " own if it is known, or PERDURE_ENGINE__MODEL, or policy]",
)
@TOKENIZER
@TOOL_CALL_PARSER
@click.option(
    "--run", metavar="RUN", help="Sample only for this run, or for runs that match this glob."
)
@json_option
def add(
    url: str,
    *,
    weight: float,
    kind: Literal["vllm", "sglang"],
    model: str | None,
    tokenizer: str | None,
    tool_call_parser: str,
    run: str | None,
    as_json: bool,
) -> None:
    """Use an engine that runs elsewhere. Run it again to change its options."""
    from perdure.engines.engine_roster import add_engine
    from perdure.engines.engine_state import EngineSpec
    from perdure.errors import ConfigurationError
    from perdure.gateway.rendering.message_format import checked_format
    from perdure.stack.engine_presence import home_roster
    from perdure.types import DEFAULT_MODEL

    settings = load_settings()
    model_format = checked_format(tokenizer, tool_call_parser, "--tokenizer")
    adding = add_engine(
        home_roster(settings),
        EngineSpec(url, weight, kind),
        model,
        default=settings.engine.model or DEFAULT_MODEL,
        model_format=model_format,
        run=run,
    )
    try:
        record = asyncio.run(adding)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if as_json:
        answer(record.model_dump(mode="json"))
    else:
        click.echo(f"{record.name} takes sessions once a gateway has sampled a token from it.")


@click.command()
@NAME
@click.option(
    "--deadline",
    type=click.FloatRange(0),
    default=300.0,
    metavar="SECONDS",
    show_default=True,
    help="Time for its open sessions to end.",
)
@json_option
def drain(name: str, deadline: float, as_json: bool) -> None:
    """Give an engine no new sessions, then remove it.

    It is removed when its sessions have ended. Sessions that are still open at the deadline
    continue on other engines. A drained replica is replaced.
    """
    from perdure.engines.engine_roster import drain_engine
    from perdure.stack.engine_presence import home_roster

    record = asyncio.run(drain_engine(home_roster(load_settings()), name, deadline))
    if as_json:
        answer(record.model_dump(mode="json"))
    else:
        click.echo(f"{name} drains for at most {deadline:g} s.")


@click.command()
@NAME
@json_option
def remove(name: str, as_json: bool) -> None:
    """Remove an engine now. Its calls continue on other engines; a removed replica is replaced."""
    from perdure.engines.engine_roster import remove_engine
    from perdure.stack.engine_presence import home_roster

    asyncio.run(remove_engine(home_roster(load_settings()), name))
    if as_json:
        answer({"removed": name})
    else:
        click.echo(f"{name} is removed.")
