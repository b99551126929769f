"""`perdure engines up | down | logs`: engine replicas that Ray keeps running."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.commands.engines.engine_options import (
    ADDRESS,
    SERVED_MODEL,
    TOKENIZER,
    TOOL_CALL_PARSER,
    WEIGHT,
)
from perdure.cli.console import answer, invoked_command, json_option, say
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from perdure.engines.auth_proxy import KeyHashes
    from perdure.serving.replica_plan import EnginePlan, ReplicaPool
    from perdure.serving.replica_status import PoolStatus


@click.command()
@click.option(
    "--model", default="", metavar="M", help="A hub name or a folder.  [default: the last one]"
)
@SERVED_MODEL
@TOKENIZER
@TOOL_CALL_PARSER
@click.option(
    "--replicas",
    type=click.IntRange(0, 512),
    default=1,
    metavar="N",
    show_default=True,
    help="Replicas to keep running.",
)
@click.option(
    "--gpus-per-replica", type=click.IntRange(0, 64), default=1, metavar="G", show_default=True
)
@click.option(
    "--cpus-per-replica", type=click.FloatRange(0), default=1.0, metavar="C", show_default=True
)
@click.option(
    "--server",
    type=click.Choice(["vllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="Inference server.",
)
@click.option(
    "--executable",
    default="",
    metavar="PATH",
    help="Path of vllm, or of a Python with sglang, in its own environment.",
)
@click.option(
    "--vllm-args",
    "arguments",
    default="",
    metavar="'--FLAG VALUE ...'",
    help="More arguments for the server, also for sglang.",
)
@click.option(
    "--engine-command",
    default="",
    metavar="'COMMAND'",
    help="Command of another server with vLLM's token endpoint; {model} {host} {port} {generation} are"
    " replaced.",
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="Environment variable of the server.",
)
@WEIGHT
@click.option(
    "--listen",
    default="",
    metavar="ADDRESS",
    help="Address to listen on.  [default: loopback if Ray runs only on this machine, otherwise each"
    " node's address]",
)
@click.option(
    "--wait/--no-wait",
    default=True,
    show_default=True,
    help="Wait until every replica has sampled a token; Ctrl-C does not stop them.",
)
@ADDRESS
@json_option
def up(model: str, ray_address: str, wait: bool, as_json: bool, **options: Any) -> None:
    """Keep N replicas of an engine running on Ray, for each model.

    Run it again to change the settings. Exit code 1: the manager gave up on a replica. The reason
    is printed; `perdure engines logs` prints the end of the replica's log.
    """
    settings = load_settings()
    status = asyncio.run(_up(settings, model, ray_address, wait, options))
    if as_json:
        answer(json.loads(status.model_dump_json()))
    else:
        print_replicas(status)
    if any(replica.state == "given up" for replica in status.replicas):
        raise click.exceptions.Exit(1)


async def _up(
    settings: Settings, model: str, address: str, wait: bool, options: dict[str, Any]
) -> "PoolStatus":
    from perdure.errors import ConfigurationError
    from perdure.serving import ray_cluster
    from perdure.serving.replica_plan import read_plan
    from perdure.serving.replica_status import PoolStatus
    from perdure.storage.store_url import open_store

    pool = _pool(settings, options["served_model"])
    if model:
        plan: EnginePlan | None = _plan(pool, model, options)
        await _add_model(settings, pool, model, options)
    else:
        plan = await read_plan(open_store(settings), pool)
    if plan is None:
        raise ConfigurationError(
            f"--model is missing, and no earlier `engines up` served the model {pool.served_model}"
        )
    connected = ray_cluster.connect(settings, address)
    from perdure.serving import replica_manager

    if connected.local and not plan.listen:
        folder = str(settings.home.absolute() / "logs" / "engines")
        plan = plan.model_copy(update={"listen": ray_cluster.LOOPBACK, "folder": folder})
    plan = plan.model_copy(update={"proxy_keys": _proxy_keys(settings, plan.listen)})
    if connected.dashboard:
        say(f"Ray dashboard {connected.dashboard}")
    actor = replica_manager.get_or_start(settings, pool, connected.dashboard)
    await actor.apply.remote(plan.model_dump_json())
    told: set[str] = set()
    while True:
        status = PoolStatus.model_validate_json(await actor.status.remote())
        _tell(status, told)
        settled = len(status.replicas) == plan.replicas and all(
            replica.engine or replica.state == "given up" for replica in status.replicas
        )
        if settled or not wait:
            return status
        await asyncio.sleep(0.5)


def _tell(status: "PoolStatus", told: set[str]) -> None:
    """Print changes of replicas that are not ready: a start may take minutes."""
    for one in status.replicas:
        line = f"replica {one.index} {one.state}{f': {one.reason}' if one.reason else ''}"
        if one.state != "ready" and line not in told:
            told.add(line)
            say(line)


def _pool(settings: Settings, served_model: str | None) -> "ReplicaPool":
    from perdure.serving.replica_plan import ReplicaPool
    from perdure.stack.engine_presence import home_roster_key

    return ReplicaPool(home_roster_key(settings), served_model or _default_model(settings))


def _default_model(settings: Settings) -> str:
    from perdure.types import DEFAULT_MODEL

    return settings.engine.model or DEFAULT_MODEL


async def _add_model(
    settings: Settings, pool: "ReplicaPool", model: str, options: dict[str, Any]
) -> None:
    """Register the tokenizer of a model that the settings do not describe. If the model is a folder that
    has one, it is the default."""
    from perdure.engines.engine_roster import add_model
    from perdure.gateway.rendering.message_format import checked_format
    from perdure.stack.engine_presence import home_roster

    tokenizer, default = options["tokenizer"], _default_model(settings)
    if (
        tokenizer is None
        and pool.served_model != default
        and (Path(model) / "tokenizer.json").exists()
    ):
        tokenizer = model
    model_format = checked_format(tokenizer, options["tool_call_parser"], "--tokenizer")
    await add_model(home_roster(settings), pool.served_model, model_format, default=default)


def _plan(pool: "ReplicaPool", model: str, options: dict[str, Any]) -> "EnginePlan":
    from perdure.errors import ConfigurationError
    from perdure.serving import engine_commands
    from perdure.serving.replica_plan import EnginePlan

    command = engine_commands.words(options["engine_command"])
    variables = dict(pair.partition("=")[::2] for pair in options["variables"])
    if "" in variables or any("=" not in pair for pair in options["variables"]):
        raise ConfigurationError("--env: write it as NAME=VALUE")
    return EnginePlan(
        model=model,
        served_model=pool.served_model,
        replicas=options["replicas"],
        gpus_per_replica=options["gpus_per_replica"],
        cpus_per_replica=options["cpus_per_replica"],
        server="custom" if command else options["server"],
        executable=options["executable"],
        command=command,
        arguments=engine_commands.words(options["arguments"]),
        environment=variables,
        weight=options["weight"],
        listen=options["listen"],
    )


def _proxy_keys(settings: Settings, listen: str) -> "KeyHashes | None":
    """The keys that the engine requires; None on loopback, which other machines cannot reach."""
    from perdure.engines.auth_proxy import engine_keys, key_hashes
    from perdure.home_folder import load_secret

    if listen in ("127.0.0.1", "::1", "localhost"):
        return None
    return key_hashes(engine_keys(load_secret(settings)))


@click.command()
@ADDRESS
@json_option
def down(ray_address: str, as_json: bool) -> None:
    """Stop the replicas of all models and the Ray node that `up` started. Engines added by `add` stay."""
    settings = load_settings()
    asyncio.run(_down(settings, ray_address))
    from perdure.serving import ray_cluster

    ended = ray_cluster.stop_local(settings)
    if as_json:
        answer({"replicas": 0, "ended_ray_node": ended})
    else:
        click.echo("No replicas are running.")


async def _down(settings: Settings, address: str) -> None:
    from perdure.errors import ConfigurationError
    from perdure.serving import ray_cluster
    from perdure.serving.replica_plan import find_pools
    from perdure.stack.engine_presence import home_roster_key
    from perdure.storage.store_url import open_store

    try:
        ray_cluster.connect(settings, address, start=False)
    except ConfigurationError:
        return  # no cluster, no replicas
    import ray

    from perdure.serving import replica_manager

    for pool in await find_pools(open_store(settings), home_roster_key(settings)):
        actor = replica_manager.find(pool)
        if actor is not None:
            await actor.stop.remote()
            ray.kill(actor)
    ray.shutdown()


def print_replicas(status: "PoolStatus") -> None:
    """Print one line per replica; those that are being stopped come last."""
    for one in (*status.replicas, *status.leaving):
        click.echo(
            f"replica {one.index}  {status.served_model}  {one.state:<12}{one.engine:<24}{one.reason}".rstrip()
        )
    if status.dashboard:
        click.echo(f"Ray dashboard {status.dashboard}")


@click.command()
@click.argument("replica", type=click.IntRange(0), default=0)
@click.option("-n", "--lines", type=click.IntRange(1), default=100, metavar="N", show_default=True)
@SERVED_MODEL
@ADDRESS
def logs(replica: int, lines: int, served_model: str | None, ray_address: str) -> None:
    """Print the end of a replica's log. If it is not running, this is the log of its last start."""
    settings = load_settings()
    log = asyncio.run(_log_end(settings, replica, _pool(settings, served_model), ray_address))
    click.echo(b"\n".join(log.splitlines()[-lines:]))


async def _log_end(settings: Settings, replica: int, pool: "ReplicaPool", address: str) -> bytes:
    from perdure.errors import NotFound
    from perdure.serving import ray_cluster
    from perdure.serving.replica_status import PoolStatus

    ray_cluster.connect(settings, address, start=False)
    from perdure.serving import replica_manager

    actor = replica_manager.find(pool)
    if actor is None:
        raise NotFound(f"no replicas: start some with `{invoked_command()} engines up --model M`")
    status = PoolStatus.model_validate_json(await actor.status.remote())
    if replica not in {one.index for one in status.replicas}:
        raise NotFound(
            f"no replica {replica}: `{invoked_command()} engines list` shows their numbers"
        )
    log: bytes = await actor.tail.remote(replica)
    return log
