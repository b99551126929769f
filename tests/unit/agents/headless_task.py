"""A task for headless agents, and the output of such an agent."""

import json
from dataclasses import replace
from typing import Any

from perdure.agents.base import AgentTask, Evidence
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.types import Instance, Sampling, Source, SourceKind

TASK = AgentTask(
    instance=Instance(
        instance_id="calc-1",
        dataset="tests",
        problem_statement="add() subtracts",
        source=Source(kind=SourceKind.DIRECTORY),
        gold_patch=b"diff --git a/x b/x\n",
    ),
    workdir="/testbed",
    gateway_url="http://127.0.0.1:18001",
    session_key="session.secret",
    model="policy",
    sampling=Sampling(max_context_tokens=50_000, max_tokens_per_turn=2000),
    budget_s=60.0,
)


def ended(stdout: bytes, code: int = 0, turns: int = 3) -> Evidence:
    return Evidence(ExecStatus(ExecState.EXITED, code=code), stdout, b"", {}, turns)


def said(**event: Any) -> bytes:
    return json.dumps(event).encode() + b"\n"


def with_options(**options: Any) -> AgentTask:
    return replace(TASK, options=options)
