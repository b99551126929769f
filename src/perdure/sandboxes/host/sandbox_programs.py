"""The programs of this host that make sandboxes or run in them, and the package that installs each."""

import shutil
from collections.abc import Iterable
from functools import cache

from perdure.errors import MissingDependency
from perdure.sandboxes.agent_user import SYSTEM_PATH

_PACKAGES = {
    "apptainer": "see https://apptainer.org, it has no package",
    "bwrap": "apt-get install bubblewrap",
    "docker": "apt-get install docker.io",
    "podman": "apt-get install podman runc",
    "mount": "apt-get install mount",
    "tmux": "apt-get install tmux",
    "unshare": "apt-get install util-linux",
}


@cache
def program(name: str) -> str:
    """Absolute path of a system program. Raises: MissingDependency."""
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise MissingDependency(f"{name} is missing; install it (Debian: {_PACKAGES[name]})")
    return found


def missing_programs(names: Iterable[str]) -> list[str]:
    """One line for each program that is missing here, with the fix."""
    missing = []
    for name in names:
        try:
            program(name)
        except MissingDependency as error:
            missing.append(str(error))
    return missing
