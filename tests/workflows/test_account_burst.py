"""An account workflow that continues as new repeatedly during a burst of waiting rollouts."""

from collections import Counter

import pytest
from temporalio.api.history.v1 import History
from temporalio.client import Client

from perdure.client import temporal_names
from perdure.rollouts.admission.permit_rules import AskPermit
from perdure.types import AccountCaps
from tests.stack.wait_until import until
from tests.workflows import dev_server
from workers.workflow_worker import workflow_worker

BURST = 100
ACCOUNT_ID = temporal_names.account_id("service-1")
CAPS = AccountCaps(creates_per_s=100)


async def grants(client: Client, run_id: str) -> tuple[Counter[str], int]:
    """Grants per holder over all runs of the workflow from this one on, and the number of runs."""
    granted: Counter[str] = Counter()
    runs = 0
    while run_id:
        handle = client.get_workflow_handle(ACCOUNT_ID, run_id=run_id)
        events = History(events=(await handle.fetch_history()).events).events
        for event in events:
            sent = event.signal_external_workflow_execution_initiated_event_attributes
            granted[sent.workflow_execution.workflow_id] += bool(sent.signal_name)
        last = events[-1].workflow_execution_continued_as_new_event_attributes
        run_id, runs = last.new_execution_run_id, runs + 1
    return +granted, runs


@pytest.mark.longer
async def test_an_account_workflow_that_continues_as_new_grants_each_rollout_once() -> None:
    """100 rollouts ask while it continues as new every few dozen events: each is granted exactly
    once."""
    often = ("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=60")
    async with dev_server.serving(*often) as client, workflow_worker(client):
        first = ""
        for number in range(BURST):
            asked = AskPermit(holder=f"h{number}", run=f"r{number % 3}", step="1-agent", caps=CAPS)
            handle = await client.start_workflow(
                temporal_names.ACCOUNT,
                id=ACCOUNT_ID,
                task_queue=temporal_names.WORKFLOWS_QUEUE,
                start_signal="ask",
                start_signal_args=[asked],
            )
            first = first or str(handle.first_execution_run_id)

        async def served() -> bool:
            return (await grants(client, first))[0].total() >= BURST

        await until(served, "all are granted")
        granted, runs = await grants(client, first)

    assert (len(granted), set(granted.values())) == (BURST, {1})
    assert runs > 2
