"""The address of the stack that `perdure up` started in this home.

Reads the state file that its supervisor writes (`perdure.stack.stack_state`). Starts and checks nothing.
"""

import json

from perdure.sandboxes.host.host_processes import ProcessId
from perdure.settings.settings_tree import Settings


def address(settings: Settings) -> str | None:
    """The address of the stack's Temporal server; None if no stack of these settings is running."""
    try:
        state = json.loads((settings.home.absolute() / "run" / "state.json").read_bytes())
        supervisor = ProcessId(state["pid"], state["started"])
        return state["temporal_address"] or None if supervisor.alive else None
    except (FileNotFoundError, ValueError, KeyError):
        return None
