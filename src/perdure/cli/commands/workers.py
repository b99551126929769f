"""`perdure workers up | list | down`: runs one supervised worker on every node of a Ray cluster."""

import json
import time
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.commands.engines.engine_options import ADDRESS
from perdure.cli.console import answer, json_option, say
from perdure.installation import PACKAGE, service_folder
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from perdure.stack.ray_workers.ray_worker_manager import WorkersReport

READY_S = 600.0
SERVICE = ("workflows", "activities", "workers")
"""Ray's runtime environment copies these folders and this package to the nodes. The Python there must
already have the dependencies."""
CARRIED = ("TEMPORAL_", "AWS_", "OTEL_")
"""Prefixes of the variables that workers need in addition to the settings."""


def _selectors(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    from perdure.stack.ray_workers.node_plan import SELECTOR

    found = dict(one.partition("=")[::2] for one in given)
    for key, selector in found.items():
        if not key or not SELECTOR.fullmatch(selector):
            raise click.BadParameter(
                f"{key}={selector}: write KEY=VALUE, KEY=!VALUE, KEY=in(A,B) or KEY=!in(A,B)"
            )
    return found


@click.group()
def workers() -> None:
    """Run workers on a Ray cluster. Without Ray: `python -m workers` under systemd or Kubernetes."""


@workers.command()
@click.option("--ray", "on_ray", is_flag=True, required=True, help="Run them on the nodes of Ray.")
@click.option(
    "--home",
    default="/tmp/perdure-{node}",
    metavar="PATH",
    show_default=True,
    help="The home on each node; {node} is its name, {id} the end of its id.",
)
@click.option(
    "--cpus-per-rollout",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    metavar="C",
    show_default=True,
    help="CPUs per seat.",
)
@click.option(
    "--spare-cpus",
    type=click.FloatRange(0),
    default=0.0,
    metavar="C",
    show_default=True,
    help="CPUs to keep for engines on each node. Running engines keep theirs, even if they use more.",
)
@click.option("--resource", default="", metavar="NAME", help="Only nodes with this resource.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=SELECTOR",
    callback=_selectors,
    help="Only nodes whose label matches: VALUE, !VALUE, in(A,B) or !in(A,B), in Ray's syntax.",
)
@click.option(
    "--most-rollouts",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Ask Ray's autoscaler for nodes for waiting rollouts, at most N.",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(0),
    default=300.0,
    metavar="S",
    show_default=True,
    help="Give a node back to the autoscaler after S seconds without a rollout.",
)
@ADDRESS
@json_option
def up(on_ray: bool, ray_address: str, as_json: bool, **o: Any) -> None:
    """Keep one worker running on every node. Run it again to change the settings."""
    key = _connect(load_settings(), ray_address, with_code=True)
    from perdure.stack.ray_workers import ray_worker_manager
    from perdure.stack.ray_workers.node_plan import WorkersPlan

    plan = WorkersPlan(environment=_environment(load_settings()), **o)
    actor = ray_worker_manager.start(key, plan)
    report = _ready(actor)
    _print(report, as_json)
    if not report.nodes:
        raise click.exceptions.Exit(1)


@workers.command(name="list")
@ADDRESS
@json_option
def list_(ray_address: str, as_json: bool) -> None:
    """List each node's worker and seats, and why a worker is missing."""
    key = _connect(load_settings(), ray_address)
    from perdure.stack.ray_workers import ray_worker_manager

    actor = ray_worker_manager.find(key)
    if actor is None:
        say("no workers on Ray: start them with `perdure workers up --ray`")
        raise click.exceptions.Exit(1)
    _print(_report(actor), as_json)


@workers.command()
@ADDRESS
def down(ray_address: str) -> None:
    """Stop all workers and their agents. Open rollouts wait for other workers."""
    key = _connect(load_settings(), ray_address)
    from perdure.stack.ray_workers import ray_worker_manager

    say("stopped" if ray_worker_manager.stop(key, leave=True) else "nothing is running")


def _ready(actor: Any) -> "WorkersReport":
    """Wait for a worker on every node that has room for one; print what is missing."""
    end = time.monotonic() + READY_S
    told: tuple[str, ...] = ()
    while True:
        report = _report(actor)
        if not report.absent and (report.nodes or report.full):
            return report
        if time.monotonic() > end:
            return report
        if (waits := report.absent or ("no Ray node fits yet",)) != told:
            for line in waits:
                say(f"waiting: {line}")
            told = waits
        time.sleep(0.5)


def _connect(settings: Settings, address: str, *, with_code: bool = False) -> str:
    """Connect to the cluster; return the name of this home's workers there."""
    from pathlib import PurePath

    from perdure.serving import ray_cluster
    from perdure.stack.engine_presence import home_roster_key

    code = None
    if with_code:
        folders = (PACKAGE, *(service_folder() / name for name in SERVICE))
        code = {"py_modules": [str(folder) for folder in folders], "excludes": ["__pycache__"]}
    ray_cluster.connect(settings, address, start=False, runtime_env=code)
    return PurePath(home_roster_key(settings)).stem


def _environment(settings: Settings) -> dict[str, str]:
    """Each worker's environment: these settings, and the variables of Temporal and the store."""
    from perdure.home_folder import load_secrets
    from perdure.settings import process_environment
    from perdure.settings.settings_loader import as_variables

    found = {n: v for n, v in process_environment.variables().items() if n.startswith(CARRIED)}
    found |= as_variables(settings)
    found["PERDURE_SECRET"] = load_secrets(settings).newest.decode()
    found["PERDURE_STORE"] = settings.store_url
    return found


def _report(actor: Any) -> "WorkersReport":
    import ray

    from perdure.stack.ray_workers.ray_worker_manager import WorkersReport

    return WorkersReport.model_validate_json(ray.get(actor.report.remote()))


def _print(report: "WorkersReport", as_json: bool) -> None:
    if as_json:
        answer(json.loads(report.model_dump_json()))
        return
    for one in report.nodes:
        again = f", started {one.starts} times" if one.starts > 1 else ""
        click.echo(f"{one.node:<24}{one.taken} of {one.seats} seats taken{again}  {one.log}")
    for line in (*report.absent, *report.full):
        click.echo(line)
    if report.waiting:
        say(f"{report.waiting} boots and gradings wait for workers")
