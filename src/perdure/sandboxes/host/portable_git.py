"""This host's git with its libraries, for images without git.

The diff of a sandbox is taken, and a patch applied, with git. Many images, such as `ubuntu`, have
none.
"""

import os
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from perdure.sandboxes.agent_user import SYSTEM_PATH
from perdure.sandboxes.base import Mount
from perdure.sandboxes.host.portable_program import WRAPPER, write_program

FOLDER = "/opt/perdure/git"
PROGRAM = "/usr/local/bin/git"
"""Its folder is in the PATH of nearly every image."""


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
    return Mount(folder, FOLDER), Mount(folder / WRAPPER, PROGRAM)


def write_git(folder: Path) -> None:
    """Copy git for `mounts_of`. Raises: FileNotFoundError without git."""
    git = _host_git()
    if git is None:
        raise FileNotFoundError("git")
    write_program(git, folder, FOLDER)
