"""How a user's messages reach an agent that waits for them in its sandbox: as files, one at a time.

The agent writes what it said in turn 1, 2, ... to `turn-<n>.txt`, and waits for `user-<n>.json`, in
which the host answers. So the agent sees no message early, and the host can take a diff between turns.
"""

import json

from perdure.agents.base import HOME, Agent, TakesMessages
from perdure.errors import ConfigurationError, NotFound
from perdure.sandboxes.base import Sandbox
from perdure.types import SimulatedUser

FOLDER = f"{HOME}/conversation"
SAID_CHARACTERS = 16_000
"""Characters from the end of what an agent said in one turn."""


def check(name: str, agent: Agent, user: SimulatedUser | None) -> None:
    """Raises: ConfigurationError if the agent calls a model but takes no messages after the task."""
    asks = user is not None and user.max_messages and agent.needs_model
    if asks and not isinstance(agent, TakesMessages):
        raise ConfigurationError(
            f"user: agent {name!r} takes no message after the task: choose acp, or set "
            "user.max_messages=0"
        )


async def ended_turn(sandbox: Sandbox, turn: int) -> str | None:
    """What the agent said in a turn; None while the turn goes on."""
    try:
        said = await sandbox.get(f"{FOLDER}/turn-{turn}.txt", limit=4 * SAID_CHARACTERS)
    except NotFound:
        return None
    return said.decode("utf-8", "replace")[-SAID_CHARACTERS:]


async def send(sandbox: Sandbox, turn: int, message: str | None) -> None:
    """Answer the agent's turn. None: the conversation is over. Repeating is harmless."""
    answer = json.dumps({"message": message}).encode()
    await sandbox.put(f"{FOLDER}/user-{turn}.json", answer)
