"""Finds uv, and the Python interpreters of this host.

uv stops at the first program of a name on PATH, also if that is a pyenv shim that starts nothing. So each
candidate is started once, and the first that answers with the wanted version is taken.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perdure.errors import MissingDependency
from perdure.settings import environment

STARTS_WITHIN_S = 30.0
PLACES = ("/usr/local/bin", "/usr/bin")
"""Where Debian and deadsnakes put `python3.10`, also if PATH does not lead there."""
ASK = "import sys; print(sys.base_prefix); print('%d.%d.%d' % sys.version_info[:3])"


class Interpreter(NamedTuple):
    program: Path
    prefix: Path
    """The folder that a sandbox needs to run it."""


def find_uv() -> Path:
    """Raises: MissingDependency."""
    try:
        from uv import find_uv_bin

        return Path(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise MissingDependency(
            "uv is missing, which installs agents and builds environments: install it "
            "(https://docs.astral.sh/uv) so that PATH has it"
        )
    return Path(found)


def find_interpreter(version: str) -> Interpreter | None:
    """The first interpreter of this version, such as `3.10` or `3.10.13`, that starts: of those that uv
    finds, then on PATH and in PLACES, then of pyenv. Raises: MissingDependency without uv."""
    for program in (*_of_uv(version), *_on_path(version), *_of_pyenv(version)):
        if (prefix := prefix_of(program, version)) is not None:
            return Interpreter(program, prefix)
    return None


def prefix_of(program: Path, version: str) -> Path | None:
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


def places_searched() -> str:
    """For messages: where `find_interpreter` looks."""
    return f"uv's own folder, PATH, {', '.join(PLACES)} and {_pyenv() / 'versions'}"


def _of_uv(version: str) -> Iterator[Path]:
    """In its own folder, else on the system."""
    for kind in ("--managed-python", "--no-managed-python"):
        words = ["python", "find", "--no-project", "--system", kind, "--no-python-downloads"]
        found = subprocess.run(  # in the root folder, where no project around has an effect
            [find_uv(), *words, version], capture_output=True, cwd="/", check=False
        )
        if found.returncode == 0:
            yield Path(found.stdout.decode().strip())


def _on_path(version: str) -> Iterator[Path]:
    name = "python" + ".".join(version.split(".")[:2])
    folders = environment.variables().get("PATH", "").split(":")
    for folder in dict.fromkeys([*folders, *PLACES]):
        if folder and (program := Path(folder, name)).is_file():
            yield program


def _of_pyenv(version: str) -> Iterator[Path]:
    """The newest patch release first."""
    root = _pyenv()
    found = [*root.glob(f"versions/{version}"), *root.glob(f"versions/{version}.*")]
    for folder in sorted(found, key=lambda one: _numbers(one.name), reverse=True):
        yield folder / "bin" / "python"


def _pyenv() -> Path:
    return Path(environment.foreign("PYENV_ROOT") or "~/.pyenv").expanduser()


def _numbers(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]
