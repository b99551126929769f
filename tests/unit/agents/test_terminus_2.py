"""Terminus 2's settings, and how its last line is read."""

import json

import pytest

from perdure.agents.terminus_2 import KEY, MOUNT, SETTINGS, Terminus2
from perdure.errors import ConfigurationError
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options


def end(how: str) -> bytes:
    return said(kind="perdure_end", ended=how, error="")


def test_its_settings_name_the_gateway_and_the_window() -> None:
    """Our address, the rollout's limits, and a timeout longer than the budget; the key only in the
    environment, because it writes its settings into the trajectory."""
    launch = Terminus2().launch(with_options(max_turns=7, parser="xml"))
    settings = json.loads(launch.files[SETTINGS])
    model, call = settings["model_info"], settings["llm_call_kwargs"]

    assert launch.argv[4:6] == (f"{MOUNT}/bin/python", "-I")
    assert settings["model_name"] == "openai/policy"
    assert settings["api_base"] == "http://127.0.0.1:18001/v1"
    assert (model["max_input_tokens"], call["max_tokens"]) == (50_000, 2000)
    assert call["timeout"] > TASK.budget_s
    assert call["extra_headers"] == TASK.headers
    assert (settings["max_turns"], settings["parser_name"]) == (7, "xml")
    assert launch.env[KEY] == TASK.session_key
    assert TASK.session_key.encode() not in launch.files[SETTINGS]


def test_flags_are_refused() -> None:
    """It is a class without a command line."""
    with pytest.raises(ConfigurationError, match=r"agent_options\.extra_args: terminus_2 has no"):
        Terminus2().launch(with_options(extra_args="--verbose"))


@pytest.mark.parametrize(
    ("stdout", "code", "expected"),
    [
        (end("complete"), 0, AgentEnd.FINISHED),
        (end("max_turns"), 0, AgentEnd.LIMIT),
        (end("shell_left"), 0, AgentEnd.GAVE_UP),
        (end(""), 0, AgentEnd.CRASHED),
        (end("complete"), 1, AgentEnd.CRASHED),
        (b'{"kind": "perdure_end", "ended": ["complete"]}\n', 0, AgentEnd.CRASHED),
        (b"", 0, AgentEnd.CRASHED),
    ],
)
def test_its_end_is_read_from_its_last_line(stdout: bytes, code: int, expected: AgentEnd) -> None:
    """Only a confirmed completion is finished; an exception of its own is a crash."""
    assert Terminus2().classify(ended(stdout, code)) is expected
