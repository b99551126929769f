"""`perdure engines`: start, list, add, drain, remove and read the engines of a home.

Talks to the shared roster and to the manager on Ray; needs no gateway that runs.
"""

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Literal

import click

from perdure.cli.console import answer, json_option, me, say
from perdure.settings.load import load_settings
from perdure.settings.tree import Settings
from perdure.stack import lifecycle

if TYPE_CHECKING:
    from perdure.engines.proxy import KeyHashes
    from perdure.engines.roster import StoredRoster
    from perdure.engines.state import EngineRecord
    from perdure.serving.plan import EnginePlan
    from perdure.serving.status import PoolStatus

SILENT_S = 60.0
"""A manager tells every few seconds what it sees; after so long it is taken for gone."""


def _name(_context: click.Context, _argument: click.Parameter, text: str) -> str:
    """`host:port`, or the URL that `add` takes."""
    from perdure.engines.state import name_of

    try:
        return name_of(text) if "://" in text else text
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


NAME = click.argument("name", metavar="HOST:PORT", callback=_name)
ADDRESS = click.option(
    "--ray-address",
    default="",
    metavar="HOST:PORT",
    help="A Ray cluster; default: RAY_ADDRESS, or one of our own.",
)
WEIGHT = click.option(
    "--weight",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    metavar="W",
    show_default=True,
    help="Its share of new sessions, relative to the others.",
)


@click.group()
def engines() -> None:
    """Start engines on Ray; list, add, drain, remove."""


@engines.command()
@click.option(
    "--model", default="", metavar="M", help="A hub name or a folder. Default: what was up before."
)
@click.option(
    "--replicas",
    type=click.IntRange(0, 512),
    default=1,
    metavar="N",
    show_default=True,
    help="How many to keep running.",
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
    help="What serves the model.",
)
@click.option(
    "--executable",
    default="",
    metavar="PATH",
    help="vllm, or sglang's Python, in its own environment.",
)
@click.option(
    "--vllm-args",
    "arguments",
    default="",
    metavar="'--FLAG VALUE ...'",
    help="Further words for the server (sglang's too).",
)
@click.option(
    "--engine-command",
    default="",
    metavar="'WORDS'",
    help="Another server with vLLM's token endpoint; {model} {host} {port} {generation} are filled in.",
)
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="For the server's process."
)
@WEIGHT
@click.option(
    "--listen",
    default="",
    metavar="ADDRESS",
    help="Default: loopback on our own cluster, else each node's address.",
)
@click.option(
    "--wait/--no-wait",
    default=True,
    show_default=True,
    help="Until every replica has sampled a token; Ctrl-C leaves it going.",
)
@ADDRESS
@json_option
def up(model: str, ray_address: str, wait: bool, as_json: bool, **wishes: Any) -> None:
    """Keep N replicas of an engine running on Ray.

    Again: with other wishes. Exit code 1: a replica was given up; the reason is printed, `perdure engines logs` has the rest.
    """
    settings = load_settings()
    status = asyncio.run(_up(settings, model, ray_address, wait, wishes))
    _print_status(status, as_json)
    if any(replica.state == "given up" for replica in status.replicas):
        raise click.exceptions.Exit(1)


async def _up(
    settings: Settings, model: str, address: str, wait: bool, wishes: dict[str, Any]
) -> "PoolStatus":
    from perdure.errors import ConfigurationError
    from perdure.serving import cluster
    from perdure.serving.plan import read_plan
    from perdure.serving.status import PoolStatus
    from perdure.storage.base import open_store

    key = _roster_key(settings)
    plan = _plan(settings, model, wishes) if model else await read_plan(open_store(settings), key)
    if plan is None:
        raise ConfigurationError("--model is missing: nothing was up in this home before")
    connected = cluster.connect(settings, address)
    from perdure.serving import manager

    if connected.local and not plan.listen:
        folder = str(settings.home.absolute() / "logs" / "engines")
        plan = plan.model_copy(update={"listen": cluster.LOOPBACK, "folder": folder})
    plan = plan.model_copy(update={"proxy_keys": _proxy_keys(settings, plan.listen)})
    if connected.dashboard:
        say(f"Ray dashboard {connected.dashboard}")
    actor = manager.get_or_start(settings, key, connected.dashboard)
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
    """What is new of replicas that are not ready: a start may take minutes, or wait for a node."""
    for one in status.replicas:
        line = f"replica {one.index} {one.state}{f': {one.reason}' if one.reason else ''}"
        if one.state != "ready" and line not in told:
            told.add(line)
            say(line)


def _plan(settings: Settings, model: str, wishes: dict[str, Any]) -> "EnginePlan":
    from perdure.errors import ConfigurationError
    from perdure.serving import commands
    from perdure.serving.plan import EnginePlan

    command = commands.words(wishes["engine_command"])
    variables = dict(pair.partition("=")[::2] for pair in wishes["variables"])
    if "" in variables or any("=" not in pair for pair in wishes["variables"]):
        raise ConfigurationError("--env wants NAME=VALUE")
    return EnginePlan(
        model=model,
        served_model=settings.engine.model or "policy",
        replicas=wishes["replicas"],
        gpus_per_replica=wishes["gpus_per_replica"],
        cpus_per_replica=wishes["cpus_per_replica"],
        server="custom" if command else wishes["server"],
        executable=wishes["executable"],
        command=command,
        arguments=commands.words(wishes["arguments"]),
        environment=variables,
        weight=wishes["weight"],
        listen=wishes["listen"],
    )


def _proxy_keys(settings: Settings, listen: str) -> "KeyHashes | None":
    """What asks for keys on an address that others can reach; loopback is its own guard."""
    from perdure.engines.proxy import engine_keys, key_hashes
    from perdure.home import load_secret

    if listen in ("127.0.0.1", "::1", "localhost"):
        return None
    return key_hashes(engine_keys(load_secret(settings)))


@engines.command()
@ADDRESS
@json_option
def down(ray_address: str, as_json: bool) -> None:
    """End all replicas, and the Ray node that `up` started. Engines that were added stay known."""
    settings = load_settings()
    asyncio.run(_down(settings, ray_address))
    from perdure.serving import cluster

    ended = cluster.stop_local(settings)
    if as_json:
        answer({"replicas": 0, "ended_ray_node": ended})
    else:
        click.echo("No replicas run.")


async def _down(settings: Settings, address: str) -> None:
    from perdure.errors import ConfigurationError
    from perdure.serving import cluster

    try:
        cluster.connect(settings, address, start=False)
    except ConfigurationError:
        return  # no cluster, no replicas
    import ray

    from perdure.serving import manager

    actor = manager.find(_roster_key(settings))
    if actor is not None:
        await actor.stop.remote()
        ray.kill(actor)
    ray.shutdown()


@engines.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """Every engine of the pool, and every replica that is wanted."""
    from perdure.serving.status import read_status
    from perdure.storage.base import open_store

    settings = load_settings()
    key = _roster_key(settings)
    status = asyncio.run(read_status(open_store(settings), key))
    roster = asyncio.run(_roster(settings).read())
    known = [record for record in roster.engines if not record.removed]
    if as_json:
        pool = [record.model_dump(mode="json") for record in known]
        answer({"engines": pool, "replicas": json.loads(status.model_dump_json())})
        return
    state = lifecycle.running(settings)
    here = _named(settings.engine.url if state is None else state.engine)
    for record in known:
        version = "-" if record.version is None else record.version
        foreign = record.from_settings and here is not None and record.name not in here
        note = "of a gateway with other settings, as that saw it last" if foreign else record.reason
        click.echo(
            f"{record.name:<24}{record.state.value:<10} generation {record.generation}  "
            f"version {version}  weight {record.weight:g}  {note}".rstrip()
        )
    if not known and not status.replicas:
        click.echo(f"No engines: {me()} engines add URL, or {me()} engines up --model M")
    if status.replicas:
        _print_status(status, False)
        if (silent_s := time.time() - status.at) > SILENT_S:
            click.echo(
                f"This is what their manager saw {silent_s / 60:.0f} min ago, and it says nothing any "
                f"more: `{me()} engines up` starts it again"
            )
    if known and (state is not None or settings.gateway.url):
        gateway = state.gateway_url if state is not None else settings.gateway.url
        click.echo(f"Their metrics {gateway}/metrics (perdure_engine_*)")


def _named(urls: str) -> set[str] | None:
    """The names in `URL=WEIGHT,URL`; None where a scripted engine has a port nobody named."""
    from perdure.engines.state import name_of

    if urls.startswith("scripted:"):
        return None
    names = set()
    for part in urls.split(","):
        with contextlib.suppress(ValueError):
            names.add(name_of(part.strip().partition("=")[0]))
    return names


def _print_status(status: "PoolStatus", as_json: bool) -> None:
    if as_json:
        answer(json.loads(status.model_dump_json()))
        return
    for one in (*status.replicas, *status.leaving):
        click.echo(f"replica {one.index}  {one.state:<12}{one.engine:<24}{one.reason}".rstrip())
    if status.dashboard:
        click.echo(f"Ray dashboard {status.dashboard}")


@engines.command()
@click.argument("url")
@WEIGHT
@click.option(
    "--kind",
    type=click.Choice(["vllm", "sglang"]),
    default="vllm",
    show_default=True,
    help="Whose token endpoint it has.",
)
@json_option
def add(url: str, weight: float, kind: Literal["vllm", "sglang"], as_json: bool) -> None:
    """Let an engine that runs elsewhere take sessions. Again: with another weight."""
    from perdure.engines.roster import add_engine
    from perdure.engines.state import EngineSpec
    from perdure.errors import ConfigurationError

    settings = load_settings()
    model = settings.engine.model or "policy"
    try:
        spec = EngineSpec(url, weight, kind)
        record = asyncio.run(add_engine(_roster(settings), spec, model))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if as_json:
        answer(record.model_dump(mode="json"))
    else:
        click.echo(f"{record.name} takes sessions once a gateway has seen a token from it.")


@engines.command()
@NAME
@click.option(
    "--deadline",
    type=click.FloatRange(0),
    default=300.0,
    metavar="SECONDS",
    show_default=True,
    help="For what it still has.",
)
@json_option
def drain(name: str, deadline: float, as_json: bool) -> None:
    """Give it nothing new, and take it out when it is done.

    What it still has at the deadline goes on elsewhere. A replica is replaced.
    """
    from perdure.engines.roster import drain_engine

    record = asyncio.run(drain_engine(_roster(load_settings()), name, deadline))
    if as_json:
        answer(record.model_dump(mode="json"))
    else:
        click.echo(f"{name} drains for at most {deadline:g} s.")


@engines.command()
@NAME
@json_option
def remove(name: str, as_json: bool) -> None:
    """Take it out now; its calls go on elsewhere. A replica is replaced."""
    from perdure.engines.roster import remove_engine

    asyncio.run(remove_engine(_roster(load_settings()), name))
    if as_json:
        answer({"removed": name})
    else:
        click.echo(f"{name} is out.")


@engines.command()
@click.argument("replica", type=click.IntRange(0), default=0)
@click.option("-n", "--lines", type=click.IntRange(1), default=100, metavar="N", show_default=True)
@ADDRESS
def logs(replica: int, lines: int, ray_address: str) -> None:
    """The end of a replica's log; of its last boot where none runs."""
    settings = load_settings()
    said = asyncio.run(_tail(settings, replica, ray_address))
    click.echo(b"\n".join(said.splitlines()[-lines:]))


async def _tail(settings: Settings, replica: int, address: str) -> bytes:
    from perdure.errors import NotFound
    from perdure.serving import cluster
    from perdure.serving.status import PoolStatus

    cluster.connect(settings, address, start=False)
    from perdure.serving import manager

    actor = manager.find(_roster_key(settings))
    if actor is None:
        raise NotFound(f"no replicas: `{me()} engines up --model M` starts some")
    status = PoolStatus.model_validate_json(await actor.status.remote())
    if replica not in {one.index for one in status.replicas}:
        raise NotFound(f"no replica {replica}: `{me()} engines list` numbers them")
    said: bytes = await actor.tail.remote(replica)
    return said


def any_known(settings: Settings) -> bool:
    """Whether the home's pool has engines, whatever the settings name."""
    return bool(_added(settings))


def none_ready(settings: Settings) -> bool:
    """Of those; a gateway that starts may find one yet."""
    return not any(record.serves for record in _added(settings))


def _added(settings: Settings) -> list["EngineRecord"]:
    """Without those that the settings of some gateway named: no other gateway asks them."""
    roster = asyncio.run(_roster(settings).read())
    return [one for one in roster.engines if not one.removed and not one.from_settings]


def _roster_key(settings: Settings) -> str:
    from perdure.engines.roster import roster_key
    from perdure.home import load_secret

    return roster_key(load_secret(settings))


def _roster(settings: Settings) -> "StoredRoster":
    from perdure.engines.roster import StoredRoster
    from perdure.storage.base import open_store

    return StoredRoster(open_store(settings), _roster_key(settings))
