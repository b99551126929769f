"""The menu: each act breaks one thing of a stack at work, and puts right what an operator would."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.sandboxes.host.box import Box
from tests import s3_proxy
from tests.s3_proxy import S3Proxy
from tests.stack.host import cmdline, pids
from tests.stack.process import Process
from tests.stack.stack import Stack
from tests.wire import Fault

SHORT_S, LONG_S = 1.0, 6.0
"""How long a part stands still or a connection is broken: the longest is twice the heartbeat."""
BALLAST = "ballast"


@dataclass
class World:
    """A stack at work, what stands between its parts, and the dice."""

    stack: Stack
    proxy: S3Proxy
    disk: Path | None
    """The small disk under the home; None where none may be mounted."""
    dice: random.Random
    agents_killed: int = 0
    """Each of these rollouts ends as a crash of its agent, unless the agent had finished."""

    def pause_s(self) -> float:
        return self.dice.uniform(SHORT_S, LONG_S)


@dataclass(frozen=True)
class Act:
    """One thing that breaks. `buys_again`: calls in flight at that moment may be asked for twice."""

    play: Callable[[World], Awaitable[None]]
    buys_again: bool = False
    needs_disk: bool = False


async def _kill(world: World, victims: list[Process], signum: int = signal.SIGKILL) -> None:
    await world.stack.kill_all(*victims, signum=signum)
    await world.stack.recover()


async def _stand_still(world: World, victim: Process) -> None:
    os.kill(victim.pid, signal.SIGSTOP)
    await asyncio.sleep(world.pause_s())  # the outage itself
    os.kill(victim.pid, signal.SIGCONT)


async def kill_worker(world: World) -> None:
    await _kill(world, world.stack.workers)


async def stop_worker(world: World) -> None:
    """SIGTERM: it hands over."""
    await _kill(world, world.stack.workers, signal.SIGTERM)


async def freeze_worker(world: World) -> None:
    """Another one takes over; the first comes back as a zombie."""
    (frozen,) = world.stack.workers
    os.kill(frozen.pid, signal.SIGSTOP)
    await world.stack.start_worker()
    os.kill(frozen.pid, signal.SIGCONT)
    await frozen.kill(signal.SIGTERM)


async def kill_gateway(world: World) -> None:
    await _kill(world, [world.stack.gateway])


async def freeze_gateway(world: World) -> None:
    await _stand_still(world, world.stack.gateway)


async def kill_temporal(world: World) -> None:
    await _kill(world, [world.stack.temporal])


async def freeze_temporal(world: World) -> None:
    await _stand_still(world, world.stack.temporal)


async def kill_everything(world: World) -> None:
    stack = world.stack
    await _kill(world, [*stack.workers, stack.gateway, stack.temporal])


async def _break_wire(world: World, fault: Fault) -> None:
    assert world.stack.wire is not None
    world.stack.wire.play(fault)
    await asyncio.sleep(world.pause_s())  # the outage itself
    world.stack.wire.heal()


async def reset_engine(world: World) -> None:
    """As an engine that is killed and started again."""
    await _break_wire(world, Fault.RESET)


async def silence_engine(world: World) -> None:
    await _break_wire(world, Fault.BLACK_HOLE)


async def slow_engine(world: World) -> None:
    await _break_wire(world, Fault.SLOW)


def _store(*faults: s3_proxy.Fault, share: float = 1.0) -> Callable[[World], Awaitable[None]]:
    async def play(world: World) -> None:
        world.proxy.play(*faults, share=share, seed=world.dice.randrange(1 << 30))
        await asyncio.sleep(world.pause_s())  # the outage itself
        world.proxy.heal()

    return play


async def fill_disk(world: World) -> None:
    assert world.disk is not None
    ballast = world.disk / BALLAST
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    await asyncio.sleep(world.pause_s())  # the outage itself
    ballast.unlink()


def _kill_named(*names: bytes) -> Callable[[World], Awaitable[None]]:
    """Kill one process of this stack whose name is among `names`, if there is one now."""

    async def play(world: World) -> None:
        home = str(world.stack.home)
        found = [pid for pid in pids() if _comm(pid) in names and _cwd(pid).startswith(home)]
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(world.dice.choice(sorted(found)), signal.SIGKILL)

    return play


async def kill_holder(world: World) -> None:
    """The process that holds a sandbox's namespaces: the sandbox is lost."""
    boxes = [box for box in await world.stack.provider.list() if box.alive]
    if boxes:
        root = world.stack.provider.root
        holder = Box(root / world.dice.choice(boxes).identity).holder
        if holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGKILL)


async def kill_agent(world: World) -> None:
    """The agent's own process, from outside: as a crash of the agent."""
    agents = sorted(world.stack.agents())
    if agents:
        pid, _ = world.dice.choice(agents)
        world.agents_killed += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def kill_zygote(world: World) -> None:
    """The process that forks the keepers of new sandboxes."""
    workers = {worker.pid for worker in world.stack.workers}
    zygotes = [
        pid for pid in pids() if b"keeper.zygote" in cmdline(pid) and _parent(pid) in workers
    ]
    for pid in zygotes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _comm(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return b""


def _cwd(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


MENU: Mapping[str, Act] = {
    "kill worker": Act(kill_worker),
    "stop worker": Act(stop_worker),
    "freeze worker": Act(freeze_worker),
    "kill gateway": Act(kill_gateway, buys_again=True),
    "freeze gateway": Act(freeze_gateway),
    "kill temporal": Act(kill_temporal),
    "freeze temporal": Act(freeze_temporal),
    "kill worker, gateway and temporal": Act(kill_everything, buys_again=True),
    "reset engine": Act(reset_engine, buys_again=True),
    "silence engine": Act(silence_engine, buys_again=True),
    "slow engine": Act(slow_engine),
    "store refuses": Act(_store(s3_proxy.refuse(403, "InvalidAccessKeyId"))),
    "store is busy": Act(_store(s3_proxy.refuse(503, "SlowDown"), share=0.5)),
    "store resets": Act(_store(s3_proxy.reset, share=0.5)),
    "store loses answers": Act(_store(s3_proxy.lose_answer, share=0.5)),
    "store stalls": Act(_store(s3_proxy.stall, share=0.5)),
    "store cuts bodies": Act(_store(s3_proxy.cut, share=0.5)),
    "fill disk": Act(fill_disk, buys_again=True, needs_disk=True),
    "kill keeper": Act(_kill_named(b"perdure-keeper"), buys_again=True),
    "kill holder": Act(kill_holder, buys_again=True),
    "kill launcher": Act(_kill_named(b"perdure-launch")),
    "kill forwarder": Act(_kill_named(b"perdure-forward")),
    "kill zygote": Act(kill_zygote),
    "kill agent": Act(kill_agent),
}
