"""A worker whose slots come from Python and whose activities send heartbeats without pause.

Runs as its own process, because temporalio before 1.31 can lock it up for ever: a heartbeat held
the interpreter's lock and waited for the SDK's map of activities, while the start of another
activity held that map and waited for the interpreter (temporalio/sdk-python#1642).
"""

import asyncio
import sys
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import (
    CustomSlotSupplier,
    FixedSizeSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
    UnsandboxedWorkflowRunner,
    Worker,
    WorkerTuner,
)

ACTIVITIES, BEATS, QUEUE = 100, 100, "heartbeating"


class Slots(CustomSlotSupplier):
    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        return SlotPermit()

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        return SlotPermit()

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        pass

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        pass


@activity.defn
async def beat() -> None:
    for number in range(BEATS):
        activity.heartbeat(number)
        await asyncio.sleep(0)


@workflow.defn
class Beats:
    @workflow.run
    async def run(self) -> int:
        limit = timedelta(minutes=2)
        done = [
            workflow.execute_activity(beat, start_to_close_timeout=limit, heartbeat_timeout=limit)
            for _ in range(ACTIVITIES)
        ]
        return len(await asyncio.gather(*done))


async def main(address: str, namespace: str) -> None:
    client = await Client.connect(address, namespace=namespace)
    tuner = WorkerTuner.create_composite(
        workflow_supplier=FixedSizeSlotSupplier(10),
        activity_supplier=Slots(),
        local_activity_supplier=FixedSizeSlotSupplier(10),
        nexus_supplier=FixedSizeSlotSupplier(10),
    )
    async with Worker(
        client,
        task_queue=QUEUE,
        workflows=[Beats],
        activities=[beat],
        tuner=tuner,
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        print(await client.execute_workflow(Beats.run, id=QUEUE, task_queue=QUEUE))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
