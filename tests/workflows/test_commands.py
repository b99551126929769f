"""Commands on a user's own server: what they print at the end of a run, and whom they notify."""

import asyncio
from pathlib import Path

import pytest
from temporalio.client import Client

from perdure.cli.main import invoke
from perdure.instances import instance_catalog
from perdure.settings.settings_loader import load_settings
from perdure.storage.store_url import open_store
from perdure.types import Grading, Instance, Source, SourceKind
from tests.workflows.scripted_stages import Stages

ADD = Instance(
    instance_id="add-1",
    dataset="toy",
    problem_statement="It is broken.",
    source=Source(kind=SourceKind.DIRECTORY, path="/nowhere"),
    grading=Grading(protocol="eval_cmd", eval_cmd="true", timeout_s=60),
)


@pytest.mark.parametrize("command", ["run toy -a nop --run-id r1", "eval toy -a nop --run-id r1"])
async def test_the_end_of_a_run_is_told_with_links(
    client: Client,
    stages: Stages,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """The `--notify` command gets run and counts. The viewer's page and the failures are printed,
    also by `status`."""
    heard = tmp_path / "heard"
    for name, value in {
        "PERDURE_HOME": str(tmp_path),
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": client.namespace,
        "PERDURE_TEMPORAL__UI_URL": "http://ui",
        "PERDURE_TEMPORAL__VIEWER_URL": "http://viewer/",
    }.items():
        monkeypatch.setenv(name, value)
    await instance_catalog.save(open_store(load_settings()), ADD)
    stages.instances = ("toy/add-1",)
    notify = f'echo "$RUN_ID: $RUN_TEXT" > {heard}'

    code = await asyncio.to_thread(invoke, [*command.split(), "--notify", notify])
    ended = capsys.readouterr()
    await asyncio.to_thread(invoke, ["status", "r1"])
    status = capsys.readouterr().out

    assert code in (0, 1), ended.err  # the stand-ins leave no episode to report
    assert heard.read_text().startswith("r1: ")
    assert "Viewer: http://viewer/runs/r1" in ended.err
    assert "Viewer    http://viewer/runs/r1" in ended.out
    assert "Viewer    http://viewer/runs/r1" in status
    assert f"http://ui/namespaces/{client.namespace}/workflows/run%2Fr1" in status
