"""Document 003's server on a whole stack: real workflows, sandboxes and gradings; a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from perdure.errors import Cancelled, ConfigurationError
from perdure.integrations.openhands import OpenHandsServer
from tests import document_003, loop_agent
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import IDLE_INSTANCE, INSTANCE, UNSOLVED_INSTANCE
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

HELD = 3
Servers = Callable[..., OpenHandsServer]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared: Stack) -> AsyncIterator[Stack]:
    await shared.refresh()
    yield shared
    shared.engine.let_go()


@pytest.fixture
def serve(stack: Stack) -> Servers:
    """A started server of this stack; a second call is what a restarted process makes."""

    def make(**options: Any) -> OpenHandsServer:
        address = stack.plan.addresses.temporal_address
        server = OpenHandsServer(
            settings=stack.settings.changed(temporal={"address": address}),
            agent=loop_agent.NAME,
            agent_options={"mark": stack.mark},
            heartbeat_timeout_s=stack.beat_s,
            **options,
        )
        server.start()
        return server

    return make


async def begun(server: OpenHandsServer, *job_ids: str) -> None:
    """Until the agents of these jobs run."""

    def found() -> bool:
        known = server._jobs
        return all(job in known and known[job].runtime is not None for job in job_ids)

    await until(found, f"jobs {job_ids} run")


async def test_a_job_is_processed(stack: Stack, serve: Servers) -> None:
    """`process` blocks until the job is done and returns patch, messages, report and times; the caller's
    sampling parameters stay as they are."""
    server = serve()
    sampling = {"temperature": 0.5, "max_output_tokens": 300, "modify_params": False}
    given = dict(sampling)
    row = {"instance": INSTANCE, "trajectory_id": 7}
    result = await asyncio.to_thread(server.process, row, sampling)

    assert (result["resolved"], result["reward"], result["critical_error"]) == (True, 1.0, None)
    assert (result["instance_id"], result["trajectory_id"]) == ("add", 7)
    assert "+    return a + b" in result["git_patch"]
    assert [m["role"] for m in result["messages"]][-1] == "assistant"
    assert result["report"]["outcome"] == "resolved"
    assert (result["finish"], result["success"], result["error"]) == (True, True, "")
    assert result["timing"]["init"] > 0 < result["timing"]["run"]
    assert {call.sampling["temperature"] for call in stack.engine.calls} == {0.5}
    assert sampling == given


async def test_the_documents_quick_start_runs(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As document 003 prints it, but for the module's name and the LLM server's port."""
    monkeypatch.setenv("PERDURE_HOME", str(stack.home))
    monkeypatch.setenv("PERDURE_STORE", stack.settings.store)
    monkeypatch.setenv("TEMPORAL_ADDRESS", str(stack.plan.addresses.temporal_address))
    typed = document_003.quick_start().replace("http://localhost:8000", stack.engine.url)
    names = {"instance": {"instance": INSTANCE}, "sampling_params": {"temperature": 0.5}}
    defaults = partial(OpenHandsServer, agent=loop_agent.NAME, agent_options={"mark": stack.mark})
    monkeypatch.setattr("perdure.integrations.openhands.OpenHandsServer", defaults)
    await asyncio.to_thread(exec, typed, names)

    result: Any = names["result"]
    assert (result["resolved"], result["reward"]) == (True, 1.0)
    assert "git_patch" in capsys.readouterr().out


async def test_a_restarted_server_loses_no_job(stack: Stack, serve: Servers) -> None:
    """`stop` leaves the job running; the same id joins it from another process, and again when it is done:
    no turn is sampled twice. Another job under that id is refused."""
    server = serve()
    stack.engine.hold(HELD)
    waiting = asyncio.create_task(asyncio.to_thread(server.process, INSTANCE, {}, "mine"))
    await begun(server, "mine")
    server.stop()
    with pytest.raises(Cancelled, match="job 'mine' continues"):
        await waiting
    again = serve()
    assert (await asyncio.to_thread(again.status))["total"] == 1
    stack.engine.let_go()
    result = await asyncio.to_thread(again.process, INSTANCE, {}, "mine")

    assert result["resolved"]
    assert await asyncio.to_thread(serve().process, INSTANCE, {}, "mine") == result
    assert set(stack.engine.times_sampled().values()) == {1}
    with pytest.raises(
        ConfigurationError, match=r"(?s)job mine was .*instance: .* -> .*another job_id"
    ):
        await asyncio.to_thread(again.process, UNSOLVED_INSTANCE, {}, "mine")


async def test_jobs_are_counted_by_stage_and_cancelled(stack: Stack, serve: Servers) -> None:
    """`status` counts open jobs; a cancelled one is complete for its caller. To cancel it twice, or one
    that is not known, is no error."""
    server = serve()
    stack.engine.hold(HELD)
    names = ("a", "b/with slash")
    waiting = [
        asyncio.create_task(asyncio.to_thread(server.process, INSTANCE, {}, name)) for name in names
    ]
    await begun(server, *names)
    details = server.job_details("a")
    counts = await asyncio.to_thread(server.status)
    cancelled = await asyncio.to_thread(server.cancel, "a")
    stack.engine.let_go()
    first, second = await asyncio.gather(*waiting)
    again = [await asyncio.to_thread(server.cancel, name) for name in ("a", "never")]

    assert counts == {
        **{"init_queue": 0, "run_queue": 0, "eval_queue": 0},
        **{"active_init": 0, "active_run": 2, "active_eval": 0, "total": 2},
    }
    assert (cancelled, again) == (True, [False, False])
    assert (first["critical_error"], first["resolved"], first["reward"]) == (
        *("cancelled", False),
        None,
    )
    assert second["resolved"]
    assert (details.event.is_set(), details.runtime) == (True, None)
    assert (await asyncio.to_thread(server.status))["total"] == 0


@pytest.mark.parametrize(("allow", "outcome"), [(True, "empty_patch"), (False, "unresolved")])
async def test_an_empty_patch_is_not_evaluated_if_allowed(
    allow: bool, outcome: str, stack: Stack, serve: Servers
) -> None:
    """`allow_skip_eval`: no tests run on an empty patch; without it they do."""
    server = serve(allow_skip_eval=allow, name=f"skip-{allow}")
    result = await asyncio.to_thread(server.process, IDLE_INSTANCE, {})

    assert (result["git_patch"], result["report"]["outcome"]) == ("", outcome)
    assert result["critical_error"] is None


async def test_an_error_completes_its_job(stack: Stack, serve: Servers) -> None:
    """A job that fails before its agent is told as such, and blocks no other."""
    server = serve()
    lost, fine = await asyncio.gather(
        asyncio.to_thread(server.process, "tests/no-such", {}),
        asyncio.to_thread(server.process, INSTANCE, {}),
    )

    assert (lost["critical_error"], lost["reward"]) == ("init", None)
    assert "no-such" in lost["error"]
    assert fine["resolved"]


async def test_a_wait_has_an_end(stack: Stack, serve: Servers) -> None:
    """`timeout` ends the wait and not the job."""
    server = serve()
    stack.engine.hold(HELD)
    with pytest.raises(TimeoutError, match="job 'slow' is not done"):
        await asyncio.to_thread(server.process, INSTANCE, {}, "slow", timeout=0.2)
    stack.engine.let_go()

    assert (await asyncio.to_thread(server.process, INSTANCE, {}, "slow"))["resolved"]
