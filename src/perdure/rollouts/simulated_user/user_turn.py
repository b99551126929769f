"""What followed a turn of the agent: the user's answer, as a checkpoint of the attempt."""

from typing import Literal

from perdure.rollouts import stage_checkpoints
from perdure.storage.base import Store
from perdure.types import Frozen, PatchRef

ConversationEnd = Literal["", "script", "user", "max_messages", "context"]
"""Why the user answers nothing more: the script is over, the model ends the conversation, `max_messages` is
reached, or the conversation no longer fits the model's context. Empty if the user answered."""


class UserCompletion(Frozen):
    """A completion of the model that plays the user."""

    id: str
    """The same if another attempt gets the recorded answer, so that it counts once."""
    model: str
    asked_model: str = ""
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int


class UserTurn(Frozen):
    """`user-<turn>.json`.

    Example: UserTurn(turn=1, said="I fixed add().", message="Now add a test.", seconds=0.2)
    """

    turn: int
    """The number of the agent's turn that the user answers. Turn 1 is the work on the task."""
    said: str
    """What the agent said in that turn, cut at the beginning."""
    message: str | None
    """None: the conversation is over."""
    end: ConversationEnd = ""
    completion: UserCompletion | None = None
    patch: PatchRef | None = None
    """The diff after that turn, if it is graded."""
    seconds: float = 0.0
    """How long the agent waited for the answer."""


async def read_turns(store: Store, folder: str) -> list[UserTurn]:
    """The turns of an attempt in order. `folder`: of the attempt. Raises: AttemptDamaged."""
    turns: list[UserTurn] = []
    while True:
        key = f"{folder}/{name_of(len(turns) + 1)}"
        if (found := await stage_checkpoints.read(store, key, UserTurn)) is None:
            return turns
        turns.append(found)


def name_of(turn: int) -> str:
    return f"user-{turn}.json"
