"""`perdure doctor`: checks what works on this machine and names a fix for what does not.

Each check is one function. If it raises PerdureError, its part is reported as missing.
"""

import asyncio
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import click

from perdure.cli.console import answer, json_option
from perdure.errors import PerdureError
from perdure.installation import command_for_extra
from perdure.settings import process_environment
from perdure.settings.settings_loader import load_settings, value
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle, stack_ports

LEAST_DISK_GB = 5.0
MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("MISSING", "red")}


@dataclass(frozen=True)
class Finding:
    """`level`: ok; note (optional, or works with limits); missing (something does not work)."""

    name: str
    level: str
    detail: str
    fix: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what works here, what is missing, and the fix. Exit code 1: something is missing."""
    settings = load_settings()
    findings = list(examine(settings))
    healthy = all(finding.level != "missing" for finding in findings)
    if as_json:
        answer({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            _print(finding)
    if not healthy:
        raise click.exceptions.Exit(1)


def examine(settings: Settings) -> Iterable[Finding]:
    """All checks, in the order in which a new user meets the parts."""
    checks: list[Callable[[Settings], Finding]] = [
        python, service, bubblewrap, podman, docker, apptainer, e2b, daytona, modal, kubernetes, limits, uv, git, disk, store, temporal, builds, port_numbers, gateway,
        tokenizer, engine, ray,
    ]  # fmt: skip
    for check in checks:
        try:
            yield check(settings)
        except PerdureError as error:
            yield Finding(check.__name__.replace("_", " "), "missing", str(error))


def python(settings: Settings) -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def service(settings: Settings) -> Finding:
    from perdure.installation import service_folder

    return Finding("service", "ok", f"workers run from {service_folder()}")


def bubblewrap(settings: Settings) -> Finding:
    from perdure.stack.home_providers import provider

    problems = provider(settings, "bubblewrap").check()
    if problems:
        fix = "run infra/setup/bubblewrap, or set PERDURE_SANDBOX__ALLOW_LOCAL=true and use `--sandbox local`, which does not isolate"
        return Finding("bubblewrap", "missing", problems[0], fix)
    return Finding("bubblewrap", "ok", f"{shutil.which('bwrap')}, user namespaces, overlay")


def podman(settings: Settings) -> Finding:
    return _containers(settings, "podman", "runs images, or the host's programs without an image")


def docker(settings: Settings) -> Finding:
    where = (
        process_environment.foreign("DOCKER_HOST")
        or process_environment.foreign("DOCKER_CONTEXT")
        or "this host"
    )
    return _containers(settings, "docker", f"Docker answers at {where}")


def apptainer(settings: Settings) -> Finding:
    return _containers(settings, "apptainer", "found; Perdure was tested only with a double of it")


def _containers(settings: Settings, name: str, works: str) -> Finding:
    from perdure.stack.home_providers import provider

    problems = provider(settings, name).check()
    if problems:
        return Finding(name, "note", f"--sandbox {name} cannot be used: {problems[0]}")
    return Finding(name, "ok", works)


def e2b(settings: Settings) -> Finding:
    from perdure.stack.home_providers import provider

    problems = provider(settings, "e2b").check()
    if problems:
        return Finding("e2b", "note", f"--sandbox e2b cannot be used: {problems[0]}")
    where = (
        process_environment.foreign("E2B_API_URL")
        or process_environment.foreign("E2B_DOMAIN")
        or "e2b.app"
    )
    return Finding("e2b", "ok", f"E2B_API_KEY is set, sandboxes at {where}")


def daytona(settings: Settings) -> Finding:
    from perdure.stack.home_providers import provider

    problems = provider(settings, "daytona").check()
    if problems:
        return Finding("daytona", "note", f"--sandbox daytona cannot be used: {problems[0]}")
    where = process_environment.foreign("DAYTONA_API_URL") or "https://app.daytona.io/api"
    return Finding("daytona", "ok", f"DAYTONA_API_KEY is set, sandboxes at {where}")


def modal(settings: Settings) -> Finding:
    return _containers(
        settings, "modal", "MODAL_TOKEN_ID is set; Perdure was tested only with a double of Modal"
    )


def kubernetes(settings: Settings) -> Finding:
    return _containers(
        settings,
        "kubernetes",
        "a cluster is configured; Perdure was tested only with a double of it",
    )


def limits(settings: Settings) -> Finding:
    from perdure.sandboxes.host import cgroups
    from perdure.types import Limits

    enforced = cgroups.plan(settings.home.absolute() / "doctor", Limits()).enforced
    if enforced:
        means = ", ".join(f"{what} by {how}" for what, how in sorted(enforced.items()))
        return Finding("limits", "ok", means)
    fix = "run as root, or delegate a cgroup: systemd-run --user --scope -p Delegate=yes perdure up"
    return Finding("limits", "note", "memory and pids are limited per process only (prlimit)", fix)


def uv(settings: Settings) -> Finding:
    from perdure.python_interpreters import find_uv

    return Finding("uv", "ok", str(find_uv()))


def git(settings: Settings) -> Finding:
    found = shutil.which("git")
    if found is None:
        return Finding("git", "missing", "git is not on PATH", "apt-get install git")
    return Finding("git", "ok", found)


def disk(settings: Settings) -> Finding:
    home = settings.home.absolute()
    probe = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(probe).free / 1e9
    level = "ok" if free > LEAST_DISK_GB else "note"
    fix = "" if level == "ok" else f"environments need a few GB: free disk space, or move {home}"
    return Finding("disk", level, f"{free:.0f} GB free at {probe}", fix)


def store(settings: Settings) -> Finding:
    from perdure.storage.store_preflight import check_store

    asyncio.run(check_store(settings))
    return Finding("store", "ok", f"{settings.store_url} is writable")


def temporal(settings: Settings) -> Finding:
    from perdure.cli.temporal_connection import connect
    from perdure.client.temporal_server import configured_address

    given = configured_address(settings)
    state = stack_lifecycle.running(settings)
    if given is None and state is None:
        from perdure.stack.stack_plan import temporal_binary

        return Finding("temporal", "ok", f"not running; `perdure up` starts {temporal_binary()}")
    connection = asyncio.run(connect(settings))
    where = given or (state.temporal_address if state else "")
    return Finding("temporal", "ok", f"{where} answers, {connection.ui_url or 'no UI known'}")


def builds(settings: Settings) -> Finding:
    from perdure.cli.temporal_connection import connect
    from perdure.client.deployment_routing import explain_build_routing
    from perdure.client.temporal_server import configured_address

    if configured_address(settings) is None and stack_lifecycle.running(settings) is None:
        return Finding("builds", "ok", "unknown while Temporal is not running")

    async def ask() -> str:
        return await explain_build_routing((await connect(settings)).perdure.client)

    if wrong := asyncio.run(ask()):
        what, _, fix = wrong.partition(": ")
        return Finding("builds", "missing", what, fix)
    return Finding("builds", "ok", "running workers take new work, or no worker runs yet")


def port_numbers(settings: Settings) -> Finding:
    if stack_lifecycle.running(settings) is not None:
        return Finding("ports", "ok", "in use by this stack")
    names = ("temporal.port", "temporal.ui_port", "gateway.port")
    wanted = {name: value(settings, name) for name in names}
    taken = [f"{name} {port}" for name, port in wanted.items() if not stack_ports.is_free(port)]
    if taken:
        return Finding("ports", "note", f"taken: {', '.join(taken)}; `perdure up` uses free ports")
    return Finding("ports", "ok", ", ".join(f"{name} {port}" for name, port in wanted.items()))


def gateway(settings: Settings) -> Finding:
    from perdure.stack.part_readiness import answers

    state = stack_lifecycle.running(settings)
    if state is None:
        return Finding("gateway", "ok", "not running; `perdure up` starts it")
    if asyncio.run(answers(f"{state.gateway_url}/healthz")):
        return Finding("gateway", "ok", f"{state.gateway_url} answers")
    log = settings.home.absolute() / "logs" / "gateway.log"
    return Finding("gateway", "missing", f"{state.gateway_url} does not answer", f"see {log}")


def tokenizer(settings: Settings) -> Finding:
    from perdure.gateway.rendering.tokenizer_setting import folder_of

    folder = folder_of(settings.engine.tokenizer)
    return Finding("tokenizer", "ok", settings.engine.tokenizer if folder is None else f"{folder}")


def engine(settings: Settings) -> Finding:
    from perdure.engines.reported_model import named_engine
    from perdure.stack.engine_presence import check_engine, check_key, check_same_engine

    state = stack_lifecycle.running(settings)
    name = state.engine if state is not None else named_engine(settings).url
    if not name:
        fix = "set OPENAI_BASE_URL, ANTHROPIC_BASE_URL or PERDURE_ENGINE__URL before `perdure up`"
        return Finding("engine", "note", "none; only oracle and nop run without one", fix)
    if state is not None:
        check_same_engine(settings, state)
    check_engine(name, "an agent")
    check_key(settings, name)
    return Finding("engine", "ok", f"{name} answers")


def ray(settings: Settings) -> Finding:
    from importlib.util import find_spec

    if find_spec("ray") is None:
        fix = command_for_extra("serving")
        needs = "not installed; only `perdure engines up` and `perdure workers` need it"
        return Finding("ray", "note", needs, fix)
    return Finding("ray", "ok", "`perdure engines up` and `perdure workers` can use it")


def _print(finding: Finding) -> None:
    mark, colour = MARKS[finding.level]
    click.echo(f"{click.style(f'{mark:<8}', fg=colour)}{finding.name:<12}{finding.detail}")
    if finding.fix:
        click.echo(f"{'':<20}fix: {finding.fix}")
