"""SandboxAccountWorkflow on a real server: permits outlive neither their holders nor their keeper."""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import activities.this_try
import workflows.account
from activities.account_holders import ClosedHolders
from perdure.client import names
from perdure.rollouts.messages import Asked, ReadyPermit, Taken
from perdure.sandboxes.permits import AccountState, Permit, PermitRequest
from perdure.types import AccountCaps
from tests.stack.waiting import until
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


class Standing:
    """Sandboxes that stand ready, and a service that ends them."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    @activity.defn(name="end_ready")
    async def end(self, permits: Sequence[ReadyPermit]) -> list[str]:
        self.ended += [permit.holder for permit in permits]
        return [permit.holder for permit in permits]


@pytest.fixture
def standing() -> Standing:
    return Standing()


@pytest.fixture
async def holders(
    client: Client, standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sequence[str]]:
    """Two workflows that stay open."""
    monkeypatch.setattr(workflows.account, "CHECK_EVERY_S", 0.2)
    async with (
        workflow_worker(client, checking_runner()),
        Worker(
            client, task_queue=names.IO_QUEUE, activities=[ClosedHolders().closed, standing.end]
        ),
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
        try:
            state = await handle.query("state", result_type=AccountState)
        except RPCError:  # no worker answered in time
            return False
        return list(state.permits) == [holder]

    await until(only_it, f"{holder} holds the permit")


async def granted(client: Client, holder: str) -> bool:
    """True, once it has been told: a moment after the keeper has noted its permit."""

    async def told() -> bool:
        history = await client.get_workflow_handle(holder).fetch_history()
        signals = [event.workflow_execution_signaled_event_attributes for event in history.events]
        return any(signal.signal_name == names.GRANTED for signal in signals)

    return bool(await until(told, f"{holder} is granted its permit"))


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

    monkeypatch.setattr(activities.this_try, "is_open", fail)
    first, second = holders
    await ask(client, first)
    await holding(client, first)
    await ask(client, second)
    await until(lambda: looked, "the holders were looked up")
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert await granted(client, second)


async def test_a_sandbox_booted_ahead_gives_way_to_who_waits(
    client: Client, holders: Sequence[str], standing: Standing
) -> None:
    """It holds the account's only slot; the rollout that asks gets it when that one is ended."""
    first, second = holders
    keeper = client.get_workflow_handle(ACCOUNT_ID)
    ready = ReadyPermit(holder="ready/p-1", provider="e2b")
    await ask(client, first)
    await holding(client, first)
    await keeper.signal("release", first)
    await keeper.execute_update("reserve", ready)
    await keeper.signal("ahead_started", ready)
    with pytest.raises(WorkflowUpdateFailedError):
        await keeper.execute_update("reserve", ReadyPermit(holder="ready/p-2", provider="e2b"))
    await ask(client, second)
    await holding(client, second)

    assert (standing.ended, await granted(client, second)) == (["ready/p-1"], True)


async def test_a_sandbox_booted_ahead_takes_its_permit_along(
    client: Client, holders: Sequence[str]
) -> None:
    """Whoever takes it holds its slot, without having asked; and gives it back like any other."""
    first, second = holders
    keeper = client.get_workflow_handle(ACCOUNT_ID)
    ready = ReadyPermit(holder="ready/p-1", provider="e2b")
    await ask(client, first)
    await holding(client, first)
    await keeper.signal("release", first)
    await keeper.execute_update("reserve", ready)
    await keeper.signal("ahead_started", ready)
    taken = Taken(ready=ready.holder, holder=first, run="r", step="1-agent")
    await keeper.signal("taken", taken)
    await holding(client, first)
    await ask(client, second)
    await keeper.signal("release", first)
    await holding(client, second)

    assert await granted(client, second)


async def test_a_keeper_that_starts_anew_goes_on_where_the_last_one_ended(
    client: Client, holders: Sequence[str]
) -> None:
    """Continued as new: who held still holds, who waited is granted when the slot comes back."""
    first, second = holders
    state = AccountState(
        caps=ONE,
        waiting=(PermitRequest(holder=second, run="r", step="1-agent", order=1),),
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
