"""Whole rollouts whose sandbox has no way to the gateway but a relay, and whose worker is killed."""

import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from perdure.sandboxes.relay.gateway_route import choose_reach
from perdure.sandboxes.relay.host_relay import exec_id_of
from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness
from perdure.types import Outcome
from tests import remote_box
from tests.stack.gated_engine import commands, script
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import DEATH_S, Stack, running
from tests.stack.stack_process import Process
from workers.health_endpoints import wait_until_polling
from workers.worker_process import ROLES

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

HELD = 3
"""The turn in which the worker dies: the relay holds a call, the engine has not answered it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Without workers: each test starts its own, with its own way to the gateway."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("relayed") / "stack", workers=0) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared: Stack) -> AsyncIterator[Stack]:
    yield shared
    shared.engine.control(scripts=script())
    await shared.kill_all(*shared.workers)


async def start_worker(stack: Stack, reach: str, **env: str) -> Process:
    spec = stack.plan.worker()
    spec = replace(spec, env={**spec.env, "PERDURE_GATEWAY__REACH": reach, **env})
    process = stack.spawn(spec)
    await wait_until_polling(stack.client, ROLES, f"{process.pid}@{socket.gethostname()}")
    return process


@pytest.mark.longer
async def test_a_killed_worker_loses_no_relayed_call(stack: Stack) -> None:
    """kill -9 mid-call: another worker serves the same relay; solved, no turn sampled twice."""
    first = await start_worker(stack, "stdio")
    stack.engine.hold(HELD)
    request = await stack.start("relayed", heartbeat_timeout_s=DEATH_S)
    await stack.held(request)
    await first.kill()
    await start_worker(stack, "stdio")
    await stack.watched(request, attempt=2)
    stack.engine.let_go()

    await stack.solved_once(request)


@pytest.mark.longer
@pytest.mark.registry
async def test_mini_swe_agent_solves_through_a_relay(stack: Stack) -> None:
    """The unmodified mini-swe-agent from PyPI, its calls carried out by a relay: graded resolved."""
    await start_worker(stack, "stdio")
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in [*commands(), "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    ]
    stack.engine.control(scripts={"default": {"turns": calls}})
    request = await stack.start("mini", agent="mini_swe_agent", agent_options={"client": "direct"})
    episode = await stack.episode(request)

    assert (episode.outcome, episode.turns) == (Outcome.RESOLVED, len(calls)), stack.last_words()
    stack.bought_once(request)


@pytest.mark.longer
async def test_auto_takes_a_relay_where_the_url_does_not_open(stack: Stack) -> None:
    """A URL that looks routable and fails from inside costs nothing: the calls leave by the relay."""
    address = address_of_this_host()
    await stack.kill_all(stack.gateway)  # for good: this test comes last
    url = await start_gateway_at(stack, address)
    assert choose_reach("auto", remote_box.RemoteBox(Settings(home=stack.home)), url) == "url"
    await start_worker(stack, "auto", PERDURE_GATEWAY__URL=url)
    stack.engine.hold(HELD)
    request = await stack.start("auto", sandbox=remote_box.NAME)
    await stack.held(request)
    sandbox = await stack.provider.attach(stack.identity(request, "agent"))
    relay = await sandbox.poll(exec_id_of(1))
    stack.engine.let_go()

    await stack.solved_once(request)
    assert not relay.done


def address_of_this_host() -> str:
    """One that is not loopback; nothing is sent to learn it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return str(probe.getsockname()[0])


async def start_gateway_at(stack: Stack, address: str) -> str:
    """The gateway's URL there."""
    spec = stack.plan.gateway()
    stack.spawn(replace(spec, env={**spec.env, "PERDURE_GATEWAY__HOST": address}))
    url = f"http://{address}:{stack.plan.addresses.gateway_port}"
    await part_readiness.wait_for_http(f"{url}/healthz")
    return url
