"""Runs inside Inspect's own Python: the common job for Inspect's `react` agent with a bash tool."""

# mypy: ignore-errors
# Inspect is importable only in its own environment.

import bench_sandbox  # noqa: F401 -- registers the sandbox
from inspect_ai import Task, task
from inspect_ai.agent import AgentState, react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState
from inspect_ai.tool import Tool, tool
from inspect_ai.util import sandbox

from benchmarks import common_job


@tool
def bash() -> Tool:
    async def execute(command: str) -> str:
        """Execute a bash command.

        Args:
            command: The command.
        """
        done = await sandbox().exec(["bash", "-c", command])
        return done.stdout + done.stderr

    return execute


async def goes_on(state: AgentState) -> bool:
    """False once a command has printed the line that submits."""
    return not state.messages[-1].text.startswith(common_job.DONE)


@scorer(metrics=[accuracy()])
def hidden_test():
    async def score(state: TaskState, target: Target) -> Score:
        box = sandbox()
        patch = (await box.exec(["git", "diff"])).stdout
        await box.write_file("test_calc.py", common_job.TEST)
        done = await box.exec([common_job.PYTHON, "test_calc.py"])
        return Score(value=CORRECT if done.success else INCORRECT, metadata={"model_patch": patch})

    return score


@task
def calc(rollouts: int) -> Task:
    names = common_job.instance_ids(rollouts)
    agent = react(
        prompt="You are a helpful assistant that can use a shell.",
        tools=[bash()],
        submit=False,
        on_continue=goes_on,
    )
    return Task(
        dataset=[Sample(input=common_job.STATEMENT, id=name) for name in names],
        solver=agent,
        scorer=hidden_test(),
        sandbox="bench-bwrap",
    )
