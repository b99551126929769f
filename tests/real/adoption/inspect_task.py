"""Runs inside Inspect's own Python: samples with every end, by a mock model and without a sandbox."""

# mypy: ignore-errors
# Inspect is importable only in its own environment.

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import Generate, TaskState, solver

DIFF = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


@solver
def scripted():
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.input_text == "break":
            raise ConnectionError("the API did not answer")
        if state.input_text == "fix, unscored":
            state.store.set("model_patch", DIFF)
        return state

    return solve


@scorer(metrics=[accuracy()])
def tests_pass():
    async def score(state: TaskState, target: Target) -> Score:
        if state.input_text == "fix, unscored":
            return Score.unscored()
        return Score(
            value="C" if state.input_text == "fix" else "I", metadata={"model_patch": DIFF}
        )

    return score


@task
def calc():
    says = {"toy-0000": "fix", "toy-0001": "nothing", "toy-0002": "break"}
    says["toy-0003"] = "fix, unscored"
    dataset = [Sample(input=text, id=name) for name, text in says.items()]
    return Task(dataset=dataset, solver=scripted(), scorer=tests_pass())
