"""Mistakes that only a server can detect, such as an unknown run, for every command that takes
one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from perdure.cli.main import invoke
from perdure.client import temporal_client
from perdure.client.episode_reader import read_episodes
from perdure.client.sdk import Perdure
from perdure.episodes.episode import AttemptSummary, EpisodeParts
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.store_url import open_store
from perdure.types import RolloutRequest, RolloutStatus, RunRequest
from tests.stored_episodes import store_episode

COMMANDS = ("status r", "watch r", "pause r", "resume r", "resize r 3", "cancel r")


@pytest.mark.parametrize("line", COMMANDS)
async def test_an_unknown_run_is_one_line(
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
) -> None:
    """The message names the run and the command that lists the existing runs."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("TEMPORAL_ADDRESS", client.service_client.config.target_host)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", client.namespace)

    code = await asyncio.to_thread(invoke, line.split())

    told = capsys.readouterr().err.strip()
    assert code == 1
    assert told == "error: run 'r' does not exist: `perdure status` lists the runs"


async def test_a_run_that_temporal_has_forgotten_is_shown_from_the_store(
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Temporal may forget a run, by retention or with a new database. Rollouts with an episode
    still count."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.setenv("TEMPORAL_ADDRESS", client.service_client.config.target_host)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", client.namespace)
    store = open_store(Settings(home=tmp_path))
    run = RunRequest(run_id="r", instances=("toy/a",), n_samples=3)
    await store.put(
        store_keys.run("r"), json.dumps({"request": run.model_dump(mode="json")}).encode()
    )
    await store.put(store_keys.run_instances("r"), b'["toy/a"]')
    parts = EpisodeParts(
        request=RolloutRequest(run_id="r", instance="toy/a"),
        status=RolloutStatus.FAILED,
        started_at=1000.0,
        finished_at=1060.0,
        attempts=(AttemptSummary(attempt=1),),
    )
    await store_episode(store, parts)

    code = await asyncio.to_thread(invoke, ["status", "r"])
    told = capsys.readouterr().out
    await asyncio.to_thread(invoke, ["status", "r", "--json"])
    document = json.loads(capsys.readouterr().out)

    assert code == 0
    assert "r: 1 done, 0 running, 2 waiting of 3 · failed 1 (in the store only)\n" in told
    assert "Temporal does not know this run" in told
    assert (document["state"], document["by_status"]) == ("in the store only", {"failed": 1})


async def test_a_namespace_that_is_not_there_is_one_line(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes when the connection is made, not with the first call."""
    monkeypatch.setattr(temporal_client, "NAMESPACE_PATIENCE_S", 0.0)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "elsewhere")
    address = client.service_client.config.target_host

    with pytest.raises(ConfigurationError, match=r"has no namespace 'elsewhere': set TEMPORAL_NAM"):
        await Perdure.connect(address, settings=Settings(home=tmp_path))


async def test_a_misspelt_field_of_a_runs_rollouts_is_named_at_the_start(client: Client) -> None:
    """Not by `result()`, after the workflow has failed."""
    run = RunRequest(run_id="r", instances=("toy/a",), rollout={"agnet": "oracle"})

    with pytest.raises(ConfigurationError, match="agnet"):
        await Perdure(client).start_run(run)


async def test_what_is_no_request_is_named(client: Client) -> None:
    """A dict is the likely mistake, and the message says how to convert it."""
    perdure, nothing = Perdure(client), dict[str, Any]()
    starts: list[Any] = [perdure.start_group, perdure.start_rollout, perdure.start_run]

    for start, name in zip(starts, ("GroupRequest", "RolloutRequest", "RunRequest"), strict=True):
        with pytest.raises(ConfigurationError, match=rf"give a {name}, not a dict: {name}.model_v"):
            await start(nothing)
    with pytest.raises(ConfigurationError, match=r"read_episodes takes EpisodeRefs, .* not 'x'"):
        await read_episodes(["x"])  # type: ignore[list-item]  # the mistake
