"""One side of the comparison. It runs the common job once and measures the cost."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import common_job
from benchmarks.cpu_measurement import Meter
from benchmarks.model_endpoint import Endpoint
from benchmarks.peers.base import Grading, Job, Peer
from benchmarks.perdure_stack import Home, Stack, right_answers
from perdure.storage import store_keys


@dataclass(frozen=True)
class Size:
    """The size of a job: `workers` rollouts at a time, each model call takes `latency_s`."""

    rollouts: int
    workers: int
    latency_s: float


@dataclass(frozen=True)
class Sample:
    """One run of one side, in seconds. `cpu`: of all processes except the endpoint."""

    side: str
    rollouts: int
    right: int
    """Rollouts that the hidden test in a fresh sandbox resolved."""
    start_wall: float
    """Perdure's `up` and first rollout. `wall` includes a peer's start."""
    start_cpu: float
    wall: float
    cpu: float
    grading_wall: float
    """Seconds of grading by this benchmark, for a peer that does not grade."""
    grading_cpu: float
    endpoint_cpu: float
    window: float
    """Seconds from the first model call to the last answer."""
    calls: int
    split: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each of Perdure's parts."""
    objects: int = 0
    """The rollouts' objects in Perdure's store."""
    bytes: int = 0


class Side(Protocol):
    largest: int
    is_service: bool
    """Whether every sample measures its start. If so, no run of one rollout is needed."""

    def measure(self, size: Size) -> Sample: ...


class PerdureSide:
    """The laptop stack, started for each sample. Environments and tools are built before.

    The start includes a first rollout, in which gateway and worker load everything once.
    """

    is_service = True

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        endpoint: Endpoint,
        *,
        largest: int = 10**9,
        with_twins: bool = False,
    ) -> None:
        """`arguments`: those of `perdure run`, including the agent. `with_twins`: the row's hidden test has
        a twin, so a grading has two runs unless the arguments say `twin_pairs=0`."""
        self.name = f"Perdure, {name}"
        self.largest = largest
        self._arguments = list(arguments)
        self._folder = folder
        self._endpoint = endpoint
        self._home = Home(folder / "home", endpoint.url)
        self._runs = 0
        self._with_twins = with_twins

    def warm_up(self, instances: int) -> None:
        """Build what each host needs once: the environment and the agent's program."""
        tree = common_job.make_tree(self._folder / "tree")
        self._home.add_instances(tree, instances, with_twins=self._with_twins)
        self.measure(Size(1, 1, 0.0))

    def measure(self, size: Size) -> Sample:
        self._endpoint.reset(latency_s=size.latency_s)
        self._runs += 1
        with Meter.open(f"perdure-{self._runs}", self._folder / "meter") as meter:
            began = time.monotonic()
            stack = Stack.start(self._home, meter)
            try:
                self._rollouts(stack, Size(1, 1, size.latency_s), f"first-{self._runs}")
                start_wall = time.monotonic() - began
                self._endpoint.reset(latency_s=size.latency_s)
                return self._run(size, stack, start_wall)
            finally:
                stack.stop()

    def _rollouts(self, stack: Stack, size: Size, run_id: str) -> dict[str, Any]:
        asked = [*self._arguments, "-l", str(size.rollouts), "-c", str(size.workers)]
        return stack.run([*asked, "--run-id", run_id], self._folder / "run.log")

    def _kept(self, run_id: str) -> list[int]:
        """Bytes of each object of the run's rollouts in the store."""
        folder = self._home.folder / "store" / store_keys.rollouts(run_id)
        return [path.stat().st_size for path in folder.rglob("*") if path.is_file()]

    def _run(self, size: Size, stack: Stack, start_wall: float) -> Sample:
        start_cpu, before, endpoint_cpu = stack.meter.seconds(), stack.split(), self._cpu()
        began = time.monotonic()
        run_id = f"run-{self._runs}"
        document = self._rollouts(stack, size, run_id)
        wall, cpu = time.monotonic() - began, stack.meter.seconds() - start_cpu
        calls, after, kept = self._endpoint.calls(), stack.split(), self._kept(run_id)
        return Sample(
            side=self.name,
            rollouts=size.rollouts,
            right=right_answers(document),
            start_wall=start_wall,
            start_cpu=start_cpu,
            wall=wall,
            cpu=cpu,
            grading_wall=0.0,
            grading_cpu=0.0,
            endpoint_cpu=self._cpu() - endpoint_cpu,
            window=calls.window_s,
            calls=calls.total,
            split={part: after[part] - before[part] for part in after},
            objects=len(kept),
            bytes=sum(kept),
        )

    def _cpu(self) -> float:
        return self._endpoint.meter.seconds()


class PeerSide:
    """A peer's own command line, in a new folder for each sample."""

    largest = 10**9
    is_service = False

    def __init__(self, peer: Peer, folder: Path, endpoint: Endpoint) -> None:
        self._peer = peer
        self._folder = folder
        self._endpoint = endpoint
        self._repository = common_job.make_repository(folder / "repository")
        self._runs = 0

    def warm_up(self) -> None:
        """Warm the disk cache: a first run reads all modules from disk, which would count as its start."""
        self.measure(Size(1, 1, 0.0))

    def measure(self, size: Size) -> Sample:
        self._endpoint.reset(latency_s=size.latency_s)
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        job = Job(folder, self._repository, size.rollouts, size.workers, self._endpoint.url)
        self._peer.prepare(job)
        argv, env = self._peer.command(job)
        endpoint_cpu = self._endpoint.meter.seconds()
        with Meter.open(f"peer-{self._runs}", folder / "meter") as meter:
            began = time.monotonic()
            code = meter.run(argv, job.log, env=env)
            wall, cpu = time.monotonic() - began, meter.seconds()
        if code != 0:
            raise RuntimeError(f"{self._peer.name} ended with {code}: {_tail(job.log)}")
        calls = self._endpoint.calls()
        used = self._endpoint.meter.seconds() - endpoint_cpu
        right, grading_wall, grading_cpu = self._grade(job)
        shutil.rmtree(folder)
        return Sample(
            side=self._peer.name,
            rollouts=size.rollouts,
            right=right,
            start_wall=0.0,
            start_cpu=0.0,
            wall=wall,
            cpu=cpu,
            grading_wall=grading_wall,
            grading_cpu=grading_cpu,
            endpoint_cpu=used,
            window=calls.window_s,
            calls=calls.total,
        )

    def _grade(self, job: Job) -> tuple[int, float, float]:
        """The number of right results, and the wall and CPU seconds of our grading (0 if the peer grades)."""
        if self._peer.grades:
            return self._peer.verdicts(job).resolved, 0.0, 0.0
        with Meter.open(f"grade-{self._runs}", job.folder / "grading-meter") as meter:
            began = time.monotonic()
            grading = Grading(job.repository, job.folder / "grading", meter)
            right = grading.resolved(self._peer.patches(job), job.workers)
            return right, time.monotonic() - began, meter.seconds()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
