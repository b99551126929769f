"""One side of the comparison. It runs a batch of unmodified mini-swe-agents once."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks import common_job
from benchmarks.cpu_measurement import Meter
from benchmarks.model_endpoint import Endpoint
from benchmarks.peers.base import Grading, Job, Peer
from benchmarks.perdure_stack import Home, Stack, right_answers
from benchmarks.throughput.call_timeline import Timeline, added_latency, rates
from benchmarks.throughput.resource_sampler import Sampler
from perdure.storage import store_keys

AGENT = ("--agent", "mini_swe_agent")
TRAJECTORY = "trajectory.json"
RESERVE = 60.0
"""How long an engine may be silent, as a multiple of its latency: the whole host can be slow."""


@dataclass(frozen=True)
class Batch:
    """`rollouts` in total, `agents` of them at once. Each model call takes `latency_s`."""

    agents: int
    rollouts: int
    turns: int
    latency_s: float

    @property
    def ideal(self) -> float:
        """Rollouts per minute if only the model took time."""
        return 60 * self.agents / (self.turns * self.latency_s)


@dataclass(frozen=True)
class Figures:
    """One batch of one side."""

    side: str
    agents: int
    rollouts: int
    right: int
    wall_s: float
    """Seconds of the whole batch, including grading."""
    burst_s: float
    steady: float
    """Rollouts a minute."""
    added_p50_ms: float
    added_p95_ms: float
    cores_per_agent: float
    """CPU of all processes except the endpoint in the steady state, per running agent."""
    idle: float
    """Idle share of the host's CPU in the steady state."""
    memory_mb: float


class Side(Protocol):
    def measure(self, batch: Batch) -> Figures: ...


class PerdureSide:
    """The laptop stack. It already runs when the batch starts, as it does when a trainer's step starts."""

    name = "Perdure"

    def __init__(self, folder: Path, endpoint: Endpoint) -> None:
        self._folder = folder
        self._endpoint = endpoint
        self._tree = common_job.make_tree(folder / "tree")

    def measure(self, batch: Batch) -> Figures:
        folder = self._folder / f"at-{batch.agents}"
        slots = str(batch.agents)
        variables = {
            "PERDURE_SLOTS__AGENT": slots,
            "PERDURE_ENGINE__AGENTS": slots,
            "PERDURE_ENGINE__HANG_S": f"{RESERVE * batch.latency_s:g}",
        }
        home = Home(folder / "home", self._endpoint.url, variables=variables)
        home.add_instances(self._tree, batch.rollouts)
        with Meter.open(f"perdure-{batch.agents}", folder / "meter") as meter:
            stack = Stack.start(home, meter)
            try:
                self._endpoint.reset(latency_s=0.0)
                self._run(stack, Batch(1, 1, batch.turns, 0.0), "first")
                self._endpoint.reset(latency_s=batch.latency_s)
                return self._measured(stack, batch)
            finally:
                stack.stop()

    def _measured(self, stack: Stack, batch: Batch) -> Figures:
        sampler, began = Sampler(stack.meter), time.time()
        with sampler.running():
            right = self._run(stack, batch, "batch")
        wall = time.time() - began
        written = stack.home.folder / "store" / store_keys.rollouts("batch")
        timelines = [Timeline.read(path) for path in written.rglob(TRAJECTORY)]
        return Observed(self.name, right, began, wall, timelines, sampler).figures(batch)

    def _run(self, stack: Stack, batch: Batch, run_id: str) -> int:
        """The number of right rollouts."""
        asked = ["-l", str(batch.rollouts), "-c", str(batch.agents), "--run-id", run_id]
        document = stack.run([*AGENT, *asked], stack.home.folder / "run.log")
        return right_answers(document)


class PeerSide:
    """A peer's own command line, in a new folder for each batch."""

    def __init__(self, peer: Peer, trajectories: str, folder: Path, endpoint: Endpoint) -> None:
        """`trajectories`: a glob for the agents' own files in the folder of a job."""
        self._peer = peer
        self._trajectories = trajectories
        self._folder = folder
        self._endpoint = endpoint
        self._repository = common_job.make_repository(folder / "repository")

    def measure(self, batch: Batch) -> Figures:
        self._endpoint.reset(latency_s=batch.latency_s)
        folder = self._folder / f"at-{batch.agents}"
        folder.mkdir()
        job = Job(folder, self._repository, batch.rollouts, batch.agents, self._endpoint.url)
        self._peer.prepare(job)
        argv, env = self._peer.command(job)
        with Meter.open(f"peer-{batch.agents}", folder / "meter") as meter:
            sampler, began = Sampler(meter), time.time()
            with sampler.running():
                code = meter.run(argv, job.log, env=env)
            if code != 0:
                log = job.log.read_text(errors="replace")
                raise RuntimeError(f"{self._peer.name} ended with {code}: {log[-2000:]}")
            right = self._right(job, meter)
        wall = time.time() - began
        timelines = [Timeline.read(path) for path in folder.glob(self._trajectories)]
        shutil.rmtree(folder)
        return Observed(self._peer.name, right, began, wall, timelines, sampler).figures(batch)

    def _right(self, job: Job, meter: Meter) -> int:
        if self._peer.grades:
            return self._peer.verdicts(job).resolved
        grading = Grading(job.repository, job.folder / "grading", meter)
        return grading.resolved(self._peer.patches(job), job.workers)


@dataclass(frozen=True)
class Observed:
    """The measurements of one batch. `began`: seconds since the epoch."""

    side: str
    right: int
    began: float
    wall_s: float
    timelines: Sequence[Timeline]
    sampler: Sampler

    def figures(self, batch: Batch) -> Figures:
        found = rates(self.timelines, batch.agents, self.began)
        p50, p95 = added_latency(self.timelines, batch.latency_s)
        window = (found.steady_from, found.steady_to)
        return Figures(
            side=self.side,
            agents=batch.agents,
            rollouts=batch.rollouts,
            right=self.right,
            wall_s=self.wall_s,
            burst_s=found.burst_s,
            steady=found.steady,
            added_p50_ms=p50,
            added_p95_ms=p95,
            cores_per_agent=self.sampler.cores(*window) / batch.agents,
            idle=self.sampler.idle(*window),
            memory_mb=self.sampler.memory,
        )
