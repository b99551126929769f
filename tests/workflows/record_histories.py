"""Write the histories that `test_replay.py` replays: `python -m tests.workflows.record_histories`,
followed by names of scenarios to record only those.

Real workflows on a real server, stand-in activities. Until the first tag, record them again after a
change of the workflows' decisions. From then on workflows that run must survive an upgrade: guard
the change with `workflow.patched`, keep the old histories, and add one.
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError, TemporalError
from temporalio.worker import Worker

from activities.activity_decorator import GRACE
from perdure.client import temporal_names
from perdure.client.sdk import Perdure
from perdure.rollouts.activity_messages import (
    HOST_LOST,
    AgentRun,
    Booted,
    CalibrationRow,
    Captured,
    Conclusion,
    Page,
    PageRequest,
    PreparedRun,
    RolloutAgain,
    RowToConclude,
    RowTwins,
    Term,
)
from perdure.rollouts.admission.permit_rules import Account, AskPermit
from perdure.types import (
    AccountCaps,
    AgentEnd,
    CalibrationRequest,
    GroupRequest,
    PlayAgain,
    RolloutRequest,
    RunRequest,
)
from tests.workflows import dev_server
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import checking_runner, workflow_worker

FOLDER = Path(__file__).parent / "histories"
HOST = "host-1"
IDENTITY = "recorder"
SHARD_OF_ONE = 1
"""Instances. `sharded` is recorded and replayed with shards of this size."""
ROLLOUT = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop", heartbeat_timeout_s=2)

Handle = WorkflowHandle[Any, Any]


async def plain(client: Client, stages: Stages) -> Handle:
    async def here(_: Any) -> Booted:
        return Booted(uri="file:///x", attempt=1, host=HOST)

    stages.override["boot_sandbox"] = here
    return (await Perdure(client).start_rollout(ROLLOUT)).handle


async def without_verdict(client: Client, stages: Stages) -> Handle:
    """The rollout fails as a workflow, and its run ends."""

    async def silent(_: Any) -> AgentRun:
        return AgentRun(end=AgentEnd.NEVER_CALLED_MODEL, detail="exited 1")

    stages.override["run_agent"] = silent
    return (await Perdure(client).start_rollout(ROLLOUT)).handle


async def lost_sandbox(client: Client, stages: Stages) -> Handle:
    async def lose_the_first(attempt: Any) -> AgentRun:
        if attempt.attempt == 1:
            raise ApplicationError("gone", "sandbox", type="SandboxLost", non_retryable=True)
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    stages.override["run_agent"] = lose_the_first
    return (await Perdure(client).start_rollout(ROLLOUT)).handle


async def lost_host(client: Client, stages: Stages) -> Handle:
    """The host of attempt 1 is lost, so its cleanup goes to another host."""

    async def boot(attempt: Any) -> Booted:
        return Booted(host=HOST if attempt.attempt == 1 else None)

    async def lose_the_first(attempt: Any) -> AgentRun:
        if attempt.attempt == 1:
            details = "sandbox", HOST_LOST
            raise ApplicationError("gone", *details, type="SandboxLost", non_retryable=True)
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    stages.override |= {"boot_sandbox": boot, "run_agent": lose_the_first}
    return (await Perdure(client).start_rollout(ROLLOUT)).handle


async def host(client: Client, stages: Stages) -> Handle:
    """A host is lost and comes back, while the worker that answers for it shuts down."""
    serving, standing, evicted = asyncio.Event(), asyncio.Event(), False

    async def serve(term: Any) -> None:
        if term.number:
            serving.set()
            await _beat_for_ever()

    async def stand_in(_: Any) -> None:
        nonlocal evicted
        if not evicted:
            evicted = True
            raise ApplicationError("stop", type="WorkerEvicted", non_retryable=True)
        standing.set()
        await _beat_for_ever()

    async def begin(_: Any) -> None:
        await standing.wait()

    stages.override |= {"serve_term": serve, "stand_in": stand_in, "begin_anew": begin}
    handle = await client.start_workflow(
        temporal_names.HOST,
        Term(host=HOST, silent_s=72),
        id=temporal_names.host_id(HOST),
        task_queue=temporal_names.WORKFLOWS_QUEUE,
    )
    await serving.wait()
    await handle.cancel()
    return handle


async def evictions(client: Client, stages: Stages) -> Handle:
    left = {"run_agent": 2, "grade_in_fresh_sandbox": 1}

    def evict(name: str) -> Callable[[Any], Awaitable[Any]]:
        async def stage(_: Any) -> Any:
            left[name] -= 1
            if left[name] == 0:
                del stages.override[name]
            raise ApplicationError("stop", type="WorkerEvicted", non_retryable=True)

        return stage

    stages.override |= {name: evict(name) for name in left}
    return (await Perdure(client).start_rollout(ROLLOUT)).handle


async def cancelled(client: Client, stages: Stages) -> Handle:
    """The rollout is cancelled while its agent runs."""
    running = _forever(stages, "run_agent")
    handle = (await Perdure(client).start_rollout(ROLLOUT)).handle
    await running.wait()
    await handle.cancel()
    return handle


async def cancelled_in_boot(client: Client, stages: Stages) -> Handle:
    """The rollout is cancelled while it boots, and the boot still succeeds."""
    booting, told = asyncio.Event(), asyncio.Event()

    async def boot(_: Any) -> Booted:
        booting.set()
        await told.wait()
        return Booted(attempt=1)

    stages.override["boot_sandbox"] = boot
    handle = (await Perdure(client).start_rollout(ROLLOUT)).handle
    await booting.wait()
    await handle.cancel()
    told.set()
    return handle


async def group(client: Client, stages: Stages) -> Handle:
    """Three samples, a quorum of two: the third is a straggler and is cancelled."""

    async def slow_third(attempt: Any) -> AgentRun:
        if attempt.request.sample_index == 2:
            await _beat_for_ever()
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    stages.override["run_agent"] = slow_third
    request = GroupRequest(rollout=ROLLOUT, n_samples=3, quorum=2)
    return (await Perdure(client).start_group(request)).handle


async def run(client: Client, stages: Stages) -> Handle:
    """Two instances, one after the other."""
    stages.instances = ("toy/add-1", "toy/add-2")
    request = RunRequest(
        run_id="r1",
        dataset="toy",
        concurrency=1,
        rollout={"agent": "nop", "heartbeat_timeout_s": 2},
    )
    return (await Perdure(client).start_run(request)).handle


async def samples(client: Client, stages: Stages) -> Handle:
    """Two samples of an instance without a quorum, one at a time. The first has no verdict."""

    async def first_is_silent(attempt: Any) -> AgentRun:
        silent = attempt.request.sample_index == 0
        return AgentRun(end=AgentEnd.NEVER_CALLED_MODEL if silent else AgentEnd.FINISHED)

    stages.override["run_agent"] = first_is_silent
    stages.instances = ("toy/add-1",)
    request = RunRequest(
        run_id="r1",
        dataset="toy",
        n_samples=2,
        concurrency=1,
        rollout={"agent": "nop", "heartbeat_timeout_s": 2},
    )
    return (await Perdure(client).start_run(request)).handle


async def played_again(client: Client, stages: Stages) -> Handle:
    """A run that grades two of its rollouts again."""
    listed = tuple(
        RolloutAgain(instance="toy/add-1", sample_index=sample, round=1) for sample in (0, 3)
    )

    async def prepare(_: RunRequest) -> PreparedRun:
        return PreparedRun(total=len(listed))

    async def page(_: PageRequest) -> Page:
        return Page(instances=(), again=listed)

    stages.override |= {"prepare_run": prepare, "load_page": page}
    request = RunRequest(
        run_id="r1",
        dataset="toy",
        n_samples=4,
        concurrency=1,
        rollout={"agent": "nop", "heartbeat_timeout_s": 2},
        again=PlayAgain(round=1, start_at="grade"),
    )
    return (await Perdure(client).play_again(request)).handle


async def sharded(client: Client, stages: Stages) -> Handle:
    """Two shards of `SHARD_OF_ONE`: the first ends, the second is terminated while its agent
    runs."""
    stages.instances = ("toy/add-1", "toy/add-2")
    running = asyncio.Event()

    async def second_never(attempt: Any) -> AgentRun:
        if attempt.request.instance == "toy/add-2":
            running.set()
            await _beat_for_ever()
        return AgentRun(end=AgentEnd.FINISHED, turns=4)

    stages.override["run_agent"] = second_never
    request = RunRequest(run_id="r1", dataset="toy", rollout={"agent": "nop"})
    with mock.patch("workflows.run_workflow.SHARD", SHARD_OF_ONE):
        handle = (await Perdure(client).start_run(request)).handle
        await running.wait()
        await client.get_workflow_handle(f"{request.workflow_id}/shard/1").terminate()
        with contextlib.suppress(TemporalError):
            await handle.result()
    return handle


async def parked(client: Client, stages: Stages) -> Handle:
    """The quota of the model account is exhausted before the boot, and resets."""
    resets_at = time.time() + 1.0

    async def boot(_: Any) -> Booted:
        if time.time() < resets_at:
            return Booted(uri="file:///x", resets_at=resets_at, reason="answered 429")
        return Booted(uri="file:///x", attempt=1)

    stages.override["boot_sandbox"] = boot
    return (await Perdure(client).start_rollout(ROLLOUT)).handle


async def queued(client: Client, stages: Stages) -> Handle:
    """The rollout asks the account again after a refusal, and the account grants both sandboxes."""
    permits = 0

    async def boot(attempt: Any) -> Booted:
        nonlocal permits
        permits += bool(attempt.permit)
        return Booted(uri="file:///x") if permits == 2 else Booted(waits_for="1-agent")

    async def capture(_: Any) -> Captured:
        return Captured(size=10, files=1, empty=False, waits_for="1-grade")

    stages.override |= {"boot_sandbox": boot, "capture_diff": capture}
    handle = (await Perdure(client).start_rollout(ROLLOUT)).handle
    for step, after in (("1-agent", 1), ("1-agent", 2), ("1-grade", 5)):
        while len(stages.calls) < after:
            await asyncio.sleep(0.1)
        await handle.signal(temporal_names.GRANTED, step)
    return handle


async def account(client: Client, stages: Stages) -> Handle:
    """One rollout gets a permit and releases it. The request of a missing workflow is dropped."""
    rollout = (await Perdure(client).start_rollout(ROLLOUT)).handle
    caps = AccountCaps(live=2, creates_per_s=10)
    handle: Handle | None = None
    for holder in (rollout.id, "missing"):
        asked = AskPermit(holder=holder, run="r1", step="1-agent", caps=caps)
        handle = await client.start_workflow(
            temporal_names.ACCOUNT,
            id=temporal_names.account_id("service"),
            task_queue=temporal_names.WORKFLOWS_QUEUE,
            start_signal="ask",
            start_signal_args=[asked],
        )
    assert handle is not None
    await handle.signal("started", rollout.id)
    await handle.signal("release", rollout.id)
    while (found := await handle.query("state", result_type=Account)).permits or found.waiting:
        await asyncio.sleep(0.1)
    await handle.cancel()
    return handle


async def calibration(client: Client, stages: Stages) -> Handle:
    """Three rows: one has a record, one is quarantined, one gets twins from a second worker."""
    stages.rows = tuple(
        CalibrationRow(instance=f"toy/add-{number}", key=f"k{number}", state=state)
        for number, state in enumerate(("proved", "", ""))
    )

    async def conclude(asked: RowToConclude) -> Conclusion:
        if asked.row.key == "k1":
            return Conclusion(state="quarantined", reason="`patch` does not resolve it")
        return Conclusion(state="proved", may_have_twins=True)

    async def evict(_: Any) -> RowTwins:
        del stages.override["choose_twins"]
        raise ApplicationError("stop", type="WorkerEvicted", non_retryable=True)

    stages.override |= {"conclude_calibration": conclude, "choose_twins": evict}
    rollout: dict[str, Any] = {"heartbeat_timeout_s": 2}
    request = CalibrationRequest(dataset="toy", runs=1, concurrency=3, rollout=rollout)
    return (await Perdure(client).start_calibration(request)).handle


SCENARIOS = (
    *(
        plain,
        without_verdict,
        lost_sandbox,
        lost_host,
        host,
        evictions,
        cancelled,
        cancelled_in_boot,
        queued,
        parked,
    ),
    *(group, run, samples, played_again, sharded, account, calibration),
)


def _forever(stages: Stages, name: str) -> asyncio.Event:
    running = asyncio.Event()

    async def stage(_: Any) -> None:
        running.set()
        await _beat_for_ever()

    stages.override[name] = stage
    return running


async def _beat_for_ever() -> None:
    from temporalio import activity

    while True:
        activity.heartbeat()
        await asyncio.sleep(0.1)


async def record(scenario: Callable[[Client, Stages], Awaitable[Handle]]) -> str:
    """Run one scenario on its own server. Returns its history as JSON."""
    async with dev_server.serving(identity=IDENTITY) as client:
        stages = Stages()
        queues = (
            *(
                temporal_names.BOOT_QUEUE,
                temporal_names.AGENT_QUEUE,
                temporal_names.GRADE_QUEUE,
                temporal_names.IO_QUEUE,
            ),
            *(temporal_names.LOST_HOSTS_QUEUE, temporal_names.life_queue(HOST)),
        )
        async with AsyncExitStack() as workers:
            for queue in (
                *queues,
                temporal_names.host_queue(HOST),
                temporal_names.upkeep_queue(HOST),
            ):
                worker = Worker(
                    client,
                    task_queue=queue,
                    activities=stages.activities(),
                    graceful_shutdown_timeout=GRACE,
                )
                await workers.enter_async_context(worker)
            await workers.enter_async_context(workflow_worker(client, checking_runner()))
            handle = await scenario(client, stages)
            with contextlib.suppress(TemporalError):  # a cancelled one has no result
                await handle.result()
            return (await handle.fetch_history()).to_json()


def without_stacks(value: Any) -> Any:
    """Remove stack traces, which name files of this machine and which a replay does not read."""
    if isinstance(value, dict):
        return {k: without_stacks(v) for k, v in value.items() if k != "stackTrace"}
    return [without_stacks(item) for item in value] if isinstance(value, list) else value


async def main(*only: str) -> None:
    """`only`: names of the scenarios to record; if empty, all."""
    FOLDER.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        if only and scenario.__name__ not in only:
            continue
        history = without_stacks(json.loads(await record(scenario)))
        path = FOLDER / f"{scenario.__name__}.json"
        path.write_text(json.dumps(history, indent=1) + "\n")
        print(path.name, len(history["events"]), "events")


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the failures are intended
    asyncio.run(main(*sys.argv[1:]))
