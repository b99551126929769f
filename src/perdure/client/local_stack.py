"""The address of the stack that `perdure up` started in this home.

Reads the state that its supervisor writes (`perdure.stack.state`); starts and checks nothing.
"""

import json

from perdure.errors import ConfigurationError
from perdure.sandboxes.host.process import ProcessId
from perdure.settings.load import load_settings


def address() -> str | None:
    """Its Temporal server; None when no stack of this process's settings is running.

    Raises: ConfigurationError when the settings are wrong.
    """
    try:
        home = load_settings().home.absolute()
    except ValueError as error:
        raise ConfigurationError(
            f"cannot look for a stack, the settings are wrong: {error}"
        ) from error
    try:
        state = json.loads((home / "run" / "state.json").read_bytes())
        supervisor = ProcessId(state["pid"], state["started"])
        return state["temporal_address"] or None if supervisor.alive else None
    except (FileNotFoundError, ValueError, KeyError):
        return None
