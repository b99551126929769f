"""Running workflows survive an upgrade: committed histories replay on today's code."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from perdure.client import temporal_names
from perdure.client.temporal_client import DATA_CONVERTER
from tests.workflows import record_histories
from workers.workflow_worker import WORKFLOWS, checking_runner

HISTORIES = sorted(record_histories.FOLDER.glob("*.json"))


def history(path: Path) -> WorkflowHistory:
    events = json.loads(path.read_text())["events"]
    own = events[0]["workflowExecutionStartedEventAttributes"]["workflowId"]
    return WorkflowHistory.from_json(own, path.read_text())


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_committed_history_replays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's code makes the same decisions, in the same order, from the same events."""
    if path.stem == "sharded":
        monkeypatch.setattr("workflows.run_workflow.SHARD", record_histories.SHARD_OF_ONE)
    replayer = Replayer(
        workflows=WORKFLOWS,
        workflow_runner=checking_runner(),
        data_converter=DATA_CONVERTER,
        debug_mode=True,  # no deadlock detection: a busy host may stop for two seconds
    )
    result = await replayer.replay_workflow(history(path), raise_on_replay_failure=False)

    assert result.replay_failure is None


def test_every_scenario_is_committed() -> None:
    """There is one file for each scenario of the recorder, and no other file."""
    recorded = {scenario.__name__ for scenario in record_histories.SCENARIOS}

    assert {path.stem for path in HISTORIES} == recorded


@workflow.defn(name=temporal_names.ROLLOUT, sandboxed=False)
class RolloutWithoutBoot:
    """A careless change: the first activity is another one."""

    @workflow.run
    async def run(self, request: Any) -> None:
        limit = timedelta(minutes=1)
        await workflow.execute_activity("run_agent", request, schedule_to_close_timeout=limit)


@pytest.mark.parametrize("name", ["plain", "lost_sandbox"])
async def test_a_changed_workflow_fails_the_replay(name: str) -> None:
    """A workflow with other decisions fails the replay."""
    replayer = Replayer(
        workflows=[RolloutWithoutBoot], data_converter=DATA_CONVERTER, debug_mode=True
    )

    with pytest.raises(NondeterminismError):
        await replayer.replay_workflow(history(record_histories.FOLDER / f"{name}.json"))


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_a_history_does_not_show_where_it_was_recorded(path: Path) -> None:
    """Identities are the recorder's, and no stack trace has paths."""
    text = path.read_text()
    identities = set(re.findall(r'"identity": "([^"]*)"', text))

    assert identities <= {record_histories.IDENTITY, "history-service", "worker-service"}
    assert "stackTrace" not in text
