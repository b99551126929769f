"""The Python that a virtual environment of this host was made on, for sandboxes that lack this host.

A virtual environment names its interpreter by path; carried elsewhere without it, it does not start.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from perdure.sandboxes.base import Mount


def with_interpreters(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """The mounts, and below them the interpreters that their virtual environments need.

    One in /usr is the sandbox's own affair, and one that a mount covers is there already.
    """
    targets = [Path(mount.target) for mount in mounts]
    needed = dict.fromkeys(path for mount in mounts for path in _interpreters(mount.source))
    missing = [path for path in needed if not any(path.is_relative_to(t) for t in targets)]
    return (*mounts, *(Mount(path, str(path)) for path in missing))


def is_interpreter(folder: Path) -> bool:
    """Whether this is where a Python was installed, and not an environment made on one."""
    return any(folder.glob("lib/python3.*/os.py")) and not (folder / "pyvenv.cfg").exists()


def _interpreters(environment: Path) -> Iterable[Path]:
    """As the environment names it, and as it really lies: a link is of no use without its end."""
    try:
        lines = (environment / "pyvenv.cfg").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    home = next((value.strip() for key, _, value in _pairs(lines) if key.strip() == "home"), None)
    if home is None:
        return
    for prefix in dict.fromkeys((Path(home).parent, Path(home).resolve().parent)):
        if not prefix.is_relative_to("/usr") and prefix.is_dir():
            yield prefix


def _pairs(lines: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    return (line.partition("=") for line in lines)
