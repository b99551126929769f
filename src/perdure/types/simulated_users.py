"""A user who writes the messages after the task: from a script, or played by a model of the engines."""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from perdure.errors import ConfigurationError
from perdure.types.base import Request

MOST_MESSAGES = 50
MOST_CHARACTERS = 65_536
"""Characters of all messages and the instruction. Each stage gets a copy of the request."""


class SimulatedUser(Request):
    """The user of a conversation whose first message is the task. `messages` come first; then a model
    writes further ones, if `model` names one.

    A row and a request may both have a user: a field that the request leaves at its default is the row's.

    Example:
        {"messages": ["Now add a test."]}
        {"model": "user", "instruction": "You maintain h11. If asked, say that Python 3.8 must work."}
    """

    messages: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        (), max_length=MOST_MESSAGES
    )
    """Messages that are sent one after another, each when the agent has ended its turn."""
    model: str = ""
    """The model that plays the user, as an engine serves it (`perdure engines list`)."""
    instruction: str = ""
    """Who the user is, what they want, and what they know and the agent does not. It never enters the
    sandbox."""
    max_messages: int = Field(10, ge=0, le=MOST_MESSAGES)
    """Most messages after the task. 0: no user, also if the row has one."""
    temperature: float = Field(1.0, ge=0)
    """The model's temperature."""
    max_tokens: int = Field(4096, ge=1, le=32_768)
    """Most tokens of one message of the model, its reasoning included."""
    timeout_s: float = Field(300.0, gt=0, le=600)
    """Seconds of one call of the model. A longer one is repeated."""
    grade_turns: bool = False
    """Capture the diff after each turn of the agent, and grade each in fresh sandboxes."""
    turn_tests: tuple[tuple[str, ...], ...] = Field((), max_length=MOST_MESSAGES + 1)
    """For each turn in order, the FAIL_TO_PASS and PASS_TO_PASS tests whose passing share is its reward.
    A turn without any is graded by all tests."""

    @model_validator(mode="after")
    def _is_short(self) -> Self:
        total = sum(map(len, self.messages)) + len(self.instruction)
        if total > MOST_CHARACTERS:
            raise ValueError(
                f"`messages` and `instruction` have {total:,} characters, and at most "
                f"{MOST_CHARACTERS:,} are allowed"
            )
        return self


def conversation_user(
    row: SimulatedUser | None, request: SimulatedUser | None
) -> SimulatedUser | None:
    """The user of a rollout; None if it has none. Raises: ConfigurationError naming the field."""
    given = [one.model_dump(exclude_defaults=True) for one in (row, request) if one is not None]
    user = SimulatedUser(**{name: value for one in given for name, value in one.items()})
    if not given or not user.max_messages:
        return None
    if not user.messages and not user.model:
        raise ConfigurationError("user: give `messages`, or the `model` that plays the user")
    if user.model and not user.instruction:
        raise ConfigurationError("user.instruction: tell the model which user it plays")
    return user
