"""Gemini CLI's command line, settings and environment, and how its events are read."""

import json
import subprocess
from pathlib import Path

import pytest

from perdure.agents.gemini_cli import (
    COMMAND_ENV,
    EXPERIMENTS,
    MOUNT,
    NODE,
    REQUEST_TIMEOUT_FLAG,
    SETTINGS,
    GeminiCli,
)
from perdure.errors import ConfigurationError
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options

CONTEXT = {"message": "[API Error: The input token count (9) exceeds the maximum number of tokens"}


def test_its_commands_do_not_inherit_the_gateway(tmp_path: Path) -> None:
    """Address, key and header are variables, which bash unsets before each command."""
    launch = GeminiCli().launch(TASK)
    sourced = tmp_path / "env.sh"
    sourced.write_bytes(launch.files[COMMAND_ENV])
    env = {**launch.env, "BASH_ENV": str(sourced), "PATH": "/usr/bin:/bin"}

    command = ["bash", "-c", "env"]
    inherited = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    assert launch.env["GEMINI_API_KEY"] == TASK.session_key
    assert launch.env["GOOGLE_GEMINI_BASE_URL"] == TASK.gateway_url
    assert "HOME=" in inherited
    assert not any(secret in inherited for secret in (TASK.session_key, "18001", "BASH_ENV"))
    assert not any(mark in inherited for mark in TASK.headers.values())


def test_its_settings_send_nothing_elsewhere() -> None:
    """No statistics, telemetry, updates or web tools, and no endpoint that a repository's .env names; the
    rollout's answer and time limits."""
    files = GeminiCli().launch(TASK).files
    settings = json.loads(files[SETTINGS])
    (override,) = settings["modelConfigs"]["customOverrides"]
    (flag,) = json.loads(files[EXPERIMENTS])["flags"]

    assert settings["privacy"] == {"usageStatisticsEnabled": False}
    assert settings["telemetry"] == {"enabled": False}
    assert settings["general"]["enableAutoUpdate"] is False
    assert settings["advanced"] == {"ignoreLocalEnv": True}
    assert settings["tools"]["exclude"] == ["google_web_search", "web_fetch"]
    assert override["match"] == {"model": "policy"}
    assert override["modelConfig"]["generateContentConfig"] == {"maxOutputTokens": 2000}
    assert (flag["flagId"], int(flag["intValue"])) == (REQUEST_TIMEOUT_FLAG, 61)


def test_it_runs_headless_on_its_own_node() -> None:
    """It needs no Node in the image, and approves every action itself."""
    argv = GeminiCli().launch(with_options(extra_args=["--debug"])).argv

    assert argv[4:6] == (f"{NODE}/bin/node", f"{MOUNT}/bundle/gemini.js")
    assert {"--yolo", "stream-json", "policy"} <= set(argv)
    assert argv[-1] == "--debug"


@pytest.mark.parametrize(("chosen", "written"), [(7, 7), (0, -1)])
def test_the_turn_limit_is_its_own(chosen: int, written: int) -> None:
    """0 is no limit, which it writes as -1."""
    launch = GeminiCli().launch(with_options(max_turns=chosen))

    assert json.loads(launch.files[SETTINGS])["model"]["maxSessionTurns"] == written


def test_a_context_window_is_refused() -> None:
    """Gemini CLI has no such option, so it would have no effect."""
    with pytest.raises(ConfigurationError, match=r"context_window.*sampling\.max_context_tokens"):
        GeminiCli().launch(with_options(context_window=30_000))


@pytest.mark.parametrize(
    ("stdout", "code", "end"),
    [
        (said(type="result", status="success"), 0, AgentEnd.FINISHED),
        (said(type="result", status="success"), 1, AgentEnd.CRASHED),
        (said(type="result", status="error", error=CONTEXT), 144, AgentEnd.LIMIT),
        (said(type="result", status="error", error={"message": "503"}), 247, AgentEnd.CRASHED),
        (said(type="result", status="error"), 0, AgentEnd.CRASHED),
        (b"", 53, AgentEnd.LIMIT),
        (b"", 0, AgentEnd.CRASHED),
    ],
)
def test_its_end_is_read_from_its_result(stdout: bytes, code: int, end: AgentEnd) -> None:
    """An answer without text ends it with exit code 0 and an error, which does not count as
    finished."""
    assert GeminiCli().classify(ended(stdout, code)) is end
