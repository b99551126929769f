"""Reads the version of an agent's program from its lock."""

import functools
import json
import re
from importlib import resources

REQUIREMENT = re.compile(r"^[\w.-]+==(\S+)$", re.MULTILINE)


@functools.cache
def locked_version(agent: str) -> str:
    """The version in the agent's lock; empty if it has none.

    Example:
        locked_version("mini_swe_agent") -> "2.4.6"
    """
    locks = resources.files("perdure.agents.locks")
    if (packages := locks / f"{agent}.in").is_file():
        found = REQUIREMENT.search(packages.read_text())
        return found[1] if found else ""
    if (platforms := locks / f"{agent}.json").is_file():
        lock = next(iter(json.loads(platforms.read_text()).items()))
        return str(lock[1]["version"]).removesuffix(f"-{lock[0]}")
    return ""
