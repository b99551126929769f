"""Qwen Code's command line and settings, and how its events are read."""

import json

import pytest

from perdure.agents.qwen_code import MOUNT, NODE, SETTINGS, QwenCode
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options

CONTEXT = "[API Error: 400 This model's maximum context length is 30000 tokens. However, ...]"


def answer(text: str, tokens: int = 9) -> bytes:
    message = {"role": "assistant", "usage": {"output_tokens": tokens}}
    return said(type="assistant", message=message) + said(
        type="result", subtype="success", is_error=False, result=text
    )


def test_it_is_pointed_at_the_gateway_by_its_settings() -> None:
    """A file gives address, key and model, because its commands would inherit variables."""
    launch = QwenCode().launch(TASK)
    settings = json.loads(launch.files[SETTINGS])

    assert settings["security"]["auth"] == {
        "selectedType": "openai",
        "apiKey": TASK.session_key,
        "baseUrl": "http://127.0.0.1:18001/v1",
    }
    assert settings["model"]["name"] == "policy"
    assert not any(name.startswith("OPENAI_") for name in launch.env)


def test_its_settings_send_nothing_elsewhere() -> None:
    """No statistics, telemetry or updates; the rollout's context, answer and time limits."""
    settings = json.loads(QwenCode().launch(TASK).files[SETTINGS])
    generation = settings["model"]["generationConfig"]

    assert settings["privacy"] == {"usageStatisticsEnabled": False}
    assert settings["telemetry"] == {"enabled": False}
    assert settings["general"] == {"enableAutoUpdate": False}
    assert generation["contextWindowSize"] == 50_000
    assert generation["samplingParams"] == {"max_tokens": 2000}
    assert generation["timeout"] > TASK.budget_s * 1000


def test_it_runs_headless_on_its_own_node() -> None:
    """It needs no Node in the image, and approves every action itself."""
    argv = QwenCode().launch(with_options(max_turns=7, extra_args=["--debug"])).argv

    assert argv[4:6] == (f"{NODE}/bin/node", f"{MOUNT}/cli.js")
    assert {"--yolo", "stream-json", "openai"} <= set(argv)
    assert argv[-3:] == ("--max-session-turns", "7", "--debug")


def test_no_turn_limit_is_none() -> None:
    """0 omits its own flag."""
    assert "--max-session-turns" not in QwenCode().launch(with_options(max_turns=0)).argv


@pytest.mark.parametrize(
    ("stdout", "code", "end"),
    [
        (answer("Done."), 0, AgentEnd.FINISHED),
        (answer("Done."), 1, AgentEnd.CRASHED),
        (answer("[API Error: 500 engine away]", 0), 0, AgentEnd.CRASHED),
        (answer(CONTEXT, 0), 0, AgentEnd.LIMIT),
        (answer("[API Error: says the policy itself]"), 0, AgentEnd.FINISHED),
        (said(type="result", is_error=True), 0, AgentEnd.CRASHED),
        (b"", 53, AgentEnd.LIMIT),
        (b"", 0, AgentEnd.CRASHED),
    ],
)
def test_its_end_is_read_from_its_result(stdout: bytes, code: int, end: AgentEnd) -> None:
    """After an API error it exits with 0 without a sampled text: that is not finished."""
    assert QwenCode().classify(ended(stdout, code)) is end
