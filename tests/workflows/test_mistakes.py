"""Mistakes that only a server can tell: a run that does not exist, for every command that takes one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from perdure.cli.main import invoke
from perdure.client import connection
from perdure.client.api import Perdure
from perdure.client.episodes import read_episodes
from perdure.errors import ConfigurationError
from perdure.settings.tree import Settings

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


async def test_a_namespace_that_is_not_there_is_one_line(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told when the connection is made, not as an error of the first call."""
    monkeypatch.setattr(connection, "NAMESPACE_PATIENCE_S", 0.0)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "elsewhere")
    address = client.service_client.config.target_host

    with pytest.raises(ConfigurationError, match=r"has no namespace 'elsewhere': set TEMPORAL_NAM"):
        await Perdure.connect(address, settings=Settings(home=tmp_path))


async def test_what_is_no_request_is_named(client: Client) -> None:
    """A dict is the likely mistake, and the message says how to make a request of it."""
    perdure, nothing = Perdure(client), dict[str, Any]()
    starts: list[Any] = [perdure.start_group, perdure.start_rollout, perdure.start_run]

    for start, name in zip(starts, ("GroupRequest", "RolloutRequest", "RunRequest"), strict=True):
        with pytest.raises(ConfigurationError, match=rf"give a {name}, not a dict: {name}.model_v"):
            await start(nothing)
    with pytest.raises(ConfigurationError, match=r"read_episodes takes EpisodeRefs, .* not 'x'"):
        await read_episodes(["x"])  # type: ignore[list-item]  # the mistake
