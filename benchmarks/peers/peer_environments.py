"""Makes one Python environment per peer with uv, outside our lock. It is reused while its pins stay.

A peer that cannot be installed is skipped; the report gives the reason.
"""

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perdure.python_interpreters import find_uv


class Unavailable(Exception):
    """The peer cannot be installed here. The message goes into the report."""


@dataclass(frozen=True)
class Pinned:
    """The packages of a peer's environment. `pythons`: versions that it accepts, best first."""

    name: str
    packages: tuple[str, ...]
    pythons: tuple[str, ...]


def environment(pinned: Pinned, root: Path) -> Path:
    """The environment's folder; its programs are in `bin/`.

    Raises: Unavailable, which lists what was tried.
    """
    digest = hashlib.sha256(repr(pinned).encode()).hexdigest()[:10]
    folder = root / f"{pinned.name}-{digest}"
    if (folder / "complete").exists():
        return folder
    problems = []
    for python in _interpreters(pinned.pythons):
        shutil.rmtree(folder, ignore_errors=True)
        problem = _make(folder, python, pinned.packages)
        if problem is None:
            (folder / "complete").touch()
            return folder
        problems.append(f"with Python {python}: {problem}")
    raise Unavailable(f"{pinned.name} cannot be installed: " + "; ".join(problems))


def _interpreters(versions: tuple[str, ...]) -> Iterator[str]:
    """Installed Pythons first, including pyenv's; then versions that uv can download."""
    for version in versions:
        if found := shutil.which(f"python{version}"):
            yield found
        for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")):
            yield str(path)
    yield from versions


def _make(folder: Path, python: str, packages: tuple[str, ...]) -> str | None:
    """None if it worked, otherwise the reason in one line."""
    uv = str(find_uv())
    commands = (
        [uv, "venv", "-q", "--python", python, str(folder)],
        [uv, "pip", "install", "-q", "--python", str(folder / "bin" / "python"), *packages],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            return (lines or done.stderr.splitlines() or ["no reason given"])[0].strip()[:200]
    return None
