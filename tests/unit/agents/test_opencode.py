"""opencode's command line and settings, and how its events are read."""

import json
from dataclasses import replace
from typing import Any

import pytest

from perdure.agents.opencode import CONFIG, KEY, MOUNT, Opencode
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options


def step(reason: str) -> bytes:
    return said(type="step_finish", part={"type": "step-finish", "reason": reason})


def settings(**options: Any) -> Any:
    return json.loads(Opencode().launch(with_options(**options)).files[CONFIG])


def test_its_settings_name_the_gateway_and_the_window() -> None:
    """Only our provider; the key is in a file of its own; no sharing and no updates."""
    found = settings(max_steps=7)
    provider = found["provider"]["perdure"]

    assert provider["options"]["baseURL"] == "http://127.0.0.1:18001/v1"
    assert provider["options"]["apiKey"] == f"{{file:{KEY}}}"
    assert Opencode().launch(TASK).files[KEY] == TASK.session_key.encode()
    assert Opencode().launch(TASK).env.keys() & {KEY, "OPENAI_API_KEY"} == set()
    assert provider["models"]["policy"]["limit"] == {"context": 50_000, "output": 2000}
    assert found["agent"]["build"] == {"steps": 7}
    assert (found["share"], found["autoupdate"]) == ("disabled", False)


def test_it_runs_headless() -> None:
    """It prints events and never asks the model for a title."""
    argv = Opencode().launch(with_options(extra_args=["--thinking"])).argv

    assert argv[4:6] == (f"{MOUNT}/bin/opencode", "run")
    assert {"--format", "json", "--title"} <= set(argv)
    assert argv[-1] == "--thinking"


def test_no_step_limit_is_none() -> None:
    """0 omits its own setting."""
    assert settings(max_steps=0)["agent"]["build"] == {}


@pytest.mark.parametrize(
    ("stdout", "code", "end"),
    [
        (step("tool-calls") + step("stop"), 0, AgentEnd.FINISHED),
        (step("stop"), 1, AgentEnd.CRASHED),
        (step("tool-calls"), 0, AgentEnd.CRASHED),
        (step("length"), 0, AgentEnd.LIMIT),
        (said(type="error", error={"name": "ContextOverflowError"}), 1, AgentEnd.LIMIT),
        (said(type="error", error={"name": "APIError"}), 0, AgentEnd.CRASHED),
        (b"no events", 0, AgentEnd.CRASHED),
    ],
)
def test_its_end_is_read_from_its_events(stdout: bytes, code: int, end: AgentEnd) -> None:
    """A stopped step with exit code 0 is finished; an error never is."""
    assert Opencode().classify(ended(stdout, code)) is end


def test_a_policy_that_calls_tools_for_a_summary_gave_up() -> None:
    """It is the policy's failure, so it is graded."""
    error = {"data": {"message": "Tool call not allowed while generating summary: bash"}}

    assert Opencode().classify(ended(said(type="error", error=error), 1)) is AgentEnd.GAVE_UP


@pytest.mark.parametrize(("steps", "end"), [(2, AgentEnd.LIMIT), (3, AgentEnd.FINISHED)])
def test_its_last_step_is_a_limit(steps: int, end: AgentEnd) -> None:
    """The limit is read from the stored settings file."""
    files = Opencode().launch(with_options(max_steps=steps)).files
    evidence = replace(ended(step("tool-calls") + step("stop")), files=files)

    assert Opencode().classify(evidence) is end


def test_a_spoilt_settings_file_is_no_limit() -> None:
    """The policy can write to the file, so any content is read without an error."""
    for spoilt in (b"", b"\xff", b"[]", b'{"agent": {"build": {"steps": "many"}}}'):
        evidence = replace(ended(step("stop")), files={CONFIG: spoilt})

        assert Opencode().classify(evidence) is AgentEnd.FINISHED


def test_the_prompt_is_not_in_its_settings() -> None:
    """Its settings expand `{env:...}` and `{file:...}`, but an issue with such text is only text."""
    instance = TASK.instance.model_copy(update={"problem_statement": "{env:HOME}"})
    launch = Opencode().launch(replace(TASK, instance=instance))

    assert b"{env:HOME}" not in launch.files[CONFIG]
