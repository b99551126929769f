"""`perdure workers up | list | down`: runs one supervised worker on every node of a Ray cluster, or per
node of a Slurm partition."""

import json
import time
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from perdure.cli.commands import slurm_workers
from perdure.cli.commands.engines.engine_options import ADDRESS
from perdure.cli.console import answer, json_option, say
from perdure.installation import PACKAGE, service_folder
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from perdure.stack.node_worker import WorkersReport

READY_S = 600.0
SERVICE = ("workflows", "activities", "workers")
"""Ray's runtime environment copies these folders and this package to the nodes. The Python there must
already have the dependencies."""
CARRIED = ("TEMPORAL_", "AWS_", "OTEL_")
"""Prefixes of the variables that workers need in addition to the settings."""
RAY_HOME = "/tmp/perdure-{node}"
ON_RAY = ("spare_cpus", "resource", "labels", "most_rollouts", "ray_address")
ON_SLURM = ("partition", "least", "most", "time_limit", "notice_s", "sbatch_args", "dry_run")
"""Options of `up` that apply only to Ray, or only to Slurm."""
ON_SLURM_FLAG = click.option(
    "--slurm", "on_slurm", is_flag=True, help="Use the workers on Slurm, not Ray."
)


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
    """Run workers on Ray or Slurm. Elsewhere: `python -m workers` under systemd or Kubernetes."""


@workers.command()
@click.option("--ray", "on_ray", is_flag=True, help="Run them on the nodes of Ray.")
@click.option("--slurm", "on_slurm", is_flag=True, help="Run them as a Slurm job array.")
@click.option(
    "--home",
    metavar="PATH",
    help="Perdure's home on each node, on the node's own disk. {node} is the node's name, {id} "
    f"(Ray) the end of its id, {{user}} (Slurm) your user.  [default: {RAY_HOME}; Slurm: "
    f"{slurm_workers.HOME}]",
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
    help="Ray: CPUs to keep for engines on each node. Running engines keep theirs, even if they use "
    "more.",
)
@click.option(
    "--resource", default="", metavar="NAME", help="Ray: only nodes with this custom resource."
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=SELECTOR",
    callback=_selectors,
    help="Ray: only nodes whose label matches: VALUE, !VALUE, in(A,B) or !in(A,B), in Ray's syntax.",
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
    help="Give a node back after S seconds without a rollout.",
)
@click.option("--partition", default="", metavar="NAME", help="Slurm: the nodes' partition.")
@click.option(
    "--min",
    "least",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    show_default=True,
    help="Slurm: the fewest nodes.",
)
@click.option(
    "--max",
    "most",
    type=click.IntRange(1),
    metavar="N",
    help="Slurm: add nodes for waiting rollouts, up to N.  [default: --min]",
)
@click.option(
    "--time", "time_limit", default="", metavar="LIMIT", help="Slurm: the time limit of a task."
)
@click.option(
    "--notice-s",
    type=click.IntRange(1),
    default=120,
    metavar="S",
    show_default=True,
    help="Slurm: move a node's rollouts S seconds before the time limit.",
)
@click.option(
    "--sbatch-args", default="", metavar="WORDS", help="Slurm: more options, such as --account=A."
)
@click.option("--dry-run", is_flag=True, help="Slurm: print the batch script, submit nothing.")
@ADDRESS
@json_option
@click.pass_context
def up(
    context: click.Context,
    /,
    on_ray: bool,
    on_slurm: bool,
    ray_address: str,
    as_json: bool,
    **o: Any,
) -> None:
    """Keep one worker running on every node. Run it again to change the settings."""
    if on_ray == on_slurm:
        raise click.UsageError("give either --ray or --slurm")
    others, flag = (ON_RAY, "--ray") if on_slurm else (ON_SLURM, "--slurm")
    _refuse(context, others, flag)
    taken = {name: value for name, value in o.items() if name not in others}
    report = _up_on_slurm(**taken) if on_slurm else _up_on_ray(ray_address, **taken)
    if report is None:
        return
    _print(report, as_json)
    if not report.nodes:
        raise click.exceptions.Exit(1)


def _refuse(context: click.Context, names: tuple[str, ...], flag: str) -> None:
    """Refuse options that only `flag` takes. Raises: click.UsageError, which names the option."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name in names:
            raise click.UsageError(f"{parameter.opts[0]} needs {flag}")


def _up_on_ray(address: str, home: str | None, **fields: Any) -> "WorkersReport":
    key = _connect(load_settings(), address, with_code=True)
    from perdure.stack.ray_workers import ray_worker_manager
    from perdure.stack.ray_workers.node_plan import WorkersPlan

    plan = WorkersPlan(environment=_environment(load_settings()), home=home or RAY_HOME, **fields)
    return _ready(ray_worker_manager.start(key, plan))


def _up_on_slurm(
    home: str | None, least: int, most: int | None, **fields: Any
) -> "WorkersReport | None":
    if most is not None and most < least:
        raise click.UsageError(f"--max {most} is less than --min {least}")
    settings = load_settings()
    return slurm_workers.up(
        settings,
        _environment(settings),
        READY_S,
        home=home or slurm_workers.HOME,
        least=least,
        most=most or least,
        **fields,
    )


@workers.command(name="list")
@ON_SLURM_FLAG
@ADDRESS
@json_option
def list_(on_slurm: bool, ray_address: str, as_json: bool) -> None:
    """List each node's worker and seats, and why a worker is missing."""
    if on_slurm:
        report = slurm_workers.report(load_settings())
        if report is None:
            say("no workers on Slurm: start them with `perdure workers up --slurm`")
            raise click.exceptions.Exit(1)
        _print(report, as_json)
        return
    key = _connect(load_settings(), ray_address)
    from perdure.stack.ray_workers import ray_worker_manager

    actor = ray_worker_manager.find(key)
    if actor is None:
        say("no workers on Ray: start them with `perdure workers up --ray`")
        raise click.exceptions.Exit(1)
    _print(_report(actor), as_json)


@workers.command()
@ON_SLURM_FLAG
@ADDRESS
def down(on_slurm: bool, ray_address: str) -> None:
    """Stop all workers and their agents. Open rollouts wait for other workers."""
    if on_slurm:
        say("stopped" if slurm_workers.down(load_settings()) else "nothing is running")
        return
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

    from perdure.stack.node_worker import WorkersReport

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
