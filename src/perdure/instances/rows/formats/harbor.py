"""Harbor task folders: instruction.md, task.toml, environment/, tests/test.sh and optionally
solution/.

Perdure builds no images, so the task must name one that exists. Its tree becomes a repository of
one commit, so that the agent's change is a diff. A task that needs an unsupported feature is
refused.
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
READ: Mapping[str, frozenset[str]] = {
    "": frozenset(
        [
            "version",
            "schema_version",
            "task",
            "metadata",
            "verifier",
            "agent",
            "environment",
            "solution",
            "source",
        ]
    ),
    "verifier": frozenset(["timeout_sec", "env"]),
    "agent": frozenset(["timeout_sec"]),
    "environment": frozenset(
        [
            "build_timeout_sec",
            "docker_image",
            "cpus",
            "memory_mb",
            "memory",
            "storage_mb",
            "storage",
            "gpus",
            "allow_internet",
            "env",
            "workdir",
            "mcp_servers",
        ]
    ),
    "solution": frozenset(),
}
"""Supported keys, by table. `task` and `metadata` describe the task and may hold anything."""


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, file or key, and fix."""
    folder = row.beside(row.text("task_folder", "name the folder of a Harbor task"))
    task = _task(row, folder)
    environment = _table(row, task, "environment")
    workdir = environment.get("workdir") or _workdir(folder)
    return Instance(
        instance_id=slugify(folder.name),
        dataset=dataset,
        data_source="harbor",
        problem_statement=_text(row, folder, "instruction.md"),
        source=Source(kind=SourceKind.IMAGE),
        environment=Environment(
            image=_image(row, folder, environment),
            workdir=workdir,
            env=_plain_env(row, environment, "environment"),
        ),
        grading=_grading(row, folder, _table(row, task, "verifier")),
        gold_patch=_gold(folder),
        gold_script=_files(folder / "solution"),
        phases=_phases(row, environment),
        metadata={"agent_timeout_s": _table(row, task, "agent").get("timeout_sec")},
    )


def _task(row: Row, folder: Path) -> dict[str, Any]:
    try:
        task = tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise row.wrong("task_folder", f"its task.toml: {error}") from error
    asked = [
        f"`{table}.{key}`".replace("`.", "`")
        for table, keys in READ.items()
        for key in sorted((_table(row, task, table) if table else task).keys() - keys)
    ]
    if asked:
        raise row.refused(f"task.toml uses {', '.join(asked)}, which Perdure does not support")
    return task


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


def _image(row: Row, folder: Path, environment: Mapping[str, Any]) -> str:
    if any((folder / "environment").glob("docker-compose.y*ml")):
        raise row.refused("its environment has several containers; Perdure runs only one")
    image = environment.get("docker_image")
    if not isinstance(image, str) or not image:
        fix = "build it with `docker build -t NAME environment` and name it there"
        raise row.lacks("environment.docker_image", fix)
    return image


def _workdir(folder: Path) -> str:
    """The last WORKDIR of the Dockerfile; /app if it has no absolute one."""
    dockerfile = folder / "environment" / "Dockerfile"
    text = dockerfile.read_text() if dockerfile.is_file() else ""
    found: list[str] = re.findall(r"^\s*WORKDIR\s+(\S+)\s*$", text, re.MULTILINE)
    return found[-1] if found and found[-1].startswith("/") else "/app"


def _plain_env(row: Row, table: Mapping[str, Any], name: str) -> dict[str, str]:
    env = {str(key): str(value) for key, value in table.get("env", {}).items()}
    if taken := [key for key, value in env.items() if "${" in value]:
        problem = f"`{name}.env.{taken[0]}` takes a value from the host, but sandboxes get none"
        raise row.refused(problem)
    return env


def _grading(row: Row, folder: Path, verifier: Mapping[str, Any]) -> Grading:
    tests = _files(folder / "tests")
    if "test.sh" not in tests:
        raise row.wrong("task_folder", "it has no tests/test.sh, which writes the reward")
    exports = [
        f"export {key}={shlex.quote(value)}"
        for key, value in _plain_env(row, verifier, "verifier").items()
    ]
    if exports:
        tests["test.sh"] = "\n".join([*exports, ""]).encode() + tests["test.sh"]
    return Grading(
        protocol="reward_file",
        files={f"{FOLDER}/{name}": data for name, data in tests.items()},
        pre_commands=(ONE_COMMIT,),
        timeout_s=float(verifier.get("timeout_sec", 600.0)),
    )


def _files(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _gold(folder: Path) -> bytes:
    patch = folder / "solution" / "solution.patch"
    return patch.read_bytes() if patch.is_file() else b""


def _phases(row: Row, environment: Mapping[str, Any]) -> Phases:
    if environment.get("gpus") or environment.get("mcp_servers"):
        raise row.refused("its environment needs a GPU or a tool server, which no sandbox has")
    limits = LimitChanges(
        cpus=environment.get("cpus"),
        memory_mb=_megabytes(environment, "memory"),
        disk_mb=_megabytes(environment, "storage"),
    )
    phase = Phase(limits=limits, network="host" if environment.get("allow_internet") else None)
    return Phases(agent=phase, grade=phase)


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    text = str(environment.get(name, ""))
    if text[-1:].upper() in UNITS and text[:-1].isdigit():
        return int(text[:-1]) * UNITS[text[-1].upper()]
    value = environment.get(f"{name}_mb")
    return int(value) if value is not None else None
