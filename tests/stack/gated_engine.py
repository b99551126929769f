"""A scripted engine that holds the calls of one turn until a test lets them go."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.scripted_engine import Call, ScriptedEngine
from tests import loop_agent

TURNS = 6
ASSISTANT = tuple(load_tokenizer("qwen3").encode("<|im_start|>assistant\n")[:2])
"""Begins each turn of the policy in a prompt."""
FIX = "sed -i 's/return a - b/return a + b/' calc.py"
IDLE = "echo left as it is"
LEAVE_IT = "Change nothing."
"""In a task: there its agent is idle in place of the fix."""


def commands(turns: int = TURNS, fix: str = FIX) -> list[str]:
    """What an agent does in that many turns: idle commands, then the fix; the last turn is the end."""
    return [*(f"echo {n}" for n in range(turns - 2)), fix]


def script(turns: int = TURNS) -> dict[str, Any]:
    idle = {"match": LEAVE_IT, "turns": _answers(commands(turns, IDLE))}
    return {"scripts": [idle], "default": {"turns": _answers(commands(turns))}}


def _answers(todo: Sequence[str]) -> list[dict[str, Any]]:
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in todo
    ]
    return [*calls, {"content": loop_agent.DONE}]


class HeldEngine(ScriptedEngine):
    """Holds the calls of one turn until a test releases them, so that a rollout stops at a known
    point.

    Held calls are sampled when they are let go, also if no caller waits for them any more: as
    expensive as an engine can be.
    """

    def __init__(self, turns: int = TURNS, **options: Any) -> None:
        super().__init__(script(turns), **options)
        self.turns = turns
        self.calls: deque[Call] = deque()  # all of them
        self.waiting: list[str] = []
        """`<session>-<turn>` of the calls that arrived while their turn was held."""
        self.traceparents: list[str] = []
        """What each call said of its trace; empty if it had none."""
        self._gates: dict[int, asyncio.Event] = {}

    def hold(self, turn: int) -> None:
        self._gates.setdefault(turn, asyncio.Event())

    def let_go(self) -> None:
        for gate in self._gates.values():
            gate.set()
        self._gates.clear()

    def times_sampled(self) -> Counter[str]:
        """How often each `<session>-<turn>` was sampled: what the GPU was asked to do."""
        return Counter(f"{call.session_id}-{turn_of(call.prompt_ids)}" for call in self.calls)

    def forget(self) -> None:
        self.let_go()
        self.reset()
        self.waiting.clear()

    async def _generate(self, request: Request) -> Response:
        self.traceparents.append(request.headers.get("traceparent", ""))
        body = await request.json()  # taken in, so it is sampled even if its caller dies meanwhile
        turn = turn_of(body["token_ids"])
        gate = self._gates.get(turn)
        if gate is not None:
            self.waiting.append(f"{request.headers['x-session-id']}-{turn}")
            await gate.wait()
        return await super()._generate(request)


def turn_of(prompt_ids: Sequence[int]) -> int:
    """How many answers of the policy stand in the prompt: the number of the turn that follows."""
    return sum(pair == ASSISTANT for pair in itertools.pairwise(prompt_ids)) - 1
