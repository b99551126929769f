"""Finds the interpreter of a row: one that starts here, else one that uv can install.

uv stops at the first program of the name on PATH, also where that is a pyenv shim that starts nothing.
"""

import asyncio
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from perdure.errors import InstanceError
from perdure.instances import uv
from perdure.settings import environment
from perdure.types import Instance, SourceKind

STARTS_WITHIN_S = 30.0
PLACES = ("/usr/local/bin", "/usr/bin")
"""Where Debian and deadsnakes put `python3.10`, also if PATH does not lead there."""
ASK = "import sys; print(sys.base_prefix); print('%d.%d.%d' % sys.version_info[:3])"


@functools.lru_cache
def find_python(version: str) -> Path:
    """The prefix of an interpreter of this version, such as `3.10` or `3.10.13`.

    Perdure's own; what uv finds; those of PATH, pyenv and deadsnakes that really start; else what uv
    installs. Raises: InstanceError with uv's own words.
    """
    if version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]:
        return Path(sys.base_prefix)
    said, programs = _of_uv(version)
    for program in (*programs, *_on_path(version), *_of_pyenv(version)):
        if (prefix := _prefix(program, version)) is not None:
            return prefix
    installed = uv.run(["python", "install", "-q", "--no-progress", version])
    if installed.returncode == 0:
        _, programs = _of_uv(version)
        for program in programs:
            if (prefix := _prefix(program, version)) is not None:
                return prefix
    raise InstanceError(
        f"`environment.python` is {version!r}, and no such interpreter starts on this machine: "
        f"install Python {version} here, or leave the instance out. uv found none: {said}; "
        f"and cannot install one: {_told(installed.stderr)}"
    )


async def check(instances: Iterable[Instance]) -> None:
    """This machine has the interpreters of these instances. Raises: InstanceError naming the first
    instance that lacks its own."""
    versions: dict[str, str] = {}
    for instance in instances:
        if instance.source.kind is not SourceKind.IMAGE:
            versions.setdefault(instance.environment.python, instance.ref)
    for version, ref in versions.items():
        try:
            await asyncio.to_thread(find_python, version)
        except InstanceError as error:
            raise InstanceError(f"{ref}: {error}") from error


def _of_uv(version: str) -> tuple[str, list[Path]]:
    """What uv says, and the program that it finds: in its own folder, else on the system."""
    said, programs = "", []
    for kind in ("--managed-python", "--no-managed-python"):
        words = ["python", "find", "--no-project", "--system", kind, "--no-python-downloads"]
        found = uv.run([*words, version])
        said = _told(found.stderr)
        if found.returncode == 0:
            programs.append(Path(found.stdout.decode().strip()))
    return said, programs


def _on_path(version: str) -> Iterator[Path]:
    name = "python" + ".".join(version.split(".")[:2])
    folders = environment.variables().get("PATH", "").split(":")
    for folder in dict.fromkeys([*folders, *PLACES]):
        if folder and (program := Path(folder, name)).is_file():
            yield program


def _of_pyenv(version: str) -> Iterator[Path]:
    """The newest patch release first."""
    root = Path(environment.foreign("PYENV_ROOT") or "~/.pyenv").expanduser()
    found = [*root.glob(f"versions/{version}"), *root.glob(f"versions/{version}.*")]
    for folder in sorted(found, key=lambda one: _numbers(one.name), reverse=True):
        yield folder / "bin" / "python"


def _numbers(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]


def _prefix(program: Path, version: str) -> Path | None:
    """None: it does not start, or is another version."""
    try:
        asked = subprocess.run(
            [program, "-I", "-c", ASK], capture_output=True, check=True, timeout=STARTS_WITHIN_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    prefix, own = asked.stdout.decode().split("\n")[:2]
    wanted = version.split(".")
    return Path(prefix) if own.split(".")[: len(wanted)] == wanted else None


def _told(stderr: bytes) -> str:
    """In one line, without uv's own `error:`."""
    words = " ".join(stderr.decode("utf-8", "replace").split())
    return words.removeprefix("error: ")[:600] or "it says nothing"
