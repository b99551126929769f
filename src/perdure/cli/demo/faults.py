"""The faults of `perdure demo --break`. Each strikes while agents work, and waits until they go on."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from temporalio.client import Client
from temporalio.service import RPCError

from perdure.cli.console import many
from perdure.cli.demo.engine_process import EngineProcess
from perdure.cli.demo.engine_proxy import EngineProxy
from perdure.cli.demo.small_disk import SmallDisk
from perdure.client.rollout_listing import heartbeat_of
from perdure.errors import PerdureError
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_state
from perdure.stack.stack_plan import gateway_names

OUTAGE_S = 5.0
"""How long refusals and the full file system last."""
LIMIT_S = 240.0
"""Seconds after which a fault counts as not recovered. A busy host needs a minute."""
LOOK_S = 0.1
ANSWER = timedelta(seconds=0.5)
"""Timeout of a call to the restarting server. The SDK logs a call that it repeats for longer."""
TURNS_EACH = 2
"""Turns of each agent before the first fault, and during each fault: the struck turn and the
next."""


class NotRecovered(PerdureError):
    """The agents did not go on after a fault."""


@dataclass(frozen=True)
class Targets:
    """What the faults act on. `rollouts`: the name of each, by `Call.rollout`."""

    settings: Settings
    client: Client
    workflow_ids: Sequence[str]
    rollouts: Mapping[str, str]
    proxy: EngineProxy
    engine: EngineProcess
    disk: SmallDisk | None


@dataclass(frozen=True)
class Hit:
    """What a fault did. `seconds`: from the kill, or from the end of the outage, until `went_on`.

    `struck`: rollouts that a loop without recovery would have lost. `cut`: calls in flight that may
    have been paid for without an answer.
    """

    what: str
    went_on: str
    seconds: float
    struck: frozenset[str]
    cut: int = 0


@dataclass(frozen=True)
class Fault:
    title: str
    strike: Callable[[Targets], Awaitable[Hit]]


async def until(holds: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    """Raises: NotRecovered."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (found if isinstance(found := holds(), bool) else await found):
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise NotRecovered(f"waited {LIMIT_S:g} s, but {what}") from None


async def strike(targets: Targets, fault: Fault, number: int) -> Hit:
    """Strike when every agent has called the model. Raises: NotRecovered."""
    await all_call(targets)
    targets.proxy.allow(TURNS_EACH * (number + 2))
    await until(
        lambda: bool(targets.proxy.at_engine()), f"no call is in flight for the fault {fault.title}"
    )
    return await fault.strike(targets)


async def all_call(targets: Targets) -> None:
    """Wait until every agent has used its turns and calls the model again. Raises: NotRecovered."""
    await until(
        lambda: set(targets.rollouts) <= targets.proxy.waiting(),
        "not every agent has called the model again",
    )


# --- processes -----------------------------------------------------------------------------------


async def kill_sandbox(targets: Targets) -> Hit:
    """Kill pid 1 of the sandbox of an agent that waits for the model."""
    call = targets.proxy.at_engine()[0]
    folder = next(targets.settings.home.absolute().glob(f"sandboxes/*/{call.session}"))
    holder = SandboxFolder(folder).holder
    if holder is None:
        raise NotRecovered(f"sandbox {call.session} has no process to kill")
    turn = targets.proxy.answers()[call.rollout] + 1
    name = targets.rollouts[call.rollout]
    at = _kill(holder.pid)
    successor = f"{call.rollout}-2"
    await until(
        lambda: successor in targets.proxy.sessions,
        f"{name} does not go on in a new sandbox",
    )
    answers = targets.proxy.answers()[call.rollout]
    went_on = f"continued at turn {answers + 1} in a new sandbox"
    return Hit(f"{name} in turn {turn}", went_on, _since(at), frozenset({call.rollout}), cut=1)


async def kill_worker(targets: Targets) -> Hit:
    pid = _child(targets, "worker").pid
    wall, at = time.time(), _kill(pid)
    await until(
        lambda: _are_watched(targets, wall), "the agents of the killed worker are not watched"
    )
    agents = many(len(targets.rollouts), "agent")
    return Hit(
        f"it watched {agents}", "a new worker watches them", _since(at), frozenset(targets.rollouts)
    )


async def kill_gateway(targets: Targets) -> Hit:
    names = gateway_names(targets.settings.gateway.processes)
    pids = [_child(targets, name).pid for name in names]
    struck = _struck(targets)
    at = _kill(*pids)
    await _go_on(targets, at, struck)
    calls = f"{many(len(struck), 'call')} in flight"
    return Hit(calls, "answered by the next gateway", _since(at), struck, cut=len(struck))


async def kill_engine(targets: Targets) -> Hit:
    struck = _struck(targets)
    at = time.monotonic()
    targets.engine.kill()
    await targets.engine.start()
    await _go_on(targets, at, struck)
    calls = f"{many(len(struck), 'call')} in flight"
    return Hit(calls, "answered by the restarted engine", _since(at), struck, cut=len(struck))


async def kill_temporal(targets: Targets) -> Hit:
    before = _child(targets, "temporal").pid
    at = _kill(before)
    await until(lambda: _answers(targets, before), "Temporal does not answer")
    meanwhile = sum(1 for call in targets.proxy.calls if call.answered and (call.ended or 0) > at)
    rollouts = f"{many(len(targets.rollouts), 'rollout')} open"
    went_on = f"answers again; {many(meanwhile, 'model call')} until then"
    return Hit(rollouts, went_on, _since(at), frozenset())


# --- refusals and a full file system -------------------------------------------------------------


def refuse(status: int) -> Callable[[Targets], Awaitable[Hit]]:
    """A proxy in front of the engine answers everything with this status."""

    async def answer(targets: Targets) -> Hit:
        targets.proxy.refuse(status)
        await until(lambda: bool(targets.proxy.refused), f"no call met the {status}")
        await asyncio.sleep(OUTAGE_S)
        refused = list(targets.proxy.refused)
        at = time.monotonic()
        targets.proxy.refuse(0)
        await _go_on(targets, at, refused)
        what = f"{many(len(refused), 'call')} refused"
        return Hit(what, "then answered", _since(at), frozenset(refused))

    return answer


async def fill_disk(targets: Targets) -> Hit:
    """The store's file system is full, so answered calls cannot be recorded."""
    assert targets.disk is not None
    began = time.monotonic()
    targets.disk.fill()
    await until(lambda: bool(_answered_since(targets, began)), "no call met the full file system")
    await asyncio.sleep(OUTAGE_S)
    held = _answered_since(targets, began) - _calling(targets)
    targets.disk.make_room()
    at = time.monotonic()
    await until(lambda: held <= _calling(targets), "not every answer is stored")
    what = f"{many(len(held), 'answer')} could not be stored"
    return Hit(what, "then stored, and the agents went on", _since(at), frozenset(held))


def chosen(*, with_disk: bool) -> list[Fault]:
    """All faults, in order. `with_disk`: with the full file system, which needs a mount of our
    own."""
    disk = [Fault(f"disk full for {OUTAGE_S:g} s", fill_disk)] if with_disk else []
    return [
        Fault("kill -9 sandbox", kill_sandbox),
        Fault("kill -9 worker", kill_worker),
        Fault("kill -9 gateway", kill_gateway),
        Fault("kill -9 engine", kill_engine),
        Fault(f"401 for {OUTAGE_S:g} s", refuse(401)),
        Fault(f"504 for {OUTAGE_S:g} s", refuse(504)),
        Fault("kill -9 Temporal", kill_temporal),
        *disk,
    ]


def turns(*, with_disk: bool) -> int:
    """How many turns the agents have until the last fault is over."""
    return TURNS_EACH * (1 + len(chosen(with_disk=with_disk)))


# --- checks --------------------------------------------------------------------------------------


def _kill(*pids: int) -> float:
    """Send SIGKILL. Return the monotonic time."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def _since(at: float) -> float:
    return round(time.monotonic() - at, 1)


def _child(targets: Targets, name: str) -> stack_state.ChildState:
    state = stack_state.read(targets.settings)
    if state is None:
        raise NotRecovered("the stack has ended")
    return state.children[name]


def _struck(targets: Targets) -> frozenset[str]:
    return frozenset(targets.proxy.in_flight())


async def _go_on(targets: Targets, at: float, rollouts: Iterable[str]) -> None:
    """Wait until each agent got an answer after that time, or called again and awaits its turn."""
    await until(
        lambda: set(rollouts) <= _answered_since(targets, at) | targets.proxy.waiting(),
        "not every agent got its answer",
    )


def _calling(targets: Targets) -> set[str]:
    return targets.proxy.waiting() | {call.rollout for call in targets.proxy.at_engine()}


def _answered_since(targets: Targets, at: float) -> set[str]:
    return {c.rollout for c in targets.proxy.calls if c.answered and c.ended and c.ended > at}


async def _answers(targets: Targets, before: int) -> bool:
    """Whether a new server answers."""
    if _child(targets, "temporal").pid == before:
        return False
    try:
        handle = targets.client.get_workflow_handle(targets.workflow_ids[0])
        await handle.describe(rpc_timeout=ANSWER)
    except RPCError:
        return False
    return True


async def _are_watched(targets: Targets, at: float) -> bool:
    """Whether, since that Unix time, a worker took over each agent and sent a heartbeat."""
    try:
        return all([await _is_watched(targets.client, one, at) for one in targets.workflow_ids])
    except RPCError:
        return False


async def _is_watched(client: Client, workflow_id: str, at: float) -> bool:
    described = await client.get_workflow_handle(workflow_id).describe()
    for step in described.raw_description.pending_activities:
        started = step.last_started_time.ToNanoseconds() / 1e9
        return started > at and bool(await heartbeat_of(client, step))
    return False
