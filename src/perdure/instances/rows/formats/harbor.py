"""Harbor task folders: instruction.md, task.toml, environment/, tests/test.sh and optionally
solution/.

Perdure builds no images, so the task must name one that exists. Its tree becomes a repository of
one commit, so that the agent's change is a diff. The tests always run in a fresh sandbox. A task
that needs unsupported features is refused, with all of them in one message. A task that does not
choose a network gets none; in Harbor it gets a public one.
"""

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure.instances.rows.row_fields import Row
from perdure.types import (
    Environment,
    Grading,
    Instance,
    LimitChanges,
    Phase,
    Phases,
    Source,
    SourceKind,
    slugify,
)

FOLDER = ".perdure-tests"
"""The folder of the tests in `grading.files`; the grader `reward_file` moves them to /tests."""
ONE_COMMIT = (
    "[ -d .git ] || { git init -q . && git add -A -f && git -c user.name=perdure "
    "-c user.email=perdure@localhost commit -q --allow-empty -m base; }"
)
UNITS = {"M": 1, "G": 1 << 10, "T": 1 << 20}
READ: Mapping[str, str] = {
    "": (
        "version schema_version task metadata source multi_step_reward_strategy "
        "verifier agent environment solution"
    ),
    "verifier": "timeout_sec env environment_mode network_mode user",
    "agent": "timeout_sec network_mode user",
    "environment": (
        "build_timeout_sec docker_image workdir os env cpus memory_mb memory "
        "storage_mb storage allow_internet network_mode"
    ),
    "solution": "env",
}
"""Supported keys, by table. `task` and `metadata` describe the task and may hold anything."""
SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "verifier.environment_mode": ("shared", "separate"),
    "verifier.network_mode": ("public", "no-network"),
    "verifier.user": ("root", 0),
    "agent.network_mode": ("public", "no-network"),
    "agent.user": ("root", 0),
    "environment.network_mode": ("public", "no-network"),
    "environment.os": ("linux",),
}
"""Supported values of keys that allow others in Harbor."""


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, file or key, and fix."""
    folder = row.beside(row.text("task_folder", "name the folder of a Harbor task"))
    task = _task(row, folder)
    tables = {name: _table(row, task, name) for name in READ if name}
    if problems := _unsupported(folder, task, tables):
        raise row.refused("Perdure cannot run this Harbor task: " + "; ".join(problems))
    environment = tables["environment"]
    return Instance(
        instance_id=slugify(folder.name),
        dataset=dataset,
        data_source="harbor",
        problem_statement=_text(row, folder, "instruction.md"),
        source=Source(kind=SourceKind.IMAGE),
        environment=Environment(
            image=environment["docker_image"],
            workdir=environment.get("workdir") or _workdir(folder),
            env=_env(environment),
        ),
        grading=_grading(row, folder, tables["verifier"]),
        gold_patch=_gold(folder),
        gold_script=_gold_script(folder, tables["solution"]),
        phases=_phases(tables),
        metadata={"agent_timeout_s": tables["agent"].get("timeout_sec")},
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
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }
    known = {f"{name}.{key}".lstrip(".") for name, keys in READ.items() for key in keys.split()}
    names = [*(key for key in task if key not in tables), *values]
    problems = [f"it does not support `{name}`" for name in names if name not in known]
    problems += [
        f"it does not support `{name} = {value!r}`, only {' and '.join(map(repr, allowed))}"
        for name, allowed in SUPPORTED.items()
        if (value := values.get(name)) is not None and _lower(value) not in allowed
    ]
    problems += [
        f"`{name}.env.{key}` takes a value from the host, but sandboxes get none"
        for name, table in tables.items()
        for key, value in _env(table).items()
        if "${" in value
    ]
    if any((folder / "environment").glob("docker-compose.y*ml")):
        problems.append("its environment has several containers; Perdure runs only one")
    is_separate = values.get("verifier.environment_mode") == "separate"
    if is_separate and (folder / "tests" / "Dockerfile").is_file():
        problems.append("tests/Dockerfile gives the tests an image of their own")
    if not isinstance(values.get("environment.docker_image"), str):
        fix = "build it with `docker build -t NAME environment` and name it there"
        problems.append(f"`environment.docker_image` names no image: {fix}")
    return problems


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _env(table: Mapping[str, Any]) -> dict[str, str]:
    env = table.get("env", {})
    return {str(key): str(value) for key, value in env.items()} if isinstance(env, dict) else {}


def _table(row: Row, task: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = task.get(name, {})
    if not isinstance(table, dict):
        raise row.wrong("task_folder", f"`{name}` of its task.toml is not a table")
    return table


def _text(row: Row, folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise row.wrong("task_folder", f"its {name}: {error}") from error


def _workdir(folder: Path) -> str:
    """The last WORKDIR of the Dockerfile; /app if it has no absolute one."""
    dockerfile = folder / "environment" / "Dockerfile"
    text = dockerfile.read_text() if dockerfile.is_file() else ""
    found: list[str] = re.findall(r"^\s*WORKDIR\s+(\S+)\s*$", text, re.MULTILINE)
    return found[-1] if found and found[-1].startswith("/") else "/app"


def _grading(row: Row, folder: Path, verifier: Mapping[str, Any]) -> Grading:
    tests = _files(folder / "tests")
    if "test.sh" not in tests:
        raise row.wrong("task_folder", "it has no tests/test.sh, which writes the reward")
    tests["test.sh"] = _exports(verifier) + tests["test.sh"]
    return Grading(
        protocol="reward_file",
        files={f"{FOLDER}/{name}": data for name, data in tests.items()},
        pre_commands=(ONE_COMMIT,),
        timeout_s=float(verifier.get("timeout_sec", 600.0)),
    )


def _exports(table: Mapping[str, Any]) -> bytes:
    """Shell lines that set the table's variables."""
    lines = [f"export {key}={shlex.quote(value)}\n" for key, value in _env(table).items()]
    return "".join(lines).encode()


def _gold_script(folder: Path, solution: Mapping[str, Any]) -> dict[str, bytes]:
    files = _files(folder / "solution")
    if "solve.sh" in files:
        files["solve.sh"] = _exports(solution) + files["solve.sh"]
    return files


def _files(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _gold(folder: Path) -> bytes:
    patch = folder / "solution" / "solution.patch"
    return patch.read_bytes() if patch.is_file() else b""


def _phases(tables: Mapping[str, Mapping[str, Any]]) -> Phases:
    environment = tables["environment"]
    limits = LimitChanges(
        cpus=environment.get("cpus"),
        memory_mb=_megabytes(environment, "memory"),
        disk_mb=_megabytes(environment, "storage"),
    )
    legacy = "public" if environment.get("allow_internet") else "no-network"
    common = environment.get("network_mode", legacy)
    agent, grade = (
        Phase(
            limits=limits,
            network="host" if tables[name].get("network_mode", common) == "public" else None,
        )
        for name in ("agent", "verifier")
    )
    return Phases(agent=agent, grade=grade)


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    text = str(environment.get(name, ""))
    if text[-1:].upper() in UNITS and text[:-1].isdigit():
        return int(text[:-1]) * UNITS[text[-1].upper()]
    value = environment.get(f"{name}_mb")
    return int(value) if value is not None else None
