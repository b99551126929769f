"""Harbor task folders: instruction.md, task.toml, environment/, tests/test.sh and optionally
solution/.

The image is the task's `docker_image`, or is built from its Dockerfile. Its tree becomes a
repository of one commit, so that the agent's change is a diff. Tests of a `separate` verifier see
the artifacts in their own environment. Others run in the agent's sandbox or, if agent and tests may
reach different hosts, in a fresh one with its diff and artifacts. A task that needs unsupported
features is refused, with all of them in one message. `network_mode = "public"`,
Harbor's default, permits a network; Perdure gives none. With "allowlist", agent and tests reach the
listed hosts, if the worker's settings permit them.
"""

import posixpath
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from perdure.instances.rows import compose_file
from perdure.instances.rows.compose_file import ComposeFile, read_compose_file
from perdure.instances.rows.formats.swebench import is_artifact_path
from perdure.instances.rows.row_fields import Row
from perdure.sandboxes.image_builds import DOCKERFILE
from perdure.types import (
    Build,
    Collect,
    Environment,
    Grading,
    Healthcheck,
    Instance,
    LimitChanges,
    McpServer,
    McpServers,
    Phase,
    Phases,
    Source,
    SourceKind,
    Verifier,
    slugify,
)
from perdure.types.allowed_hosts import allowed_hosts
from perdure.types.containers import LOOPBACK, MAIN, host_names
from perdure.types.resource_limits import GPU
from perdure.types.validation_errors import faults

FOLDER = ".perdure-tests"
"""The folder of the tests in `grading.files`; the grader `reward_file` moves them to /tests."""
CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""Harbor does not show such lines to the agent, if the instruction begins with them."""
ONE_COMMIT = (
    "[ -d .git ] || { git init -q . && git add -A -f && git -c user.name=perdure "
    "-c user.email=perdure@localhost commit -q --allow-empty -m base; }"
)
BUILD_TIMEOUT_S = 600.0
TESTS_WORKDIR = "/tmp"
"""The workdir of a separate verifier's sandbox, in which no diff is applied."""
ARTIFACTS_FOLDER = "/logs/artifacts"
"""What an agent writes here is an artifact."""
PERMITS_NETWORK = "permits_network"
"""In an instance's metadata: the task's author allowed a network."""
UNITS = {"M": 1, "G": 1 << 10, "T": 1 << 20}
ENVIRONMENT_KEYS = (
    "build_timeout_sec docker_image workdir os env cpus memory_mb memory "
    "storage_mb storage allow_internet network_mode allowed_hosts gpus gpu_types"
)
AGENT_KEYS = "mcp_servers healthcheck skills_dir"
"""Keys of `environment` that a separate verifier's does not have."""
SERVERS = TypeAdapter(McpServers)
COMPOSED = {"environment": "environment", "tests": "verifier.environment"}
"""Folder that may have a compose file -> the table of its environment."""
SUPPORTED_KEYS: Mapping[str, str] = {
    "": (
        "version schema_version task metadata source multi_step_reward_strategy artifacts "
        "verifier agent environment solution"
    ),
    "verifier": "timeout_sec env environment_mode environment network_mode allowed_hosts user collect",
    "agent": "timeout_sec network_mode allowed_hosts user",
    "environment": f"{ENVIRONMENT_KEYS} {AGENT_KEYS}",
    "verifier.environment": ENVIRONMENT_KEYS,
    "solution": "env",
}
"""Supported keys, by table. `task` and `metadata` describe the task and may hold anything."""
REASONS: Mapping[str, str] = {
    "steps": "a rollout has one instruction and one verdict",
    "environment.tpu": "no sandbox has one",
    "verifier.environment.tpu": "no sandbox has one",
    "verifier.environment.healthcheck": "Harbor ignores it too: remove it",
    "verifier.environment.skills_dir": "Harbor ignores it too: remove it",
    "verifier.environment.mcp_servers": "Harbor ignores it too: remove it",
}
"""Why Perdure refuses keys that Harbor knows."""
ALLOWLIST = "allowlist"
NETWORK_MODES = ("public", "no-network", ALLOWLIST)
SUPPORTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "verifier.environment_mode": ("shared", "separate"),
    "verifier.network_mode": NETWORK_MODES,
    "verifier.user": ("root", 0),
    "agent.network_mode": NETWORK_MODES,
    "agent.user": ("root", 0),
    "environment.network_mode": NETWORK_MODES,
    "environment.os": ("linux",),
    "verifier.environment.network_mode": NETWORK_MODES,
    "verifier.environment.os": ("linux",),
}
"""Supported values of keys that allow others in Harbor."""


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, file or key, and fix."""
    folder = row.beside(row.text("task_folder", "name the folder of a Harbor task"))
    task = _task(row, folder)
    tables = {name: _table(row, task, name) for name in SUPPORTED_KEYS if name}
    composed = {name: _composed(folder / name, tables[table]) for name, table in COMPOSED.items()}
    problems = [problem for one in composed.values() for problem in one.problems]
    problems += _service_problems(task, tables, [*composed["environment"].sidecars])
    if problems := [*_unsupported(folder, task, tables), *problems]:
        raise row.refused("Perdure cannot run this Harbor task: " + "; ".join(problems))
    place, table = folder / "environment", tables["environment"]
    has_files = _has_files(place, table)
    own = _environment(place, table, composed["environment"], has_files=has_files)
    return Instance(
        instance_id=slugify(folder.name),
        dataset=dataset,
        data_source="harbor",
        problem_statement=_instruction(_text(row, folder, "instruction.md")),
        prompt_template="{problem_statement}",  # as in Harbor, agents get the instruction as it is
        source=Source(kind=SourceKind.IMAGE),
        environment=own,
        grading=_grading(folder, tables, own, composed["tests"]),
        gold_patch=_gold(folder),
        gold_script=_files_with_env(folder / "solution", "solve.sh", tables["solution"]),
        artifacts=_artifact_excludes(task),
        sidecar_artifacts=_sidecar_artifacts(task),
        agent_timeout_s=tables["agent"].get("timeout_sec"),
        mcp_servers=_mcp_servers(tables["environment"], composed["environment"])[0],
        skills_dir=tables["environment"].get("skills_dir", ""),
        phases=_phases(tables),
        metadata={PERMITS_NETWORK: True} if "public" in _networks(tables) else {},
    )


def _task(row: Row, folder: Path) -> dict[str, Any]:
    """Without empty values, which `harbor task init` writes for what a task does not use."""
    try:
        task = tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise row.wrong("task_folder", f"its task.toml: {error}") from error
    return {key: kept for key, value in task.items() if not _is_empty(kept := _cleaned(value))}


def _cleaned(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: kept for key, one in value.items() if not _is_empty(kept := _cleaned(one))}


def _is_empty(value: Any) -> bool:
    return value in ("", [], {})


def _unsupported(
    folder: Path, task: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Everything in the task that Perdure would have to ignore, with its name."""
    values = {
        f"{name}.{key}": value
        for name, table in tables.items()
        for key, value in table.items()
        if f"{name}.{key}" not in tables
    }
    known = {
        f"{name}.{key}".lstrip(".") for name, keys in SUPPORTED_KEYS.items() for key in keys.split()
    }
    names = [*(key for key in task if key not in tables), *values]
    problems = [
        f"it does not support `{name}`" + (f": {REASONS[name]}" if name in REASONS else "")
        for name in names
        if name not in known
    ]
    problems += [
        f"it does not support `{name} = {value!r}`, only {' and '.join(map(repr, allowed))}"
        for name, allowed in SUPPORTED_VALUES.items()
        if (value := values.get(name)) is not None and _lower(value) not in allowed
    ]
    problems += [
        f"`{name}.env.{key}` takes a value from the host, but sandboxes get none"
        for name, table in tables.items()
        for key, value in _env(table).items()
        if "${" in value
    ]
    problems += _mcp_servers(tables["environment"], ComposeFile())[1]
    problems += [problem for name, table in tables.items() if (problem := _bad_hosts(name, table))]
    problems += _healthcheck(tables["environment"])[1]
    problems += _collect(tables["verifier"])[1]
    problems += [problem for name, one in tables.items() if (problem := _gpu(name, one)[1])]
    problems += _in_place_problems(folder, tables)
    if not _has_tests(folder, tables) and not (folder / "tests" / "test.sh").is_file():
        problems.append("it has no tests/test.sh, which writes the reward")
    if (folder / "trajectory.json").exists():
        problems.append("its trajectory.json continues another agent's work")
    if [*folder.glob("tests/**/.harborignore"), *folder.glob("solution/**/.harborignore")]:
        problems.append(
            "its .harborignore leaves out files of tests or solution: remove them instead"
        )
    return [*problems, *_image_problems(folder, task, tables)]


def _composed(folder: Path, table: Mapping[str, Any]) -> ComposeFile:
    """The services of the folder's compose file; none if it has no such file."""
    path = folder / compose_file.NAME
    if not path.is_file():
        return ComposeFile()
    return read_compose_file(path, _env(table), _build_timeout(table))


def _in_place_problems(folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs between agent and tests, if both use the same containers."""
    if _is_separate(tables) or not (folder / "environment" / compose_file.NAME).is_file():
        return []
    if _same_network(tables):
        return []
    return [
        "its agent and its tests reach different hosts, but share one sandbox with its services"
    ]


def _same_network(tables: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether agent and tests reach the same hosts."""
    own = tables["environment"]
    return _listed(tables["verifier"], own) == _listed(tables["agent"], own)


def _build_timeout(table: Mapping[str, Any]) -> float:
    return float(table.get("build_timeout_sec", BUILD_TIMEOUT_S))


def _bad_hosts(name: str, table: Mapping[str, Any]) -> str:
    """What is wrong with the table's list of hosts; empty if nothing is."""
    hosts = table.get("allowed_hosts")
    if hosts is None:
        return ""
    if _lower(table.get("network_mode")) != ALLOWLIST:
        return f'`{name}.allowed_hosts` needs `network_mode = "{ALLOWLIST}"`'
    try:
        allowed_hosts(map(str, hosts))
    except (TypeError, ValueError) as error:
        return f"`{name}.allowed_hosts`: {error}"
    return ""


def _image_problems(
    folder: Path, task: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    place, problems = folder / "environment", []
    if not (place / DOCKERFILE).is_file() and not tables["environment"].get("docker_image"):
        return ["it has no environment/Dockerfile and no `environment.docker_image`"]
    for name, table in COMPOSED.items():
        user = "" if tables[table].get("docker_image") else _last(folder / name, "USER")
        if user.split(":")[0] not in ("", "root", "0"):
            problems.append(
                f"the USER of {name}/Dockerfile is {user!r}, but sandboxes run images as root: "
                "remove it, and leave the files to root"
            )
    problems += [
        f"`artifacts`: {one.path!r} is not an absolute path below /"
        for one in _artifacts(task)
        if not is_artifact_path(one.path)
    ]
    return problems


def _service_problems(
    task: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], services: Sequence[str]
) -> list[str]:
    """Artifacts and commands of services that the compose file lacks. `services`: those it has."""
    artifacts = {one.service: f"`artifacts`: {one.path}" for one in _artifacts(task)}
    commands = dict.fromkeys(
        (one.service for one in _collect(tables["verifier"])[0]), "`verifier.collect`: a command"
    )
    return [
        f"{what} is in the service {name!r}, which environment/{compose_file.NAME} does not have"
        for name, what in [*artifacts.items(), *commands.items()]
        if name not in (MAIN, *services)
    ]


class _Artifact(NamedTuple):
    path: str
    service: str
    exclude: tuple[str, ...]
    place: str
    """Where Harbor keeps it."""


def _artifacts(task: Mapping[str, Any]) -> list[_Artifact]:
    tables = [
        one if isinstance(one, dict) else {"source": one} for one in task.get("artifacts", [])
    ]
    found = []
    for table in tables:
        path, service = str(table.get("source", "")), str(table.get("service", MAIN))
        place = str(table.get("destination") or path).strip("/")
        found.append(_Artifact(path, service, tuple(table.get("exclude", ())), place))
    return found


def _artifact_excludes(task: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Path of an artifact -> patterns to leave out. As in Harbor, ARTIFACTS_FOLDER is always one."""
    declared = {one.path: one.exclude for one in _artifacts(task) if one.service == MAIN}
    return {ARTIFACTS_FOLDER: (), **declared}


def _sidecar_artifacts(task: Mapping[str, Any]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Service -> path -> patterns. As in Harbor, artifacts of the agent's container come first, and one
    whose place overlaps an earlier one's is left out."""
    every = _artifacts(task)
    taken = [ARTIFACTS_FOLDER.strip("/"), *(one.place for one in every if one.service == MAIN)]
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for one in every:
        if one.service == MAIN or any(_overlap(one.place, other) for other in taken):
            continue
        taken.append(one.place)
        found.setdefault(one.service, {})[one.path] = one.exclude
    return found


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _is_separate(tables: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the verifier is separate. As in Harbor, a table `verifier.environment` implies it."""
    mode = tables["verifier"].get("environment_mode")
    return _lower(mode) == "separate" or (mode is None and "environment" in tables["verifier"])


def _environment(
    folder: Path,
    table: Mapping[str, Any],
    composed: ComposeFile,
    *,
    has_files: bool = False,
) -> Environment:
    """`folder`: the build context. As in Harbor, `docker_image` takes precedence over it.
    `has_files`: the folder's files are copied into the workdir of `docker_image`."""
    image, workdir = table.get("docker_image"), table.get("workdir", "")
    dockerfile = ""
    if has_files:
        dockerfile = f"FROM {image}\n{f'WORKDIR {workdir}' if workdir else ''}\nCOPY . .\n"
        image = None
    build = Build(
        path=str(folder.absolute()), timeout_s=_build_timeout(table), dockerfile=dockerfile
    )
    return Environment(
        image=image,
        build=None if image else build,
        workdir=workdir or ("" if image else _workdir(folder)),
        env={**composed.env, **_env(table)},
        sidecars=composed.sidecars,
        folders=composed.folders,
        healthcheck=_healthcheck(table)[0],
    )


def _has_files(folder: Path, table: Mapping[str, Any]) -> bool:
    """Whether Harbor copies the folder into the workdir of `docker_image`."""
    if not table.get("docker_image") or not folder.is_dir() or not any(folder.iterdir()):
        return False
    return not any((folder / name).exists() for name in (DOCKERFILE, compose_file.NAME))


def _healthcheck(table: Mapping[str, Any]) -> tuple[Healthcheck | None, list[str]]:
    """The check of the agent's container, and what is wrong with it."""
    given = dict(table.get("healthcheck", {}))
    if not given:
        return None, []
    command = ("bash", "-c", str(given.pop("command", "")))
    defaults = {"interval_sec": 5.0, "timeout_sec": 30.0}
    times = {key.removesuffix("ec"): value for key, value in {**defaults, **given}.items()}
    try:
        return Healthcheck.model_validate({"command": command, **times}), []
    except ValidationError as error:
        return None, [f"`environment.healthcheck`: {faults(error)}"]


def _collect(table: Mapping[str, Any]) -> tuple[tuple[Collect, ...], list[str]]:
    """The commands that run before the artifacts are taken, and what is wrong with others."""
    found, problems = [], []
    for entry in table.get("collect", []):
        given = dict(entry)
        user = given.pop("user", None)
        if given.get("service", MAIN) != MAIN:
            given["user"] = None if user is None else str(user)
        elif user not in (None, "root", 0):
            problems.append(
                f"`verifier.collect`: it does not support `user = {user!r}`, only 'root'"
            )
        if "timeout_sec" in given:
            given["timeout_s"] = given.pop("timeout_sec")
        try:
            found.append(Collect.model_validate(given))
        except ValidationError as error:
            problems.append(f"`verifier.collect`: {faults(error)}")
    return tuple(found), problems


def _gpu(name: str, table: Mapping[str, Any]) -> tuple[str | None, str]:
    """The limit `gpu`, and what is wrong with it. As in Harbor, any type will do if none is named."""
    count, types = table.get("gpus") or 0, table.get("gpu_types") or ["any"]
    gpu = f"{types[0]}:{count}"
    if not count or re.fullmatch(GPU, gpu):
        return (gpu if count else None), ""
    return None, f"`{name}.gpus`: {gpu!r} is not a type and a number from 1 to 99"


def _mcp_servers(
    table: Mapping[str, Any], composed: ComposeFile
) -> tuple[dict[str, McpServer], list[str]]:
    """The servers by name, and what is wrong with others. As in Harbor, the default is `sse`."""
    own = {name.lower() for name in (*LOOPBACK, *host_names(composed.sidecars))}
    servers, problems = {}, []
    for entry in table.get("mcp_servers", []):
        given = {"transport": "sse", **entry}
        name, kind = given.pop("name", ""), given.pop("transport")
        try:
            host = urlsplit(str(given.get("url", ""))).hostname  # in lower case
            inside = {"in_sandbox": True} if host in own else {}
            servers.update(SERVERS.validate_python({name: {**given, "type": kind, **inside}}))
        except ValidationError as error:
            problems.append(f"`environment.mcp_servers`: {faults(error)}")
        except ValueError as error:  # of `urlsplit`
            problems.append(f"`environment.mcp_servers`: {error}")
    return servers, problems


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _env(table: Mapping[str, Any]) -> dict[str, str]:
    env = table.get("env", {})
    return {str(key): str(value) for key, value in env.items()} if isinstance(env, dict) else {}


def _table(row: Row, task: Mapping[str, Any], name: str) -> dict[str, Any]:
    table: Any = task
    for part in name.split("."):
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise row.wrong("task_folder", f"`{name}` of its task.toml is not a table")
    return dict(table)


def _text(row: Row, folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise row.wrong("task_folder", f"its {name}: {error}") from error


def _workdir(folder: Path) -> str:
    """The WORKDIR of the Dockerfile's last stage; empty if that depends on its base image."""
    path = posixpath.join("", *_values(folder, "WORKDIR"))
    return path if path.startswith("/") and "$" not in path else ""


def _last(folder: Path, instruction: str) -> str:
    return next(reversed(_values(folder, instruction)), "")


def _values(folder: Path, instruction: str) -> list[str]:
    """The values of this instruction in the Dockerfile's last stage."""
    dockerfile = folder / DOCKERFILE
    text = dockerfile.read_text(errors="replace") if dockerfile.is_file() else ""
    flags = re.MULTILINE | re.IGNORECASE
    last = re.split(r"^\s*FROM\s", text, flags=flags)[-1]
    found = re.findall(rf"^\s*{instruction}\s+(.+?)\s*$", last, flags)
    return [value.strip("\"'") for value in found]


def _instruction(text: str) -> str:
    lines = text.split("\n")
    first = next(
        (at for at, line in enumerate(lines) if not CANARY.fullmatch(line.strip())), len(lines)
    )
    return "\n".join(lines[first:]).lstrip("\n") if first else text


def _grading(
    folder: Path,
    tables: Mapping[str, Mapping[str, Any]],
    own: Environment,
    composed: ComposeFile,
) -> Grading:
    """`composed`: the services of a separate verifier."""
    table = tables["verifier"]
    verifier = _verifier(folder, tables, own, composed)
    has_tests = verifier is not None and verifier.has_tests
    tests = {} if has_tests else _files_with_env(folder / "tests", "test.sh", table)
    return Grading(
        protocol="reward_file",
        files={f"{FOLDER}/{name}": data for name, data in tests.items()},
        pre_commands=(ONE_COMMIT, f"mkdir -p {ARTIFACTS_FOLDER}"),
        timeout_s=float(table.get("timeout_sec", 600.0)),
        verifier=verifier,
        collect=_collect(table)[0],
        in_place=verifier is None and _same_network(tables),
    )


def _verifier(
    folder: Path,
    tables: Mapping[str, Mapping[str, Any]],
    own: Environment,
    composed: ComposeFile,
) -> Verifier | None:
    if not _is_separate(tables):
        return None
    table, has_tests = tables["verifier.environment"], _has_tests(folder, tables)
    found = _environment(folder / "tests", table, composed) if has_tests else own
    env = {**(_env(table) if table else found.env), **_env(tables["verifier"])}
    return Verifier(
        environment=found.model_copy(update={"env": env, "workdir": TESTS_WORKDIR}),
        cwd=table.get("workdir") or found.workdir,
        has_tests=has_tests,
    )


def _has_tests(folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the image of a separate verifier contains the tests."""
    image = tables["verifier.environment"].get("docker_image")
    return _is_separate(tables) and bool(image or (folder / "tests" / DOCKERFILE).is_file())


def _files_with_env(folder: Path, script: str, table: Mapping[str, Any]) -> dict[str, bytes]:
    """The folder's files. If the table has variables, a wrapper script sets them and then
    runs the folder's own script with the interpreter in its first line, as in Harbor."""
    files, own = _files(folder), f"own-{script}"
    lines = [f"export {key}={shlex.quote(value)}\n" for key, value in _env(table).items()]
    if lines and script in files:
        files[own] = files[script]
        run = f'chmod +x "${{0%/*}}/{own}" && exec "${{0%/*}}/{own}"\n'
        files[script] = "".join(["#!/bin/bash\n", *lines, run]).encode()
    return files


def _files(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _gold(folder: Path) -> bytes:
    patch = folder / "solution" / "solution.patch"
    return patch.read_bytes() if patch.is_file() else b""


def _phases(tables: Mapping[str, Mapping[str, Any]]) -> Phases:
    own = tables["environment"]
    tests = tables["verifier.environment"] or own
    return Phases(
        agent=Phase(limits=_limits(own), network=_listed(tables["agent"], own)),
        grade=Phase(limits=_limits(tests), network=_listed(tables["verifier"], tests)),
    )


def _listed(phase: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The hosts of the phase's own policy or else of its environment's; None: no list."""
    table = phase if "network_mode" in phase else baseline
    hosts = table.get("allowed_hosts") if _lower(table.get("network_mode")) == ALLOWLIST else None
    return tuple(map(str, hosts)) if hosts else None


def _limits(environment: Mapping[str, Any]) -> LimitChanges:
    return LimitChanges(
        cpus=environment.get("cpus"),
        memory_mb=_megabytes(environment, "memory"),
        disk_mb=_megabytes(environment, "storage"),
        gpu=_gpu("", environment)[0],
    )


def _networks(tables: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """The networks of the agent and of the tests."""
    own = tables["environment"]
    legacy = "public" if own.get("allow_internet") else "no-network"
    common = own.get("network_mode", legacy)
    return {_lower(tables[name].get("network_mode", common)) for name in ("agent", "verifier")}


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    text = str(environment.get(name, ""))
    if text[-1:].upper() in UNITS and text[:-1].isdigit():
        return int(text[:-1]) * UNITS[text[-1].upper()]
    value = environment.get(f"{name}_mb")
    return int(value) if value is not None else None
