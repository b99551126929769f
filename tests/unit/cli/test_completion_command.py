"""`perdure watch --notify`: a command of the user's hears how a run ended."""

from pathlib import Path

import pytest

from perdure.cli.runs.completion_command import run_completion_command


async def test_the_command_hears_the_run_and_its_end(tmp_path: Path) -> None:
    """Text of a run is data for it, and never a part of its words."""
    heard = tmp_path / "heard"

    await run_completion_command(f'echo "$RUN_ID: $RUN_TEXT" > {heard}', "r", "$(false) done")

    assert heard.read_text() == "r: $(false) done\n"


async def test_a_command_that_fails_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The run has its result, whoever heard of it."""
    await run_completion_command("exit 3", "r", "done")

    assert capsys.readouterr().err == "warning: --notify ended with exit code 3: exit 3\n"
