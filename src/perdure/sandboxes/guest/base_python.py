"""The Python behind a virtual environment of this host, for sandboxes that do not see this host.

A virtual environment names its interpreter by path, so it starts only if the interpreter is
uploaded too.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from perdure.sandboxes.base import Mount


def with_interpreters(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """The mounts, followed by the interpreters that their virtual environments need.

    An interpreter in /usr is expected in the image. One that a mount covers is there already.
    """
    targets = [Path(mount.target) for mount in mounts]
    needed = dict.fromkeys(path for mount in mounts for path in _interpreters(mount.source))
    missing = [path for path in needed if not any(path.is_relative_to(t) for t in targets)]
    return (*mounts, *(Mount(path, str(path)) for path in missing))


def is_interpreter(folder: Path) -> bool:
    """Whether a Python is installed here, rather than a virtual environment."""
    return any(folder.glob("lib/python3.*/os.py")) and not (folder / "pyvenv.cfg").exists()


def _interpreters(environment: Path) -> Iterable[Path]:
    """The path that the environment names and, if that is a link, its target."""
    try:
        lines = (environment / "pyvenv.cfg").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    pairs = (line.partition("=") for line in lines)
    home = next((value.strip() for key, _, value in pairs if key.strip() == "home"), None)
    if home is None:
        return
    for prefix in dict.fromkeys((Path(home).parent, Path(home).resolve().parent)):
        if not prefix.is_relative_to("/usr") and prefix.is_dir():
            yield prefix
