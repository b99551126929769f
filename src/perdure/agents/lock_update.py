"""Pins an agent's program to another version in a folder of locks, by what its registry publishes."""

import json
import re
from pathlib import Path

from perdure.agents import npm_packages, tool_cache
from perdure.agents.locked_version import REQUIREMENT
from perdure.errors import ConfigurationError
from perdure.python_interpreters import find_uv

VERSION = re.compile(r"\d[\w.+-]*")
OLDEST_PYTHON = {"openhands": "3.12", "terminus_2": "3.12"}
"""Minimum Python versions of agents that do not run on 3.11, Perdure's minimum."""
COMPILE = (
    *("pip", "compile", "--quiet", "--universal", "--generate-hashes"),
    *("--no-header", "--no-annotate", "--no-emit-index-url"),
)


def update_lock(locks: Path, agent: str, version: str) -> list[Path]:
    """Rewrite the agent's lock and return its files. Other packages in it change only if they must.

    Raises: ConfigurationError if the agent has no lock or `version` is not an exact version;
    AgentError if the registry lacks the version.
    """
    if not VERSION.fullmatch(version):
        raise ConfigurationError(f"{version!r} is not a version; give an exact one, such as 1.2.3")
    if (lock := locks / f"{agent}.json").is_file():
        return _update_npm(lock, version)
    if (wanted := locks / f"{agent}.in").is_file():
        return _update_python(wanted, agent, version)
    raise ConfigurationError(f"agent {agent!r} has no locked version to change")


def _update_npm(lock: Path, version: str) -> list[Path]:
    entries = json.loads(lock.read_text())
    for platform, entry in entries.items():
        suffix = f"-{platform}" if entry["version"].endswith(f"-{platform}") else ""
        entry["version"] = f"{version}{suffix}"
        entry["integrity"] = npm_packages.integrity(entry["package"], entry["version"])
    lock.write_text(json.dumps(entries, indent=2) + "\n")
    return [lock]


def _update_python(wanted: Path, agent: str, version: str) -> list[Path]:
    """`wanted` may name several packages with the version of the agent's own."""
    text, lock, overrides = (
        wanted.read_text(),
        wanted.with_suffix(".txt"),
        wanted.with_suffix(".overrides"),
    )
    if found := REQUIREMENT.search(text):
        wanted.write_text(text.replace(f"=={found[1]}\n", f"=={version}\n"))
    override = ("--override", str(overrides)) if overrides.is_file() else ()
    python = ("--python-version", OLDEST_PYTHON.get(agent, "3.11"))
    argv = [str(find_uv()), *COMPILE, *python, *override, str(wanted), "-o", str(lock)]
    tool_cache.run_installer(argv)
    return [wanted, lock]
