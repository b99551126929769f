"""Traces of real rollouts: a trainer in its own process, the whole stack, an OTLP collector here."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from perdure.types import RolloutRequest, RunRequest
from tests import loop_agent
from tests.otlp_receiver import Collector, Received, collecting
from tests.stack.gated_engine import TURNS
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE
from tests.stack.running_stack import DEATH_S, Stack, running
from tests.stack.wait_until import until

pytestmark = [
    pytest.mark.temporal,
    pytest.mark.longer,
    pytest.mark.asyncio(loop_scope="module"),
]

HELD = 3
STAGES = ("boot_sandbox", "run_agent", "capture_diff", "grade_in_fresh_sandbox", "emit_episode")

TRAINER = """
import sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from perdure.client.sync_client import Perdure
from perdure.types import RolloutRequest

provider = TracerProvider(resource=Resource.create({"service.name": "trainer"}))
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
request = RolloutRequest.model_validate_json(sys.argv[1])
with trace.get_tracer("trainer").start_as_current_span("step 17"):
    handle = Perdure.connect().start_rollout(request)
print(handle.result().outcome)
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    patch = pytest.MonkeyPatch()
    with collecting() as found:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield found
    patch.undo()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("traces")) as stack:
        yield stack


async def _sent_all(stack: Stack, collector: Collector, workflow_id: str, name: str) -> Received:
    """The span of a workflow that is over; every process has sent what it had."""

    def found() -> Received | None:
        spans = (one for one in collector.named(name))
        return next((s for s in spans if s.attributes["perdure.workflow_id"] == workflow_id), None)

    span: Received = await until(found, f"the span of {workflow_id}")
    for process in (*stack.workers, stack.gateway):
        await process.kill(signal.SIGTERM)
    return span


def _names(collector: Collector, parent: Received) -> list[str]:
    return [one.name for one in collector.below(parent)]


async def _tries(stack: Stack, request: RolloutRequest) -> dict[str, int]:
    """How often each activity was tried, from the history: a busy host may lose a heartbeat."""
    names: dict[int, str] = {}
    tries: dict[str, int] = {}
    for event in (await stack.handle(request).fetch_history()).events:
        if event.HasField("activity_task_scheduled_event_attributes"):
            names[event.event_id] = (
                event.activity_task_scheduled_event_attributes.activity_type.name
            )
        elif event.HasField("activity_task_started_event_attributes"):
            started = event.activity_task_started_event_attributes
            tries[names[started.scheduled_event_id]] = started.attempt
    return tries


async def test_one_trace_tells_where_a_rollouts_time_went(
    stack: Stack, collector: Collector
) -> None:
    """From a trainer's step to each engine call, although a worker died on the way; nothing twice."""
    stack.engine.forget()
    stack.engine.hold(HELD)
    request = stack.request("traced", heartbeat_timeout_s=DEATH_S)
    address = stack.plan.addresses.temporal_address
    assert address is not None
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, request.model_dump_json(exclude_unset=True)],
        env={**os.environ, "TEMPORAL_ADDRESS": address, "PERDURE_HOME": str(stack.home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    await stack.held(request)
    await until(lambda: collector.named("boot_sandbox"), "the first stage is exported")
    await stack.workers[0].kill()
    await stack.start_worker()
    await stack.watched(request, attempt=2)
    stack.engine.let_go()
    told, _ = await asyncio.to_thread(trainer.communicate)
    rollout = await _sent_all(stack, collector, request.workflow_id, "rollout")

    assert told.strip() == "resolved"
    (step,) = collector.named("step 17")
    spans = [one for one in collector.spans if one.trace == step.trace]
    print(collector.tree(step))
    assert Counter(one.id for one in spans).most_common(1)[0][1] == 1  # no span twice
    assert {one.parent for one in spans} - {one.id for one in spans} == {""}  # and no orphan
    assert {one.service for one in spans} == {"trainer", "perdure-worker", "perdure-gateway"}
    assert rollout.parent == step.id
    tries = await _tries(stack, request)
    assert set(tries) >= set(STAGES)
    assert tries["run_agent"] >= 2
    assert Counter(_names(collector, rollout)) == {
        **{f"wait for {stage}": tries[stage] for stage in STAGES},
        **{stage: tries[stage] for stage in STAGES},
        "run_agent": tries["run_agent"] - 1,  # the first try itself died with its worker
        "turn": TURNS,
    }
    stages = {one.name: _names(collector, one) for one in collector.below(rollout)}
    assert stages["boot_sandbox"] == ["prepare environment", "boot sandbox"]
    assert stages["run_agent"] == ["agent command"]
    assert stages["capture_diff"] == ["take diff"]
    assert stages["grade_in_fresh_sandbox"] == ["prepare environment", "boot sandbox", "run tests"]
    for part in collector.below(rollout):
        assert part.start <= part.end <= rollout.end
        if part.name == "turn":
            assert _names(collector, part) == [
                *("make prompt", "wait for an engine", "engine call", "read answer", "write turn"),
            ]
    calls = [one for one in spans if one.name == "engine call"]
    told_engine = {tuple(one.split("-")[1:3]) for one in stack.engine.traceparents if one}
    assert told_engine == {(step.trace, call.id) for call in calls}
    sampled = sum(one.attributes["gen_ai.usage.output_tokens"] for one in calls)
    assert sampled == rollout.attributes["perdure.tokens"] > 0
    assert rollout.attributes["perdure.outcome"] == "resolved"


async def test_a_rollout_of_a_run_has_a_trace_of_its_own(
    stack: Stack, collector: Collector
) -> None:
    """A run's trace stays small: each of its rollouts begins another one and links to the run's."""
    await stack.recover()
    stack.engine.forget()
    rollout = {"agent": loop_agent.NAME, "agent_options": {"mark": stack.mark}}
    request = RunRequest(run_id="run-traced", instances=(INSTANCE,), rollout=rollout)
    await (await stack.perdure.start_run(request)).result()
    run = await _sent_all(stack, collector, "run/run-traced", "run")
    (span,) = (
        one
        for one in collector.named("rollout")
        if one.attributes["perdure.workflow_id"].startswith("rollout/run-traced/")
    )

    assert span.trace != run.trace
    assert span.links == (run.trace,)
    assert len(collector.named("turn")) == 2 * TURNS
