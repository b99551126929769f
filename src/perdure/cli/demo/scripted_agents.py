"""The scripted policy of the demo: the model's turns for each instance."""

import base64
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perdure.settings.settings_tree import Settings
from perdure.types import Instance, Outcome

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

Turns = list[dict[str, Any]]
Plan = Callable[[Instance], Turns]


def write(settings: Settings, policy: dict[str, Any]) -> Path:
    """Write a policy into the home, for a scripted engine."""
    path = settings.home.absolute() / "run" / "demo-policy.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(policy, indent=1))
    return path


def policy(instances: Sequence[Instance]) -> dict[str, Any]:
    """A policy that solves the smallest instance, fails the next one and gives up on the largest."""
    return _policy(instances, (_solves, _misses, _gives_up))


def long_policy(instances: Sequence[Instance], looks: int) -> dict[str, Any]:
    """A policy that looks at `looks` files first. It fails the second smallest instance and solves
    the others."""

    def after_looks(plan: Plan) -> Plan:
        return lambda instance: [*map(_looks, range(1, looks + 1)), *plan(instance)]

    return _policy(instances, tuple(map(after_looks, (_solves, _misses, _solves))))


def right_outcomes(instances: Sequence[Instance]) -> dict[str, Outcome]:
    """The outcome that `long_policy` deserves, by instance id."""
    outcomes = (Outcome.RESOLVED, Outcome.UNRESOLVED, Outcome.RESOLVED)
    return {
        instance.instance_id: outcomes[index % len(outcomes)]
        for index, instance in enumerate(_by_size(instances))
    }


def _policy(instances: Sequence[Instance], plans: Sequence[Plan]) -> dict[str, Any]:
    return {
        "scripts": [
            {"match": _opening(instance), "turns": plans[index % len(plans)](instance)}
            for index, instance in enumerate(_by_size(instances))
        ]
    }


def _by_size(instances: Sequence[Instance]) -> list[Instance]:
    return sorted(instances, key=lambda instance: len(instance.gold_patch))


def _opening(instance: Instance) -> str:
    """Text that only this instance's prompt contains."""
    return instance.problem_statement.splitlines()[0]


def _looks(number: int) -> dict[str, Any]:
    command = f"git ls-files | sed -n {number}p | xargs head -n 5"
    return _bash(f"I read the start of file {number}.", command)


def _solves(instance: Instance) -> Turns:
    packed = base64.b64encode(gzip.compress(instance.gold_patch, mtime=0)).decode()
    return [
        _bash("I look around first.", "git log --oneline | head -3 && ls"),
        _bash("I see the defect and fix it.", f"echo {packed} | base64 -d | gunzip | git apply"),
        _bash("I check what I changed.", "git diff --stat"),
        _bash("That is the fix.", SUBMIT),
    ]


def _misses(instance: Instance) -> Turns:
    changed = re.search(rb"^\+\+\+ b/(\S+)", instance.gold_patch, re.MULTILINE)
    file = changed.group(1).decode("utf-8", "replace") if changed else "README"
    return [
        _bash("I look around first.", "git log --oneline | head -3 && ls"),
        _bash("I leave a note where it goes wrong.", f"echo '# TODO: look here' >> '{file}'"),
        _bash("Good enough.", SUBMIT),
    ]


def _gives_up(instance: Instance) -> Turns:
    return [
        _bash("I look around first.", "ls"),
        _bash("This is beyond me; I submit nothing.", SUBMIT),
    ]


def _bash(thought: str, command: str) -> dict[str, Any]:
    call = {"name": "bash", "arguments": {"command": command}}
    return {"content": thought, "tool_calls": [call]}
