"""The menu: each act breaks one thing of a world at work, and puts right what an operator would."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from perdure.sandboxes.host.host_processes import ProcessId
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from tests import s3_proxy
from tests.chaos.random_faults.system_under_test import World
from tests.cuttable_connection import Fault
from tests.stack import worker_builds
from tests.stack.host_requirements import cmdline, comm, parents, pids, started_at
from tests.stack.second_host import lose
from tests.stack.shifted_clock import TWO_HOURS
from tests.stack.stack_process import Process

BALLAST = "ballast"
READER = b"perdure.limited_process"
REFUSALS = (301, 302, 400, 401, 402, 403, 404, 407, 413, 422, 451, 507, 520)
GRADER_WITHIN_S = 20.0
STAGES = ("boot_sandbox", "run_agent", "capture_diff", "grade_in_fresh_sandbox", "emit_episode")


@dataclass(frozen=True)
class Act:
    """One thing that breaks. `play` tells the world's record what that may cost."""

    play: Callable[[World], Awaitable[None]]
    needs: Callable[[World], object] = lambda _: True


# --- processes of a stack ------------------------------------------------------------------------


async def kill_worker(world: World) -> None:
    """Those of a host, in a stage that the dice choose. What they did is asked afterwards, because the
    server has not noticed yet."""
    host = await world.host_at(world.dice.choice(STAGES))
    victims = host.workers
    await host.kill_all(*victims)
    await world.count_killed(victims)
    await host.recover()


async def stop_worker(world: World) -> None:
    """SIGTERM: it hands over."""
    host = world.any_host()
    await host.kill_all(*host.workers, signum=signal.SIGTERM)
    await host.recover()


async def freeze_worker(world: World) -> None:
    """Another one takes over; the first comes back as a zombie."""
    host = world.any_host()
    frozen = world.dice.choice(host.workers)
    os.kill(frozen.pid, signal.SIGSTOP)
    await worker_builds.start_worker(host, frozen.build)
    os.kill(frozen.pid, signal.SIGCONT)
    await frozen.kill(signal.SIGTERM)


async def kill_gateway(world: World) -> None:
    host = world.any_host()
    with world.turns_are_cut():
        await host.gateway.kill()
    await host.recover()


async def kill_temporal(world: World) -> None:
    await world.first.temporal.kill()
    await world.first.recover()


async def kill_everything(world: World) -> None:
    host = world.first
    await world.count_killed(host.workers)
    with world.turns_are_cut():
        await host.kill_all(*host.workers, host.gateway, host.temporal)
    await host.recover()


def _stand_still(part: Callable[[World], Process]) -> Callable[[World], Awaitable[None]]:
    async def play(world: World) -> None:
        victim = part(world)
        os.kill(victim.pid, signal.SIGSTOP)
        await asyncio.sleep(world.pause_s())  # the outage itself
        os.kill(victim.pid, signal.SIGCONT)

    return play


async def kill_readers(world: World) -> None:
    """The processes in which a host's workers read what sandboxes wrote."""
    workers = {worker.pid for worker in world.any_host().workers}
    _kill(*(pid for pid in pids() if READER in cmdline(pid) and _child_of(workers, pid)))


async def kill_fork_server(world: World) -> None:
    """The process that forks the keepers of new sandboxes."""
    workers = {worker.pid for worker in world.any_host().workers}
    _kill(*(pid for pid in pids() if comm(pid) == b"perdure-fork" and _child_of(workers, pid)))


# --- sandboxes -----------------------------------------------------------------------------------


async def kill_keeper(world: World) -> None:
    await _take(world, await _any_box(world), lambda box: box.keeper)


async def kill_holder(world: World) -> None:
    """The process that holds a sandbox's namespaces."""
    await _take(world, await _any_box(world), lambda box: box.holder)


async def kill_graders_keeper(world: World) -> None:
    """As soon as a grading sandbox is up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRADER_WITHIN_S):
            while (box := await _any_box(world, "-grade-")) is None:
                await asyncio.sleep(0.02)
        await _take(world, box, lambda box: box.keeper)


async def _any_box(world: World, purpose: str = "-") -> SandboxFolder | None:
    """One that is alive on one of the hosts, if there is one."""
    found = await _boxes(world, purpose)
    return world.dice.choice(found) if found else None


async def _boxes(world: World, purpose: str) -> list[SandboxFolder]:
    return [
        SandboxFolder(host.provider.root / info.identity)
        for host in world.hosts
        for info in await host.provider.list()
        if info.alive and purpose in info.identity
    ]


async def _take(
    world: World, box: SandboxFolder | None, victim: Callable[[SandboxFolder], ProcessId | None]
) -> None:
    """Kill a process without which this sandbox is lost."""
    process = victim(box) if box is not None else None
    if box is None or process is None:
        return
    rollout = world.rollout_of(box.identity)
    stages = [work.stage for work in await world.at_work() if work.rollout == rollout]
    world.record.sandboxes_taken[rollout] += 1
    world.record.killed_in.update(stages)
    with world.turns_are_cut(rollout):
        _kill(process.pid)


async def kill_forwarder(world: World) -> None:
    """Its keeper replaces it."""
    found = await _helpers(world, b"perdure-forward")
    if found:
        _kill(world.dice.choice(sorted(found)))


async def kill_launcher(world: World) -> None:
    """Its keeper replaces it. If it was starting a command, that may or may not have begun, so the
    sandbox is given up."""
    found = await _helpers(world, b"perdure-launch")
    if found:
        pid = world.dice.choice(sorted(found))
        await _take(world, found[pid], lambda _: ProcessId(pid, started_at(pid)))


async def _helpers(world: World, name: bytes) -> dict[int, SandboxFolder]:
    """Children of this name of the keepers of living sandboxes, by pid."""
    boxes = {box.keeper.pid: box for box in await _boxes(world, "-") if box.keeper}
    named = [pid for pid in pids() if comm(pid) == name]
    return {pid: boxes[above] for pid in named if (above := next(parents(pid), 0)) in boxes}


async def kill_agent(world: World) -> None:
    """The agent's own process, from outside: as a crash of the agent."""
    boxes = {box.keeper.pid: box for box in await _boxes(world, "-agent-") if box.keeper}
    agents = sorted(pid for pid, _ in world.first.agents())
    world.dice.shuffle(agents)
    for pid in agents:
        for above in parents(pid):
            if above in boxes:
                world.record.agents_killed.add(world.rollout_of(boxes[above].identity))
                return _kill(pid)


def _child_of(workers: set[int], pid: int) -> bool:
    return next(parents(pid), 0) in workers


def _kill(*victims: int) -> None:
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- the network, the store, the disk, the clock -------------------------------------------------


def _on_the_wire(fault: Fault) -> Callable[[World], Awaitable[None]]:
    """Between the gateways and the engine."""

    async def play(world: World) -> None:
        assert world.first.wire is not None
        with world.turns_are_cut() if fault is not Fault.SLOW else contextlib.nullcontext():
            world.first.wire.play(fault)
            await asyncio.sleep(world.pause_s())  # the outage itself
            world.first.wire.heal()

    return play


async def install_seccomp_filter(world: World) -> None:
    """The engine, or a proxy in front of it, answers every call and every probe with one status."""
    engine = world.first.engine
    engine.control(kind="status", status=world.dice.choice(REFUSALS))
    await asyncio.sleep(world.pause_s())  # the outage itself
    engine.control(kind=None)


async def kill_ray_node(world: World) -> None:
    """With the engine on it. Another node joins, and Ray starts an engine there."""
    assert world.ray is not None
    with world.turns_are_cut():
        await asyncio.to_thread(world.ray.kill, world.dice.randrange(len(world.ray.running)))
    await asyncio.to_thread(world.ray.join)


async def cut_host_off(world: World) -> None:
    """From Temporal, for much less than the time after which it is lost."""
    world.line.cut()
    await asyncio.sleep(world.pause_s())  # the outage itself
    world.line.mend()


def _store(*faults: s3_proxy.Fault, share: float = 1.0) -> Callable[[World], Awaitable[None]]:
    async def play(world: World) -> None:
        world.proxy.play(*faults, share=share, seed=world.dice.randrange(1 << 30))
        await asyncio.sleep(world.pause_s())  # the outage itself
        world.proxy.heal()

    return play


async def fill_disk(world: World) -> None:
    assert world.disk is not None
    ballast = world.disk / BALLAST
    with world.turns_are_cut():
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        await asyncio.sleep(world.pause_s())  # the outage itself
        ballast.unlink()


async def set_clock(world: World) -> None:
    """Two hours forward, two hours back, or right again; it stays so."""
    assert world.clock is not None
    steps = {-TWO_HOURS, 0, TWO_HOURS} - {world.clock.ahead_s}
    world.clock.jump(world.dice.choice(sorted(steps)))


# --- hosts and builds ----------------------------------------------------------------------------


async def lose_host(world: World) -> None:
    """The second host for good, with its sandboxes and folder; another machine joins."""
    struck = {world.rollout_of(info.identity) for info in await world.second.provider.list()}
    workers = world.second.workers
    with world.turns_are_cut():
        await lose(world.second)
    struck |= await world.count_killed(workers)
    world.record.sandboxes_taken.update(struck)
    await world.add_machine()


async def deploy(world: World) -> None:
    """The other build becomes current. The first host keeps a worker of each until they drain; the
    second host's worker is replaced."""
    world.build = next(build for build in worker_builds.BUILDS if build != world.build)
    world.first.builds = tuple(worker_builds.BUILDS)
    world.second.builds = (world.build,)
    for host in world.hosts:
        await host.recover()
    await worker_builds.make_current(world.first, world.build)


MENU: Mapping[str, Act] = {
    "kill worker": Act(kill_worker),
    "stop worker": Act(stop_worker),
    "freeze worker": Act(freeze_worker),
    "kill gateway": Act(kill_gateway),
    "freeze gateway": Act(_stand_still(lambda world: world.any_host().gateway)),
    "kill temporal": Act(kill_temporal),
    "freeze temporal": Act(_stand_still(lambda world: world.first.temporal)),
    "kill worker, gateway and temporal": Act(kill_everything),
    "kill readers": Act(kill_readers),
    "kill fork server": Act(kill_fork_server),
    "kill keeper": Act(kill_keeper),
    "kill holder": Act(kill_holder),
    "kill a grader's keeper": Act(kill_graders_keeper),
    "kill launcher": Act(kill_launcher),
    "kill forwarder": Act(kill_forwarder),
    "kill agent": Act(kill_agent),
    "reset engine": Act(_on_the_wire(Fault.RESET)),
    "silence engine": Act(_on_the_wire(Fault.BLACK_HOLE)),
    "slow engine": Act(_on_the_wire(Fault.SLOW)),
    "engine refuses": Act(install_seccomp_filter),
    "kill ray node": Act(kill_ray_node, needs=lambda world: world.ray),
    "cut a host off": Act(cut_host_off),
    "store refuses": Act(_store(s3_proxy.refuse(403, "InvalidAccessKeyId"))),
    "store is busy": Act(_store(s3_proxy.refuse(503, "SlowDown"), share=0.5)),
    "store resets": Act(_store(s3_proxy.reset, share=0.5)),
    "store loses answers": Act(_store(s3_proxy.lose_answer, share=0.5)),
    "store stalls": Act(_store(s3_proxy.stall, share=0.5)),
    "store cuts bodies": Act(_store(s3_proxy.cut, share=0.5)),
    "fill disk": Act(fill_disk, needs=lambda world: world.disk),
    "set clock": Act(set_clock, needs=lambda world: world.clock),
    "lose host": Act(lose_host),
    "deploy": Act(deploy),
}
