"""The host's tool cache: each agent's program is built once and never changed.

A tool is a folder named by the digest of its recipe. It gets that name once it is complete, and is
rebuilt if it is damaged.
"""

import asyncio
import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perdure.durable_files import is_whole, publish_folder
from perdure.errors import AgentError, MissingDependency
from perdure.home_folder import make_readable_by_sandboxes
from perdure.python_interpreters import find_interpreter, find_uv, places_searched
from perdure.sandboxes.base import Mount

INSTALL_TIMEOUT_S = 900
LATER_MINORS = 3
"""Number of minor versions to look for, starting with the minimum."""


async def built(tools: Path, name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """The finished folder `<tools>/<name>-<digest of recipe>`, built now if it does not exist.

    Many processes may call this at once: one builds, the others wait outside the event loop.
    """
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    folder = tools / f"{name}-{digest}"
    if not await asyncio.to_thread(is_whole, folder):
        await asyncio.to_thread(_build_once, folder, build)
    return folder


async def start_script(tools: Path, name: str, program: str, script: str) -> Path:
    """A finished folder with one executable file, the script, at `program`."""

    def write(folder: Path) -> None:
        file = folder / program
        file.parent.mkdir(parents=True)
        file.write_text(script)
        file.chmod(0o755)

    return await built(tools, name, f"{program} {script}", write)


def _build_once(folder: Path, build: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_whole(folder):
            return
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        build(partial)
        make_readable_by_sandboxes(partial)
        publish_folder(partial, folder)


@dataclass(frozen=True)
class Python:
    """An interpreter of this host, on which a virtual environment depends."""

    executable: Path
    prefix: Path
    """The folder that a sandbox needs to run it."""
    identity: str

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What a sandbox needs to run it; nothing for Perdure's own and below /usr, which every
        sandbox has."""
        if self.prefix.is_relative_to("/usr") or self.prefix == Path(sys.base_prefix):
            return ()
        return (Mount(source=self.prefix, target=str(self.prefix)),)


def own_python() -> Python:
    """Perdure's interpreter."""
    prefix = Path(sys.base_prefix)
    program = prefix / "bin" / f"python3.{sys.version_info.minor}"
    return Python(program, prefix, f"{prefix} {sys.version} {platform.machine()}")


def find_python(minimum: str, named: str, variable: str) -> Python:
    """The interpreter that the user named, or the first on this host of this minor version or a
    later one.

    Raises: MissingDependency with the places it searched and the command that installs one.
    """
    program = Path(named) if named else _first(minimum)
    found = program and _described(program, minimum)
    if program is None or not found:
        searched = f"{named} is not one" if named else f"searched: {places_searched()}"
        raise MissingDependency(
            f"no Python {minimum} or later starts on this host ({searched}): "
            f"run `uv python install {minimum}`, or name one in {variable}"
        )
    prefix, version = found
    return Python(program, prefix, f"{prefix} {version} {platform.machine()}")


def _first(minimum: str) -> Path | None:
    major, minor = map(int, minimum.split("."))
    for later in range(LATER_MINORS):
        if (found := find_interpreter(f"{major}.{minor + later}")) is not None:
            return found.program
    return None


def _described(program: Path, minimum: str) -> tuple[Path, str] | None:
    """The program's prefix and full version; None if it does not start or is too old."""
    enough = f"sys.version_info >= ({', '.join(minimum.split('.'))})"
    script = f"import sys; print(sys.base_prefix); print({enough}); print(sys.version)"
    try:
        argv = [str(program), "-I", "-c", script]
        told = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    prefix, is_enough, version = told.strip().split("\n", 2)
    return (Path(prefix), version) if is_enough == "True" else None


def make_virtual_environment(folder: Path, lock: Path, python: Python) -> None:
    """Make a relocatable virtual environment with exactly the locked packages, and check their
    hashes.

    Raises: MissingDependency without uv; AgentError when the registry does not deliver a package.
    """
    uv = str(find_uv())
    venv = [uv, "venv", "--quiet", "--relocatable", "--python", str(python.executable)]
    run_installer([*venv, str(folder)])
    exact = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--compile-bytecode"]
    pip = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    run_installer([*pip, *exact, "-r", str(lock)])


def run_installer(argv: list[str]) -> None:
    """Raises: AgentError with the end of what it wrote to stderr."""
    try:
        subprocess.run(
            argv,
            check=True,
            capture_output=True,
            timeout=INSTALL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()[-1000:]
        raise AgentError(f"installing the agent failed: {' '.join(argv[:4])}: {said}") from error
    except subprocess.TimeoutExpired as error:
        raise AgentError(f"installing the agent took over {INSTALL_TIMEOUT_S} s") from error
