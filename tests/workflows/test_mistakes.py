"""Mistakes that only a server can tell: a run that does not exist, for every command that takes one."""

import asyncio
from pathlib import Path

import pytest
from temporalio.client import Client

from perdure.cli.main import invoke

COMMANDS = ("status r", "watch r", "pause r", "resume r", "resize r 3", "cancel r")


@pytest.mark.parametrize("line", COMMANDS)
async def test_an_unknown_run_is_one_line(
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
) -> None:
    """It names the run and the command that lists those there are."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("TEMPORAL_ADDRESS", client.service_client.config.target_host)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", client.namespace)

    code = await asyncio.to_thread(invoke, line.split())

    told = capsys.readouterr().err.strip()
    assert code == 1
    assert told == "error: run 'r' does not exist: `perdure status` lists the runs"
