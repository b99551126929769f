"""`perdure engines up | down | logs`: engine replicas that Ray keeps running."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.commands.engines.engine_options import ADDRESS, WEIGHT
from perdure.cli.console import answer, invoked_command, json_option, say
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from perdure.engines.auth_proxy import KeyHashes
    from perdure.serving.replica_plan import EnginePlan
    from perdure.serving.replica_status import PoolStatus


@click.command()
@click.option(
    "--model", default="", metavar="M", help="A hub name or a folder.  [default: the last one]"
)
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
    """Keep N replicas of an engine running on Ray.

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
    from perdure.stack.engine_presence import home_roster_key
    from perdure.storage.store_url import open_store

    key = home_roster_key(settings)
    plan = _plan(settings, model, options) if model else await read_plan(open_store(settings), key)
    if plan is None:
        raise ConfigurationError(
            "--model is missing, and no earlier `engines up` in this home named a model"
        )
    connected = ray_cluster.connect(settings, address)
    from perdure.serving import replica_manager

    if connected.local and not plan.listen:
        folder = str(settings.home.absolute() / "logs" / "engines")
        plan = plan.model_copy(update={"listen": ray_cluster.LOOPBACK, "folder": folder})
    plan = plan.model_copy(update={"proxy_keys": _proxy_keys(settings, plan.listen)})
    if connected.dashboard:
        say(f"Ray dashboard {connected.dashboard}")
    actor = replica_manager.get_or_start(settings, key, connected.dashboard)
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


def _plan(settings: Settings, model: str, options: dict[str, Any]) -> "EnginePlan":
    from perdure.errors import ConfigurationError
    from perdure.serving import engine_commands
    from perdure.serving.replica_plan import EnginePlan

    command = engine_commands.words(options["engine_command"])
    variables = dict(pair.partition("=")[::2] for pair in options["variables"])
    if "" in variables or any("=" not in pair for pair in options["variables"]):
        raise ConfigurationError("--env: write it as NAME=VALUE")
    return EnginePlan(
        model=model,
        served_model=settings.engine.model or "policy",
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
    """Stop all replicas and the Ray node that `up` started. Engines added by `add` stay."""
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
    from perdure.stack.engine_presence import home_roster_key

    try:
        ray_cluster.connect(settings, address, start=False)
    except ConfigurationError:
        return  # no cluster, no replicas
    import ray

    from perdure.serving import replica_manager

    actor = replica_manager.find(home_roster_key(settings))
    if actor is not None:
        await actor.stop.remote()
        ray.kill(actor)
    ray.shutdown()


def print_replicas(status: "PoolStatus") -> None:
    """Print one line per replica; those that are being stopped come last."""
    for one in (*status.replicas, *status.leaving):
        click.echo(f"replica {one.index}  {one.state:<12}{one.engine:<24}{one.reason}".rstrip())
    if status.dashboard:
        click.echo(f"Ray dashboard {status.dashboard}")


@click.command()
@click.argument("replica", type=click.IntRange(0), default=0)
@click.option("-n", "--lines", type=click.IntRange(1), default=100, metavar="N", show_default=True)
@ADDRESS
def logs(replica: int, lines: int, ray_address: str) -> None:
    """Print the end of a replica's log. If it is not running, this is the log of its last start."""
    settings = load_settings()
    log = asyncio.run(_log_end(settings, replica, ray_address))
    click.echo(b"\n".join(log.splitlines()[-lines:]))


async def _log_end(settings: Settings, replica: int, address: str) -> bytes:
    from perdure.errors import NotFound
    from perdure.serving import ray_cluster
    from perdure.serving.replica_status import PoolStatus
    from perdure.stack.engine_presence import home_roster_key

    ray_cluster.connect(settings, address, start=False)
    from perdure.serving import replica_manager

    actor = replica_manager.find(home_roster_key(settings))
    if actor is None:
        raise NotFound(f"no replicas: start some with `{invoked_command()} engines up --model M`")
    status = PoolStatus.model_validate_json(await actor.status.remote())
    if replica not in {one.index for one in status.replicas}:
        raise NotFound(
            f"no replica {replica}: `{invoked_command()} engines list` shows their numbers"
        )
    log: bytes = await actor.tail.remote(replica)
    return log
