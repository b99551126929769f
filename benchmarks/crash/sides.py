"""One side of the crash test: run, kill at the right call, resume, count what is left."""

import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import toy
from benchmarks.endpoint import Endpoint
from benchmarks.measuring import Meter, command_of, name_of, parent_of
from benchmarks.peers.base import Grading, Job, Peer
from benchmarks.perdure_stack import DATASET, PERDURE, ROOT, Home, Stack, right_answers
from perdure.sandboxes.base import identity_of

RUN = "crash"
PAUSE_S = 0.02
LIMIT_S = 300.0
SETTLE_S = 5.0
"""Seconds that clean-up may take before something counts as left behind."""


@dataclass(frozen=True)
class Crash:
    """The job, and when it is killed. `at`: share of all calls."""

    rollouts: int
    turns: int
    latency_s: float
    workers: int
    at: float

    @property
    def ideal_calls(self) -> int:
        return self.rollouts * self.turns


@dataclass(frozen=True)
class LeftBehind:
    """The side's own sandbox folders, mounts, control groups and processes."""

    folders: int
    mounts: int
    groups: int
    processes: int

    def __str__(self) -> str:
        found = {name: count for name, count in vars(self).items() if count}
        return ", ".join(f"{count} {name}" for name, count in found.items()) or "0"

    @property
    def nothing(self) -> bool:
        return not any(vars(self).values())


@dataclass(frozen=True)
class Outcome:
    """What the crash cost. `calls`: model calls of both halves together."""

    side: str
    rollouts: int
    ideal_calls: int
    calls_at_kill: int
    finished_at_kill: int
    calls: int
    resume_wall: float
    right: int
    left_behind: LeftBehind
    attempts_lost: int = 0
    """Sandboxes that rollouts lost."""

    @property
    def bought_again(self) -> int:
        return self.calls - self.ideal_calls

    @property
    def keeps_its_promise(self) -> bool:
        cheap = self.bought_again <= 0.02 * self.ideal_calls
        return cheap and self.left_behind.nothing and self.right == self.rollouts


class CrashedPerdure:
    def __init__(
        self, name: str, arguments: Sequence[str], folder: Path, endpoint: Endpoint
    ) -> None:
        self.name = f"Perdure, {name}"
        self._arguments = arguments
        self._folder = folder
        self._endpoint = endpoint
        self._home = Home(folder / "home", endpoint.url)

    def measure(self, crash: Crash) -> Outcome:
        self._warm_up(crash)
        self._endpoint.reset(latency_s=crash.latency_s)
        with Meter.open("crash", self._folder / "meter") as meter:
            stack = Stack.start(self._home, meter)
            client = self._start_run(crash, meter)
            at_kill = _wait_for_calls(self._endpoint, crash, client)
            finished = self._finished()
            stack.kill()
            client.kill()
            client.wait()
            began = time.monotonic()
            stack = Stack.start(self._home, meter)
            document = stack.run([*self._asked(crash)], self._folder / "run.log")
            resume_wall = time.monotonic() - began
            left = self._left_behind(crash, stack, meter)
            calls = self._endpoint.calls().total
            stack.stop()
        return Outcome(
            side=self.name,
            rollouts=crash.rollouts,
            ideal_calls=crash.ideal_calls,
            calls_at_kill=at_kill,
            finished_at_kill=finished,
            calls=calls,
            resume_wall=resume_wall,
            right=right_answers(document),
            left_behind=left,
            attempts_lost=sum(r["attempts"] - 1 for r in document["rollouts"]),
        )

    def _warm_up(self, crash: Crash) -> None:
        """Build environment and agent, once per host, before anything is measured."""
        self._home.add_instances(toy.make_tree(self._folder / "tree"), crash.rollouts)
        self._endpoint.reset(latency_s=0.0)
        with Meter.open("crash-warm", self._folder / "meter-warm") as meter:
            stack = Stack.start(self._home, meter)
            stack.run([*self._arguments, "-l", "1", "--run-id", "warm"], self._folder / "warm.log")
            stack.stop()

    def _asked(self, crash: Crash) -> list[str]:
        size = ["-l", str(crash.rollouts), "-c", str(crash.workers)]
        return [*self._arguments, *size, "--run-id", RUN]

    def _start_run(self, crash: Crash, meter: Meter) -> "subprocess.Popen[bytes]":
        with (self._folder / "first.log").open("wb") as log:
            return meter.popen(
                [*PERDURE, "run", DATASET, *self._asked(crash), "--json"],
                env=self._home.environment(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _finished(self) -> int:
        return len(list((self._home.folder / "store/runs" / RUN).glob("rollouts/*/*/episode.json")))

    def _left_behind(self, crash: Crash, stack: Stack, meter: Meter) -> LeftBehind:
        """Count while the stack still runs, because `perdure down` would sweep."""
        state = stack.state()
        ours = {state.pid, *(child.pid for child in state.children.values())}
        ours.add(stack.pid)
        deadline = time.monotonic() + SETTLE_S
        while True:
            left = LeftBehind(
                folders=len(list((self._home.folder / "sandboxes").glob("*/p-*"))),
                mounts=_mounts_below(self._home.folder),
                groups=_groups(RUN, crash),
                processes=sum(_is_left(pid, ours) for pid in meter.pids()),
            )
            if left.nothing or time.monotonic() > deadline:
                return left
            time.sleep(PAUSE_S)


def _is_left(pid: int, ours: Collection[int]) -> bool:
    """Processes that run, and are neither of the stack nor a running worker's zygote, which
    boots its next sandboxes."""
    zygote = name_of(pid) == "perdure-zygote" and parent_of(pid) in ours
    return pid not in ours and not zygote and bool(command_of(pid))


class CrashedPeer:
    def __init__(self, peer: Peer, folder: Path, endpoint: Endpoint) -> None:
        self._peer = peer
        self._folder = folder
        self._endpoint = endpoint

    def measure(self, crash: Crash) -> Outcome:
        repository = toy.make_repository(self._folder / "repository")
        self._endpoint.reset(latency_s=crash.latency_s)
        job = Job(self._folder, repository, crash.rollouts, crash.workers, self._endpoint.url)
        self._peer.prepare(job)
        with Meter.open("crash-peer", self._folder / "meter") as meter:
            argv, env = self._peer.command(job)
            with job.log.open("wb") as log:
                runner = meter.popen(argv, env=env, stdout=log, stderr=log)
            at_kill = _wait_for_calls(self._endpoint, crash, runner)
            finished = len(self._peer.patches(job))
            runner.send_signal(signal.SIGKILL)
            runner.wait()
            began = time.monotonic()
            argv, env = self._peer.command(job, again=True)
            meter.run(argv, job.log, env=env)
            resume_wall = time.monotonic() - began
            left = self._left_behind(job, meter)
        return Outcome(
            side=self._peer.name,
            rollouts=crash.rollouts,
            ideal_calls=crash.ideal_calls,
            calls_at_kill=at_kill,
            finished_at_kill=finished,
            calls=self._endpoint.calls().total,
            resume_wall=resume_wall,
            right=self._right(job),
            left_behind=left,
        )

    def _left_behind(self, job: Job, meter: Meter) -> LeftBehind:
        folders = [p for p in job.temporary.glob("*") if p.name.startswith(("harbor-box-", "mini"))]
        return LeftBehind(
            folders=len(folders),
            mounts=_mounts_below(job.temporary),
            groups=0,
            processes=len(meter.pids()),
        )

    def _right(self, job: Job) -> int:
        if self._peer.grades:
            return self._peer.verdicts(job).resolved
        with Meter.open("crash-grade", job.folder / "grading-meter") as meter:
            grading = Grading(job.repository, job.folder / "grading", meter)
            return grading.resolved(self._peer.patches(job), job.workers)


def _wait_for_calls(endpoint: Endpoint, crash: Crash, runner: "subprocess.Popen[bytes]") -> int:
    """Wait until that share of the calls was made. Raises: RuntimeError if the runner ends before."""
    deadline = time.monotonic() + LIMIT_S
    while (calls := endpoint.calls().total) < crash.at * crash.ideal_calls:
        if runner.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"only {calls} calls were made before the run ended")
        time.sleep(PAUSE_S)
    return calls


def _mounts_below(folder: Path) -> int:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sum(line.split()[1].startswith(str(folder)) for line in lines)


def _groups(run_id: str, crash: Crash) -> int:
    """Control groups named after this run's sandboxes, anywhere on the host."""
    names = set()
    for name in toy.instance_ids(crash.rollouts):
        rollout = f"rollout/{run_id}/{name}/0"
        for purpose in ("agent", "grade"):
            for generation in range(1, 4):
                names.add("perdure-" + identity_of(run_id, rollout, purpose, generation))
    return sum(folder in names for _, folders, _ in os.walk("/sys/fs/cgroup") for folder in folders)
