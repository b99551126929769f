"""Finds uv, and the Python interpreters of this host.

uv stops at the first program with the right name on PATH, even if it is a pyenv shim that does not
start. So this module starts each candidate once and takes the first that reports the wanted
version.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perdure.errors import MissingDependency
from perdure.installation import command_for_packages
from perdure.settings import process_environment

STARTS_WITHIN_S = 30.0
PLACES = ("/usr/local/bin", "/usr/bin")
"""Where Debian and deadsnakes put `python3.10`. They are searched even if PATH lacks them."""
ASK = "import sys; print(sys.base_prefix); print('%d.%d.%d' % sys.version_info[:3])"


class Interpreter(NamedTuple):
    program: Path
    prefix: Path
    """The folder that a sandbox needs to run the interpreter."""


def find_uv() -> Path:
    """Raises: MissingDependency."""
    try:
        from uv import find_uv_bin

        return Path(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise MissingDependency(
            "uv, which installs agents and builds environments, is missing: "
            f"{command_for_packages('uv')}, or put it on PATH (https://docs.astral.sh/uv)"
        )
    return Path(found)


def find_interpreter(version: str) -> Interpreter | None:
    """The first interpreter of this version, such as `3.10` or `3.10.13`, that starts. The search
    order is uv, PATH, PLACES, pyenv. Raises: MissingDependency if uv is missing."""
    for program in (*_of_uv(version), *_on_path(version), *_of_pyenv(version)):
        if (prefix := prefix_of(program, version)) is not None:
            return Interpreter(program, prefix)
    return None


def prefix_of(program: Path, version: str) -> Path | None:
    """The interpreter's prefix; None if it does not start or has another version."""
    try:
        asked = subprocess.run(
            [program, "-I", "-c", ASK], capture_output=True, check=True, timeout=STARTS_WITHIN_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    prefix, own = asked.stdout.decode().split("\n")[:2]
    wanted = version.split(".")
    return Path(prefix) if own.split(".")[: len(wanted)] == wanted else None


def places_searched() -> str:
    """The places that `find_interpreter` searches, for messages."""
    return f"uv's own folder, PATH, {', '.join(PLACES)} and {_pyenv() / 'versions'}"


def _of_uv(version: str) -> Iterator[Path]:
    """Interpreters that uv finds, first in its own folder, then on the system."""
    for kind in ("--managed-python", "--no-managed-python"):
        words = ["python", "find", "--no-project", "--system", kind, "--no-python-downloads"]
        found = subprocess.run(  # in `/`, where no project affects the search
            [find_uv(), *words, version], capture_output=True, cwd="/", check=False
        )
        if found.returncode == 0:
            yield Path(found.stdout.decode().strip())


def _on_path(version: str) -> Iterator[Path]:
    name = "python" + ".".join(version.split(".")[:2])
    folders = process_environment.variables().get("PATH", "").split(":")
    for folder in dict.fromkeys([*folders, *PLACES]):
        if folder and (program := Path(folder, name)).is_file():
            yield program


def _of_pyenv(version: str) -> Iterator[Path]:
    """pyenv's interpreters, the newest patch release first."""
    root = _pyenv()
    found = [*root.glob(f"versions/{version}"), *root.glob(f"versions/{version}.*")]
    for folder in sorted(found, key=lambda one: _numbers(one.name), reverse=True):
        yield folder / "bin" / "python"


def _pyenv() -> Path:
    return Path(process_environment.foreign("PYENV_ROOT") or "~/.pyenv").expanduser()


def _numbers(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]
