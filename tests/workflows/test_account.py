"""SandboxAccountWorkflow on a real server: every permit is released, and none is granted twice."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import activities.activity_context
import workflows.account_workflow
from activities.activity_decorator import GRACE
from activities.sweep_activities import SweepActivities
from perdure.client import temporal_names
from perdure.rollouts.admission.permit_rules import Account, AskPermit, Permit, PermitRequest
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.sandbox_reaper import Owner
from perdure.settings.settings_tree import Settings
from perdure.types import AccountCaps
from tests.stack.wait_until import until
from workers.workflow_worker import checking_runner, workflow_worker

ACCOUNT_ID = temporal_names.account_id("service-1")
ONE = AccountCaps(live=1)


@workflow.defn
class Holder:
    """A workflow that stays open and receives grants."""

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal(name=temporal_names.GRANTED)
    def granted(self, step: str) -> None:
        return None


@pytest.fixture
async def holders(client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sequence[str]]:
    """Two workflows that stay open."""
    monkeypatch.setattr(workflows.account_workflow, "CHECK_EVERY_S", 0.2)
    leftovers = SweepActivities(Services(Settings()))
    async with (
        workflow_worker(client, checking_runner()),
        Worker(
            client,
            task_queue=temporal_names.IO_QUEUE,
            activities=[leftovers.closed_holders],
            graceful_shutdown_timeout=GRACE,
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
        temporal_names.ACCOUNT,
        id=ACCOUNT_ID,
        task_queue=temporal_names.WORKFLOWS_QUEUE,
        start_signal="ask",
        start_signal_args=[AskPermit(holder=holder, run="r", step="1-agent", caps=ONE)],
    )


async def holding(client: Client, holder: str) -> None:
    """Wait until `holder` is the only holder of a permit."""
    handle: WorkflowHandle[object, object] = client.get_workflow_handle(ACCOUNT_ID)

    async def only_it() -> bool:
        try:
            state = await handle.query("state", result_type=Account)
        except RPCError:  # no worker answered in time
            return False
        return list(state.permits) == [holder]

    await until(only_it, f"{holder} holds the permit")


async def granted(client: Client, holder: str) -> bool:
    """Whether the grant has reached the rollout, a moment after the account has recorded its
    permit."""

    async def arrived() -> bool:
        history = await client.get_workflow_handle(holder).fetch_history()
        signals = [event.workflow_execution_signaled_event_attributes for event in history.events]
        return any(signal.signal_name == temporal_names.GRANTED for signal in signals)

    return bool(await until(arrived, f"{holder} is granted its permit"))


async def test_a_terminated_holders_permit_goes_to_the_next(
    client: Client, holders: Sequence[str]
) -> None:
    """A terminated workflow cannot release its permit, so the waiting rollout is granted it."""
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
    """A permit that is released after its sandbox was killed is granted again at once."""
    first, second = holders
    await ask(client, first)
    await ask(client, second)
    await holding(client, first)
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert (await granted(client, first), await granted(client, second)) == (True, True)


async def test_an_account_workflow_ends_after_its_only_holder_was_terminated(
    client: Client, holders: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no rollout waits and the only holder was terminated, the account workflow ends when
    idle."""
    monkeypatch.setattr(workflows.account_workflow, "IDLE", timedelta(seconds=0.3))
    first, _ = holders
    await ask(client, first)
    await holding(client, first)
    await client.get_workflow_handle(first).terminate()

    assert await client.get_workflow_handle(ACCOUNT_ID).result() is None


async def test_an_account_workflow_continues_if_its_holders_cannot_be_looked_up(
    client: Client, holders: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed lookup revokes no permit, and a released permit goes to the waiting rollout."""
    looked: list[str] = []

    async def fail(_: Client, workflow_id: str) -> Owner:
        looked.append(workflow_id)
        raise ApplicationError("the server is away", non_retryable=True)

    monkeypatch.setattr(activities.activity_context, "fetch_owner_state", fail)
    first, second = holders
    await ask(client, first)
    await holding(client, first)
    await ask(client, second)
    await until(lambda: looked, "the holders were looked up")
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert await granted(client, second)


async def test_an_account_goes_on_after_its_activity_was_completed_by_hand_with_anything(
    client: Client, holders: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid result counts as no answer, and a released permit goes to the waiting rollout."""
    tokens: list[bytes] = []

    async def by_hand(_: Client, workflow_id: str) -> Owner:
        tokens.append(activity.info().task_token)
        await asyncio.Event().wait()
        return Owner.ALIVE

    monkeypatch.setattr(activities.activity_context, "fetch_owner_state", by_hand)
    first, second = holders
    await ask(client, first)
    await holding(client, first)
    await ask(client, second)
    await until(lambda: tokens, "the holders are looked up")
    await client.get_async_activity_handle(task_token=tokens[0]).complete("done")
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert await granted(client, second)


async def test_an_account_workflow_that_continues_as_new_keeps_its_state(
    client: Client, holders: Sequence[str]
) -> None:
    """Holders keep their permits, and a rollout that waited is granted the next released one."""
    first, second = holders
    now = time.time()
    account = Account(
        caps=ONE,
        waiting={second: PermitRequest(holder=second, run="r", step="1-agent", order=1)},
        permits={first: Permit(run="r", step="1-agent", starting=False)},
        asked=1,
        filled_at=now,
        checked_at=now,
    )
    await client.start_workflow(
        temporal_names.ACCOUNT, account, id=ACCOUNT_ID, task_queue=temporal_names.WORKFLOWS_QUEUE
    )
    await holding(client, first)
    await client.get_workflow_handle(ACCOUNT_ID).signal("release", first)
    await holding(client, second)

    assert await granted(client, second)
