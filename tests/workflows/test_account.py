"""SandboxAccountWorkflow on a real server: permits outlive neither their holders nor their keeper."""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import activities.admission
import workflows.account
from activities.admission import ClosedHolders
from activities.messages import Asked
from perdure.client import names
from perdure.sandboxes.permits import AccountState, Permit, Wish
from perdure.types import AccountCaps
from tests.stack import until
from workers.orchestration import checking_runner, workflow_worker

ACCOUNT_ID = names.account_id("service-1")
ONE = AccountCaps(live=1)


@workflow.defn
class Holder:
    """Stays open, and hears what it is granted."""

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal(name=names.GRANTED)
    def granted(self, step: str) -> None:
        return None


@pytest.fixture
async def holders(client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sequence[str]]:
    """Two workflows that stay open."""
    monkeypatch.setattr(workflows.account, "CHECK_EVERY_S", 0.2)
    async with (
        workflow_worker(client, checking_runner()),
        Worker(client, task_queue=names.IO_QUEUE, activities=[ClosedHolders().closed]),
        Worker(
            client,
            task_queue="holders",
            workflows=[Holder],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ),
    ):
        for name in ("a", "b"):
            await client.start_workflow(Holder.run, id=name, task_queue="holders")
        yield ("a", "b")


async def ask(client: Client, holder: str) -> None:
    await client.start_workflow(
        names.ACCOUNT,
        id=ACCOUNT_ID,
        task_queue=names.WORKFLOWS_QUEUE,
        start_signal="ask",
        start_signal_args=[Asked(holder=holder, run="r", step="1-agent", caps=ONE)],
    )


async def holding(client: Client, holder: str) -> None:
    """Wait until it is the only one that holds a permit."""
    handle: WorkflowHandle[object, object] = client.get_workflow_handle(ACCOUNT_ID)

    async def only_it() -> bool:
        state = await handle.query("state", result_type=AccountState)
        return list(state.permits) == [holder]

    await until(only_it, f"{holder} holds the permit")


async def granted(client: Client, holder: str) -> bool:
    history = await client.get_workflow_handle(holder).fetch_history()
    signals = [event.workflow_execution_signaled_event_attributes for event in history.events]
    return any(signal.signal_name == names.GRANTED for signal in signals)


async def test_a_terminated_holders_permit_goes_to_the_next(
    client: Client, holders: Sequence[str]
) -> None:
    """Whoever is killed without a word holds nothing up: the one that waits is granted instead."""
    first, second = holders
    await ask(client, first)
    await holding(client, first)
    await ask(client, second)
    await client.get_workflow_handle(first).terminate()
    await holding(client, second)

    assert await granted(client, second)


async def test_a_permit_that_is_given_back_goes_to_the_next(
    client: Client, holders: Sequence[str]
) -> None:
    """Released after its sandbox was killed, a slot is granted again at once."""
    first, second = holders
    await ask(client, first)
    await ask(client, second)
    await holding(client, first)
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert (await granted(client, first), await granted(client, second)) == (True, True)


async def test_a_keeper_outlives_no_holder_that_ended_without_a_word(
    client: Client, holders: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits, and the only holder was terminated: after a silence the keeper ends too."""
    monkeypatch.setattr(workflows.account, "IDLE", timedelta(seconds=0.3))
    first, _ = holders
    await ask(client, first)
    await holding(client, first)
    await client.get_workflow_handle(first).terminate()

    assert await client.get_workflow_handle(ACCOUNT_ID).result() is None


async def test_a_keeper_goes_on_where_nobody_can_look_up_its_holders(
    client: Client, holders: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that fails costs no permit: the slot that is given back goes to who waits."""
    looked: list[str] = []

    async def fail(workflow_id: str) -> bool:
        looked.append(workflow_id)
        raise ApplicationError("the server is away", non_retryable=True)

    monkeypatch.setattr(activities.admission, "is_open", fail)
    first, second = holders
    await ask(client, first)
    await holding(client, first)
    await ask(client, second)
    await until(lambda: looked, "the holders were looked up")
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert await granted(client, second)


async def test_a_keeper_that_starts_anew_goes_on_where_the_last_one_ended(
    client: Client, holders: Sequence[str]
) -> None:
    """Continued as new: who held still holds, who waited is granted when the slot comes back."""
    first, second = holders
    state = AccountState(
        caps=ONE,
        waiting=(Wish(holder=second, run="r", step="1-agent", order=1),),
        permits={first: Permit(run="r", step="1-agent", starting=False)},
        asked=1,
    )
    await client.start_workflow(
        names.ACCOUNT, state, id=ACCOUNT_ID, task_queue=names.WORKFLOWS_QUEUE
    )
    await holding(client, first)
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert await granted(client, second)
