"""`perdure status --stuck` on a real server: which rollouts it names, why, and what would help."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import ApplicationError

from perdure.cli.main import invoke
from perdure.cli.runs import stage_bounds, stuck_rollouts
from perdure.cli.runs.stage_bounds import Bound, StageBounds
from perdure.cli.runs.stuck_rollouts import StuckRollout, StuckRollouts, find
from perdure.client import rollout_listing, search_attribute_keys, temporal_names
from perdure.client.sdk import Perdure
from perdure.episodes.episode import EpisodeParts
from perdure.errors import NoResult
from perdure.rollouts.activity_messages import AgentRun, Booted, Ending
from perdure.settings.settings_loader import load_settings
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.storage.store_url import open_store
from perdure.types import EpisodeRef, RolloutRequest, RolloutStatus, RunRequest
from tests.stack.wait_until import until
from tests.stored_episodes import store_episode
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import checking_runner, workflow_worker

WHY = "the provider answers 503 to every create"
ENDED = {WorkflowExecutionStatus.COMPLETED, WorkflowExecutionStatus.FAILED}
SOON = timedelta(milliseconds=1)
Stage = Callable[[Any], Awaitable[Any]]


def _request(sample: int = 0, run_id: str = "r1") -> RolloutRequest:
    return RolloutRequest(run_id=run_id, instance="toy/a", agent="nop", sample_index=sample)


def _failing(kind: str, *, message: str = WHY, is_final: bool = False) -> Stage:
    async def stage(_: Any) -> Any:
        raise ApplicationError(
            message, "sandbox", type=kind, non_retryable=is_final, next_retry_delay=SOON
        )

    return stage


async def _first(client: Client, step: str, store: LocalStore | None = None) -> StuckRollout:
    """The one stuck rollout, once the server lists it as stuck in this step."""

    async def stuck() -> list[StuckRollout]:
        return [one for one in (await find(client, store, "r1")).stuck if one.step == step]

    (one,) = await until(stuck, f"a rollout is stuck in {step}")
    assert isinstance(one, StuckRollout)
    return one


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that no worker takes counts as stuck at once."""
    monkeypatch.setattr(stuck_rollouts, "UNTAKEN_S", 0.0)


async def test_a_step_that_fails_again_and_again_is_stuck(client: Client, stages: Stages) -> None:
    """The list has the number of the try, the last error's sentence, and what its type asks for."""
    stages.override["boot_sandbox"] = _failing("ControlPlaneError")
    began = time.time()
    await Perdure(client).start_rollout(_request())

    one = await _first(client, "boot_sandbox")

    assert one.reason.why == f"ControlPlaneError: {WHY}"
    assert "provider's status page" in one.reason.helps
    assert one.tries > 5
    assert one.seconds <= time.time() - began


async def test_a_step_that_failed_twice_is_not_stuck(client: Client, stages: Stages) -> None:
    """A transient error is not worth waking anybody."""
    gate, tries = Gate(), iter(range(100))

    async def agent(attempt: Any) -> AgentRun:
        if next(tries) < 2:
            raise ApplicationError(WHY, type="GatewayUnavailable", next_retry_delay=SOON)
        return await gate.agent(attempt)

    stages.override["run_agent"] = agent
    handle = await Perdure(client).start_rollout(_request())
    await gate.until_running(1)
    found = await _find_listed(client, 1)
    gate.open.set()
    await handle.result()

    assert (found.stuck, found.checked, found.open) == ([], 1, 1)


async def _find_listed(client: Client, count: int) -> StuckRollouts:
    async def listed() -> bool:
        return await rollout_listing.count_open(client, "r1") == count

    await until(listed, "the server lists them")
    return await find(client, None, "r1")


@pytest.mark.usefixtures("impatient")
async def test_a_step_that_no_worker_takes_is_stuck(client: Client, stages: Stages) -> None:
    """The host of the sandbox is silent: the list names its queue and the host."""

    async def boot(_: Any) -> Booted:
        return Booted(host="host-9", uri="file:///x")

    stages.override["boot_sandbox"] = boot
    await Perdure(client).start_rollout(_request())

    one = await _first(client, "run_agent")

    assert one.reason.why == "no worker takes it from the queue agent-runs@host-9"
    assert one.reason.helps == "start the workers of host-9 again, with its home"


@pytest.mark.usefixtures("impatient")
async def test_a_workflow_that_no_worker_takes_is_stuck(client: Client) -> None:
    """Without any worker, the list says which role to start."""
    await Perdure(client).start_rollout(_request())

    one = await _first(client, temporal_names.ROLLOUT)

    assert one.reason.helps == "start workers of the role workflows"


@pytest.mark.usefixtures("impatient")
async def test_a_wait_for_a_seat_is_stuck_only_if_nothing_holds_one(client: Client) -> None:
    """A boot waits behind rollouts with a seat, as it should. Without them, no worker boots."""
    async with workflow_worker(client, checking_runner()):
        await Perdure(client).start_rollout(_request())
        one = await _first(client, "boot_sandbox")
        holder = _request(run_id="r2")
        known = [*search_attribute_keys.of_rollout(holder).search_attributes]
        at_work = SearchAttributePair(search_attribute_keys.STAGE, "agent")
        await client.start_workflow(
            temporal_names.ROLLOUT,
            id=holder.workflow_id,
            task_queue="nothing-polls-this",
            search_attributes=TypedSearchAttributes([*known[:-1], at_work]),
        )

        async def waits() -> bool:
            return not (await find(client, None, "r1")).stuck

        await until(waits, "it waits for a seat")

    assert one.reason.helps == "start workers of the roles boot and agent"


async def test_a_step_slower_than_p95_of_its_run_is_stuck(
    client: Client, stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound comes from the ended rollouts of the run, and the sentence says from how many."""
    monkeypatch.setattr(stage_bounds, "LEAST_S", 0.0)
    store, gate = LocalStore(tmp_path), Gate()
    await _ended(client, stages, store, seconds=[0.001] * 12)
    stages.override["run_agent"] = gate.agent
    handle = await Perdure(client).start_rollout(_request(sample=99))
    await gate.until_running(1)

    one = await _first(client, "run_agent", store)
    gate.open.set()
    await handle.result()

    assert one.reason.why == "longer than 0:00, p95 of 12 rollouts"
    assert one.reason.helps.startswith("nothing has failed")


async def test_a_young_run_borrows_the_bound_of_all_runs(
    client: Client, stages: Stages, tmp_path: Path
) -> None:
    """With fewer than ten ended rollouts anywhere, the bound is a fixed one."""
    store = LocalStore(tmp_path)
    await _ended(client, stages, store, seconds=[100.0] * 9, run_id="old")
    few = await StageBounds.read(client, store, ["old", "new"])
    await _ended(client, stages, store, seconds=[*[100.0] * 9, 300.0, 900.0], run_id="more")
    enough = await StageBounds.read(client, store, ["new", "more"])

    assert few.of("new", "run_agent") == Bound(3600.0)
    assert enough.of("more", "run_agent") == Bound(900.0, 11)
    assert enough.of("new", "run_agent") == Bound(300.0, 20)
    assert enough.of("new", "emit_episode") == Bound(600.0)


async def _ended(
    client: Client, stages: Stages, store: LocalStore, *, seconds: list[float], run_id: str = "r1"
) -> None:
    """Rollouts whose agents took these seconds, by their episodes."""

    async def emit(ending: Ending) -> EpisodeRef:
        request = ending.request
        spent = {"agent": seconds[request.sample_index]}
        parts = EpisodeParts(request, RolloutStatus.CANCELLED, 0.0, 1.0, stage_seconds=spent)
        episode = await store_episode(store, parts)
        return episode.ref(store.url)

    stages.override["emit_episode"] = emit
    perdure = Perdure(client)
    handles = [await perdure.start_rollout(_request(n, run_id)) for n in range(len(seconds))]
    await asyncio.gather(*(handle.result() for handle in handles))
    del stages.override["emit_episode"]

    async def listed() -> bool:
        return len(await rollout_listing.newest_completed(client, run_id, 99)) == len(seconds)

    await until(listed, "the server lists the ended ones")


@pytest.fixture
def command(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Awaitable[int]]:
    """`perdure` on this server."""
    for name, value in {
        "PERDURE_HOME": str(tmp_path),
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": client.namespace,
        "PERDURE_TEMPORAL__UI_URL": "http://ui",
    }.items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> Awaitable[int]:
        return asyncio.to_thread(invoke, list(words))

    return run


async def test_the_command_names_each_with_a_link(
    client: Client,
    stages: Stages,
    command: Callable[..., Awaitable[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One block for one problem; as JSON, one entry for each rollout."""
    stages.override["boot_sandbox"] = _failing("ControlPlaneError")
    for sample in (0, 1):
        await Perdure(client).start_rollout(_request(sample))

    async def both() -> bool:
        return len((await find(client, None, "r1")).stuck) == 2

    await until(both, "both are stuck")
    capsys.readouterr()
    await command("status", "--stuck")
    told = capsys.readouterr().out
    await command("status", "--stuck", "r1", "--json")
    document = json.loads(capsys.readouterr().out)

    assert told.startswith("2 of 2 open rollouts stuck\n\nboot_sandbox, 2 rollouts: check the ")
    link = f"http://ui/namespaces/{client.namespace}/workflows/rollout%2Fr1%2Fa%2F1"
    assert told.count(WHY) == 2
    assert link in told
    assert {one["why"] for one in document["stuck"]} == {f"ControlPlaneError: {WHY}"}


async def test_a_misspelt_run_has_no_stuck_rollouts_and_no_other(
    client: Client, command: Callable[..., Awaitable[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused, where "none is stuck" would be believed."""
    code = await command("status", "--stuck", "no-such-run")

    assert code == 1
    assert "no-such-run" in capsys.readouterr().err


async def test_status_tells_why_runs_and_rollouts_failed(
    client: Client,
    stages: Stages,
    command: Callable[..., Awaitable[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run's line has its date, its model, and its reason. Rollouts that failed alike share one
    line."""
    stages.instances = ("toy/a", "toy/b")
    stages.override["boot_sandbox"] = _failing("AgentError", is_final=True)
    perdure = Perdure(client)
    await (await perdure.start_run(_run("bad"))).result()
    refused = _failing("Refused", message="no dataset 'toy'", is_final=True)
    stages.override["prepare_run"] = refused
    with pytest.raises(NoResult):
        await (await perdure.start_run(_run("none"))).result()

    async def listed() -> bool:
        ended = {one.status for one in await perdure.runs()}
        rollouts = await rollout_listing.newest(client, "bad", 9)
        told = sum(one.episode is not None for one in rollouts)
        return (ended, told) == (ENDED, 2)

    await until(listed, "the server lists the ends")
    store = open_store(load_settings())
    identity = json.dumps({"engine.model": "qwen3"}).encode()
    await store.put_if_absent(store_keys.run_identity("bad"), identity)
    capsys.readouterr()
    await command("status")
    runs = capsys.readouterr().out
    await command("status", "bad")
    run = capsys.readouterr().out

    day = time.strftime("%Y-%m-%d")
    lines = {
        line.split("  ")[1].partition(":")[0]: line for line in runs.splitlines() if day in line
    }
    assert lines["bad"].endswith(" (done) · qwen3")
    assert lines["none"].endswith("(failed: no dataset 'toy')")
    assert run.startswith(f"{day} ")
    assert f"a #0 and 1 more: sandbox: {WHY}" in run.splitlines()


def _run(run_id: str) -> RunRequest:
    return RunRequest(run_id=run_id, instances=("toy/a", "toy/b"), rollout={"agent": "nop"})
