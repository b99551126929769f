"""The process's environment: the only module that reads it. Light, so that a command may start with it."""

import os
from collections.abc import Mapping
from pathlib import Path

OWN = {
    "PERDURE_CONFIG": "the TOML file to read, `perdure.toml` by default",
    "PERDURE_DEBUG": "`1` shows the traceback of an error",
}
"""Ours, in the environment only: they are read before the settings."""

INSIDE = {
    "PERDURE_BOX": "the sandbox that a process belongs to",
    "PERDURE_EXEC": "the command that a process belongs to",
    "PERDURE_OWNER": "the user of a sandbox's files",
    "PERDURE_RELAY_TOKEN": "the key between a relay and its program in the sandbox",
    "PERDURE_SESSION_KEY": "the agent's key for the gateway",
}
"""Perdure sets them inside sandboxes."""


def variables() -> Mapping[str, str]:
    """All of them, as they are now."""
    return os.environ


def toml_file() -> Path:
    """The file that would be read; it need not exist."""
    return Path(os.environ.get("PERDURE_CONFIG") or "perdure.toml").absolute()


def debug() -> bool:
    """Errors come with their traceback."""
    return os.environ.get("PERDURE_DEBUG") == "1"
