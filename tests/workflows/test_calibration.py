"""CalibrationWorkflow on a real server."""

import asyncio
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from perdure.client.sdk import Perdure
from perdure.rollouts.activity_messages import (
    WORKER_EVICTED,
    AgentRun,
    Attempt,
    CalibrationRow,
    Conclusion,
    RowToConclude,
    RowTwins,
)
from perdure.types import AgentEnd, CalibrationRequest
from tests.workflows.scripted_stages import Stages

ASKED = CalibrationRequest(dataset="mine", runs=2, concurrency=3)


def rows(count: int, state: str = "") -> tuple[CalibrationRow, ...]:
    return tuple(
        CalibrationRow(instance=f"mine/a-{number}", key=f"k{number}", state=state)
        for number in range(count)
    )


def played(stages: Stages) -> list[tuple[str, str, int]]:
    requests = [ending.request for ending in stages.endings]
    return sorted((one.instance_id, one.agent, one.sample_index) for one in requests)


async def test_gold_and_base_of_each_row_are_rollouts(client: Client, stages: Stages) -> None:
    """Two rows with two runs make eight rollouts within the concurrency, and one conclusion per
    row."""
    running: set[str] = set()
    most = 0

    async def agent(attempt: Attempt) -> AgentRun:
        nonlocal most
        running.add(attempt.request.workflow_id)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.discard(attempt.request.workflow_id)
        return AgentRun(end=AgentEnd.FINISHED)

    stages.override["run_agent"] = agent
    stages.rows = rows(2)
    handle = await Perdure(client).start_calibration(ASKED.model_copy(update={"concurrency": 1}))

    await handle.result()

    agents = ("nop", "oracle")
    assert played(stages) == [(f"a-{r}", a, k) for r in range(2) for a in agents for k in range(2)]
    assert most == 1
    assert stages.names().count("conclude_calibration") == 2


async def test_a_row_with_a_record_is_not_played_again(client: Client, stages: Stages) -> None:
    """A calibration that is started again continues with the rows that have no record."""
    stages.rows = (*rows(3, "quarantined")[:2], rows(3)[2])
    handle = await Perdure(client).start_calibration(ASKED)

    await handle.result()

    assert {instance for instance, _, _ in played(stages)} == {"a-2"}
    assert (await handle.progress()).by_outcome == {"quarantined": 2, "proved": 1}


async def test_a_row_without_a_conclusion_is_counted(client: Client, stages: Stages) -> None:
    """If a row's rollouts fail for another reason than the row, nothing is proved, and the row is
    counted."""

    async def nothing(_: Any) -> Conclusion:
        return Conclusion(reason="the sandbox was lost")

    stages.override["conclude_calibration"] = nothing
    stages.rows = rows(1)
    handle = await Perdure(client).start_calibration(ASKED)

    await handle.result()

    assert (await handle.progress()).by_outcome == {"undecided": 1}


async def test_many_rows_go_on_in_a_new_history(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a long history, the workflow continues as new and keeps its counts."""
    monkeypatch.setattr("workflows.calibration_workflow.PAGE", 2)
    monkeypatch.setattr("workflows.calibration_workflow.MOST_EVENTS", 1)
    stages.rows = rows(5, "proved")
    handle = await Perdure(client).start_calibration(ASKED)

    await handle.result()

    progress = await handle.progress()
    assert (progress.by_outcome, progress.total) == ({"proved": 5}, 5)
    assert stages.names().count("prepare_calibration") == 1
    assert stages.names().count("load_calibration_rows") == 5


async def test_a_slow_row_holds_no_other(
    client: Client, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All later rows are concluded on while a slow row runs, whatever the number of pages."""
    monkeypatch.setattr("workflows.calibration_workflow.PAGE", 1)
    others_are_done = asyncio.Event()
    concluded: list[str] = []

    async def agent(attempt: Attempt) -> AgentRun:
        if attempt.request.instance_id == "a-0":
            await others_are_done.wait()
        return AgentRun(end=AgentEnd.FINISHED)

    async def conclude(row: RowToConclude) -> Conclusion:
        concluded.append(row.row.instance)
        if len(concluded) == 3:
            others_are_done.set()
        return Conclusion(state="proved")

    stages.override |= {"run_agent": agent, "conclude_calibration": conclude}
    stages.rows = rows(4)
    rollout = {"heartbeat_timeout_s": 300.0}
    changes = {"runs": 1, "concurrency": 3, "rollout": rollout}
    handle = await Perdure(client).start_calibration(ASKED.model_copy(update=changes))

    await handle.result()

    assert sorted(concluded[:3]) == ["mine/a-1", "mine/a-2", "mine/a-3"]
    assert concluded[3] == "mine/a-0"


async def test_a_failure_that_needs_a_person_ends_it(client: Client, stages: Stages) -> None:
    """A missing program would fail every row, so the calibration stops and says why."""

    async def refuse(_: Any) -> Any:
        raise ApplicationError("no bwrap", "sandbox", type="MissingDependency", non_retryable=True)

    stages.override["boot_sandbox"] = refuse
    stages.rows = rows(5)
    handle = await Perdure(client).start_calibration(ASKED.model_copy(update={"concurrency": 1}))

    summary = await handle.result()

    assert (summary["attention"], len(played(stages))) == ("no bwrap", 1)
    assert "conclude_calibration" not in stages.names()


@pytest.mark.parametrize("name", ["choose_twins", "conclude_calibration", "report_calibration"])
async def test_work_of_a_worker_that_is_told_to_stop_is_done_by_another(
    name: str, client: Client, stages: Stages
) -> None:
    """A deploy in the middle costs a row neither its conclusion nor its twins."""

    async def proved(_: Any) -> Conclusion:
        return Conclusion(state="proved", may_have_twins=True)

    async def evicted(_: Any) -> Any:
        stages.override = {"conclude_calibration": proved}  # the next try
        raise ApplicationError("stop", type=WORKER_EVICTED, non_retryable=True)

    stages.override = {"conclude_calibration": proved, name: evicted}
    stages.rows = rows(1)
    handle = await Perdure(client).start_calibration(ASKED)

    await handle.result()

    assert (await handle.progress()).by_outcome == {"proved": 1}
    assert stages.names().count(name) == 2


async def test_progress_tells_the_rows_and_whose_twins_are_chosen(
    client: Client, stages: Stages
) -> None:
    """While twins are chosen, no rollout runs, but the status shows the work."""
    chosen, seen = asyncio.Event(), asyncio.Event()

    async def proved(_: Any) -> Conclusion:
        return Conclusion(state="proved", may_have_twins=True)

    async def choose(_: Any) -> RowTwins:
        chosen.set()
        await seen.wait()
        return RowTwins(tests=1)

    stages.override |= {"conclude_calibration": proved, "choose_twins": choose}
    stages.rows = (*rows(2, "proved")[:1], rows(2)[1])
    handle = await Perdure(client).start_calibration(ASKED)
    await chosen.wait()

    progress = await handle.progress()
    seen.set()

    assert (progress.done, progress.total, progress.running) == (1, 2, 0)
    assert progress.by_status == {"choosing twins": 1}
    await handle.result()


async def test_a_proved_row_gets_twins_and_one_without_is_still_proved(
    client: Client, stages: Stages
) -> None:
    """Twins are chosen after the lists are proved. A failure to choose them affects no other
    row."""

    async def proved(row: RowToConclude) -> Conclusion:
        return Conclusion(state="proved", may_have_twins=True)

    async def fail(row: RowToConclude) -> RowTwins:
        if row.row.instance == "mine/a-0":
            raise ApplicationError(
                "gold fails", "instance", type="InstanceError", non_retryable=True
            )
        return RowTwins(tests=1)

    stages.override |= {"conclude_calibration": proved, "choose_twins": fail}
    stages.rows = rows(2)
    handle = await Perdure(client).start_calibration(ASKED)

    await handle.result()

    assert (await handle.progress()).by_outcome == {"proved": 2}
    assert stages.names().count("choose_twins") == 2
