"""Where the stack that `perdure up` started in this home answers.

Reads the state that its supervisor writes (`perdure.cli.stack_state`); starts and checks nothing.
"""

import json
from pathlib import Path

from perdure.errors import ConfigurationError
from perdure.settings import Settings


def address() -> str | None:
    """Its Temporal server; None when no stack of this process's settings is running.

    Raises: ConfigurationError when the settings are wrong.
    """
    try:
        home = Settings().home.absolute()
    except ValueError as error:
        raise ConfigurationError(
            f"cannot look for a stack, the settings are wrong: {error}"
        ) from error
    try:
        state = json.loads((home / "run" / "state.json").read_bytes())
        return state["temporal_address"] or None if _lives(state["pid"], state["started"]) else None
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _lives(pid: int, started: int) -> bool:
    """The same process, not another one with its number: their start times differ."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False
    return int(fields[19]) == started and fields[0] not in "ZX"
