"""Starts the worker of one node and restarts it when it ends. Knows neither Ray nor Slurm."""

import asyncio
import subprocess
import sys
from time import monotonic

import structlog

from perdure.rollouts.admission.host_seats import Seats
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers, host_life
from perdure.types import Frozen

GRACE_S = 25.0
"""Seconds between SIGTERM and SIGKILL of a worker, which hands its work over in ten."""
POLL_S = 0.2
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Pauses between two starts of a worker that ends by itself."""
STEADY_S = 60.0
"""If a worker has run for longer, we assume that it did not fail at its start."""

log = structlog.get_logger("perdure.node_worker")


class NodeReport(Frozen):
    node: str
    pid: int
    """Pid of the worker's supervisor; 0 if none runs."""
    starts: int
    seats: int
    taken: int
    log: str


class WorkersReport(Frozen):
    nodes: tuple[NodeReport, ...] = ()
    absent: tuple[str, ...] = ()
    """Nodes without a worker, with the reason."""
    full: tuple[str, ...] = ()
    """Nodes that get no worker, because their free CPUs are not enough for a seat."""
    waiting: int = 0
    """Boots and gradings that no worker has taken; counted only for Ray's autoscaler."""


class NodeWorker:
    """The worker ends with this process. Its agents continue, and the home's next worker finds them."""

    def __init__(self, node: str, settings: Settings) -> None:
        """This process's environment must hold the same settings, because the worker inherits it."""
        self._node, self._settings = node, settings
        self._home = settings.home.absolute()
        self._log = self._home / "logs" / "worker.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._seats = Seats(self._home / "run" / "seats", settings.slots.agent)
        self._keeping = asyncio.create_task(self._keep())

    def report(self) -> NodeReport:
        alive = self._child is not None and self._child.poll() is None
        return NodeReport(
            node=self._node,
            pid=self._child.pid if self._child is not None and alive else 0,
            starts=self._starts,
            seats=self._seats.most,
            taken=self._seats.agents(),
            log=str(self._log),
        )

    async def stop(self) -> None:
        """End the worker. Its agents continue, and the next worker finds them."""
        self._keeping.cancel()
        if (child := self._child) is not None and child.stdin is not None:
            child.stdin.close()  # then its supervisor ends it
            await asyncio.to_thread(child.wait)

    async def give_back(self) -> bool:
        """Leave if the node has no rollout. False: a rollout arrived, so the worker starts again.

        We stop the worker first: the answer is final only when nothing polls any more.
        """
        await self.stop()
        if self._seats.agents() or await home_providers.has_live_sandboxes(self._settings):
            self._keeping = asyncio.create_task(self._keep())
            return False
        await asyncio.to_thread(host_life.end, self._settings)
        return True

    async def leave(self) -> None:
        """End the worker and the agents, then say goodbye for the host, so that its rollouts move at
        once."""
        await self.stop()
        await home_providers.kill_all(self._settings, log.warning)
        await asyncio.to_thread(host_life.end, self._settings)

    async def _keep(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while True:
            began = monotonic()
            self._child = self._start()
            self._starts += 1
            while self._child.poll() is None:
                await asyncio.sleep(POLL_S)
            steady = monotonic() - began > STEADY_S
            pause_s = SHORTEST_PAUSE_S if steady else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _start(self) -> "subprocess.Popen[bytes]":
        note = self._home / "run" / "worker.note"
        for folder in (self._log.parent, note.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "perdure.serving.engine_supervisor", str(note), str(GRACE_S)]
        with self._log.open("ab") as file:
            return subprocess.Popen(
                [*argv, "--", sys.executable, "-m", "workers"],
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
