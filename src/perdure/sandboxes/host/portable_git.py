"""This host's git with its libraries, for images without git.

The diff of a sandbox is taken, and a patch applied, with git. Many images, such as `ubuntu`, have
none.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from perdure.sandboxes.agent_user import SYSTEM_PATH
from perdure.sandboxes.base import Mount

FOLDER = "/opt/perdure/git"
PROGRAM = "/usr/local/bin/git"
"""Its folder is in the PATH of nearly every image."""
WRAPPER = f"""#!/bin/sh
exec {FOLDER}/loader --library-path {FOLDER}/lib --argv0 git {FOLDER}/git "$@"
"""
"""The loader finds the libraries of this host's git, whatever the image's libc is."""
_LIBRARY = re.compile(r"(/\S+) \(0x")


@cache
def _host_git() -> str | None:
    return shutil.which("git", path=SYSTEM_PATH)


def lacks_git(root: Path, variables: Mapping[str, str]) -> bool:
    """Whether an image with this root folder has no git in its PATH."""
    path = variables.get("PATH") or SYSTEM_PATH
    folders = [root / folder.lstrip("/") for folder in path.split(":") if folder.startswith("/")]
    return not any(os.path.lexists(folder / "git") for folder in folders)


def mounts_of(folder: Path) -> tuple[Mount, ...]:
    """The mounts that put the git in `folder` into a sandbox."""
    return Mount(folder, FOLDER), Mount(folder / "wrapper", PROGRAM)


def write_git(folder: Path) -> None:
    """Copy git, its libraries and its loader. Raises: FileNotFoundError without git."""
    git = _host_git()
    if git is None:
        raise FileNotFoundError("git")
    (folder / "lib").mkdir(parents=True)
    shutil.copy(os.path.realpath(git), folder / "git")
    listed = subprocess.run(["ldd", git], capture_output=True, text=True, check=True).stdout
    for path in map(Path, _LIBRARY.findall(listed)):
        loader = path.name.startswith("ld-")
        shutil.copy(path, folder / ("loader" if loader else f"lib/{path.name}"))
    (folder / "wrapper").write_text(WRAPPER)
    for name in ("git", "loader", "wrapper"):
        (folder / name).chmod(0o755)
