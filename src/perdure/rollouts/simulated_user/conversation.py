"""Watches an agent that talks to a user: each time it ends a turn, the user answers.

The host writes the answer, so neither the script nor the instruction of a user enters the sandbox. Each
answer is a checkpoint: another try of the stage sends the same one.
"""

import asyncio
import time
from typing import NamedTuple

from perdure import tracing
from perdure.agents import user_messages
from perdure.agents.base import EXEC_ID
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import BootRecord
from perdure.rollouts.simulated_user import turn_grading, user_model
from perdure.rollouts.simulated_user.user_model import Answer, UserWaitsForQuota
from perdure.rollouts.simulated_user.user_turn import UserTurn, name_of, read_turns
from perdure.sandboxes.base import ExecStatus, Sandbox
from perdure.storage import store_keys
from perdure.types import SimulatedUser

POLL_S = 2.0
"""Seconds between two looks for the end of the agent's turn."""


class _Question(NamedTuple):
    """A turn that the user answers now. `since`: monotonic seconds."""

    task: "asyncio.Task[UserTurn]"
    since: float


class Conversation:
    """The user's side of a conversation. Use it as the context of a watch."""

    def __init__(self, job: Job, sandbox: Sandbox, user: SimulatedUser) -> None:
        self._job, self._sandbox, self._user = job, sandbox, user
        self._folder = store_keys.attempt(job.request, job.attempt)
        self._turns: list[UserTurn] = []
        self._question: _Question | None = None
        self._has_watched = False
        self.is_unanswered = False
        """Whether the agent was ended while it waited for the user, perhaps when no worker watched it."""
        self.waits_for_quota = False
        """Whether a quota must reset before the user's model can answer."""

    async def __aenter__(self) -> "Conversation":
        """Send the last answer again: an earlier try may have died before it did."""
        self._turns = await read_turns(self._job.services.store, self._folder)
        if self._turns:
            await self._send(self._turns[-1])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._question is not None:
            self._question.task.cancel()
            await asyncio.gather(self._question.task, return_exceptions=True)

    @property
    def is_waiting(self) -> bool:
        """Whether the agent waits for the user now."""
        if self._question is None:
            return False
        task = self._question.task
        return not task.done() or task.exception() is not None

    @property
    def waited_s(self) -> float:
        """Seconds that the agent has waited for the user."""
        now = time.monotonic() - self._question.since if self._question else 0.0
        return sum(turn.seconds for turn in self._turns) + now

    async def wait(self, seconds: float) -> ExecStatus:
        """Like `Sandbox.wait` for the agent, but it returns at once when the user begins to answer, so that
        the caller can extend the agent's time. It returns too if the user waits for a quota, so that the
        caller can end the agent. Raises: what else stopped the user from answering."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            left = min(POLL_S, max(0.0, end - loop.time()))
            status = await self._sandbox.wait(EXEC_ID, left)
            if status.done:
                was_left = not self._has_watched and await self._said() is not None
                self.is_unanswered = self.is_waiting or was_left
                return status
            self._has_watched = True
            try:
                has_new_question = await self._follow()
            except UserWaitsForQuota:
                self.waits_for_quota = self.is_unanswered = True
                return status
            if has_new_question or loop.time() >= end:
                return status

    async def unanswered(self, status: ExecStatus) -> str:
        """Why an agent that has ended got no answer from the user, if that was not the agent's fault;
        otherwise empty. Raises: GatewayUnavailable."""
        if not self.is_unanswered:
            return ""
        if self._user.model and (reason := await user_model.unanswered(self._job)):
            return f"its user: {reason}"
        return "the user did not answer in time" if status.cause == "timeout" else ""

    async def _follow(self) -> bool:
        """Record a finished answer and start the next. Returns whether an answer was started."""
        if self._question is not None and self._question.task.done():
            question, self._question = self._question, None
            self._turns.append(question.task.result())
        if self._question is not None or (said := await self._said()) is None:
            return False
        self._question = _Question(asyncio.create_task(self._answer(said)), time.monotonic())
        return True

    async def _said(self) -> str | None:
        """What the agent said in the turn that the user has not answered; None if there is none."""
        if self._turns and self._turns[-1].message is None:
            return None
        return await user_messages.ended_turn(self._sandbox, len(self._turns) + 1)

    async def _answer(self, said: str) -> UserTurn:
        async def ask(job: Job) -> UserTurn:
            return await self._made(job, said)

        turn = await self._job.once(name_of(len(self._turns) + 1), UserTurn, ask)
        await self._send(turn)
        return turn

    async def _made(self, job: Job, said: str) -> UserTurn:
        started, number = time.monotonic(), len(self._turns) + 1
        with tracing.span("ask user", {"perdure.user_model": self._user.model}):
            answer = await self._next(said)
        patch = None
        if self._user.grade_turns and answer.message is not None:
            boot = await job.recall("sandbox.json", BootRecord)
            base_git = boot.base_git if boot else None
            patch = await turn_grading.capture(job, self._sandbox, base_git, number)
        return UserTurn(
            turn=number,
            said=said,
            message=answer.message,
            end=answer.end,
            completion=answer.completion,
            patch=patch,
            seconds=round(time.monotonic() - started, 3),
        )

    async def _next(self, said: str) -> Answer:
        sent, user = len(self._turns), self._user
        if sent == user.max_messages:
            return Answer(None, "max_messages")
        if sent < len(user.messages):
            return Answer(user.messages[sent])
        if not user.model:
            return Answer(None, "script")
        return await user_model.next_message(self._job, user, self._turns, said)

    async def _send(self, turn: UserTurn) -> None:
        await user_messages.send(self._sandbox, turn.turn, turn.message)
