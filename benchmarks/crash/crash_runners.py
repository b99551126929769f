"""One side of the crash test: run, kill at the right calls, resume, count leaks."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from benchmarks import common_job
from benchmarks.cpu_measurement import Meter, command_of, kill_all, parent_of
from benchmarks.crash.crash_outcome import Crash, LeftBehind, Outcome
from benchmarks.crash.kill_points import LIMIT_S, PAUSE_S, SETTLE_S, Acts, mounts_below
from benchmarks.model_endpoint import Endpoint
from benchmarks.peers.base import Grading, Job, Peer, Verdicts
from benchmarks.perdure_stack import DATASET, PERDURE, ROOT, Home, Stack, right_answers
from perdure.sandboxes.base import identity_of
from perdure.sandboxes.host.host_processes import ProcessId, kill_process
from perdure.sandboxes.host.sandbox_folder import SandboxFolder

RUN = "crash"


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
            acts = Acts(crash, self._endpoint, client)
            acts.kill_engine()
            acts.kill_sandboxes(self._kill_sandboxes)
            acts.kill_everything(lambda: _kill_with_client(stack, client))
            finished = self._finished()
            began = time.monotonic()
            stack = Stack.start(self._home, meter)
            document = stack.run([*self._asked(crash)], self._folder / "run.log")
            resume_wall = time.monotonic() - began
            left = _settled(lambda: self._left_behind(crash, stack, meter))
            calls, cpu = len(self._endpoint.bought()), meter.seconds()
            stack.stop()
        return Outcome(
            side=self.name,
            rollouts=crash.rollouts,
            ideal_calls=crash.ideal_calls,
            finished_at_kill=finished,
            calls=calls,
            in_flight=acts.in_flight(),
            resume_wall=resume_wall,
            cpu=cpu,
            right=right_answers(document),
            zeros=sum(rollout["reward"] == 0 for rollout in document["rollouts"]),
            left_behind=left,
            sandboxes_killed=crash.sandboxes,
            attempts_lost=sum(r["attempts"] - 1 for r in document["rollouts"]),
        )

    def _warm_up(self, crash: Crash) -> None:
        """Build the environment and the agent, which each host needs once, before the measurement."""
        self._home.add_instances(common_job.make_tree(self._folder / "tree"), crash.rollouts)
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

    def _kill_sandboxes(self, count: int) -> tuple[str, ...]:
        """Kill agents' sandboxes with a call in flight: alternately the keeper and the holder."""
        killed: list[str] = []
        deadline = time.monotonic() + LIMIT_S
        while len(killed) < count:
            for box in self._working(killed):
                kill_process(_victim(box, len(killed)), signal.SIGKILL)
                killed.append(box.identity)
                if len(killed) == count:
                    break
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {len(killed)} sandboxes could be killed")
            time.sleep(PAUSE_S)
        return tuple(killed)

    def _working(self, without: Collection[str]) -> Iterator[SandboxFolder]:
        asking = {c.session for c in self._endpoint.bought() if c.ended == float("inf")}
        for path in (self._home.folder / "sandboxes").glob("*/p-*-agent-1"):
            if path.name in asking and path.name not in without and SandboxFolder(path).alive:
                yield SandboxFolder(path)

    def _finished(self) -> int:
        return len(list((self._home.folder / "store/runs" / RUN).glob("rollouts/*/*/episode.json")))

    def _left_behind(self, crash: Crash, stack: Stack, meter: Meter) -> LeftBehind:
        """Count leaks while the stack still runs, because `perdure down` would sweep them."""
        state = stack.state()
        ours = {state.pid, *(child.pid for child in state.children.values())}
        ours.add(stack.pid)
        return LeftBehind(
            folders=len(list((self._home.folder / "sandboxes").glob("*/p-*"))),
            mounts=mounts_below(self._home.folder),
            groups=_groups(RUN, crash),
            processes=sum(_is_left(pid, ours) for pid in meter.pids()),
        )


class CrashedPeer:
    def __init__(self, peer: Peer, folder: Path, endpoint: Endpoint) -> None:
        self._peer = peer
        self._folder = folder
        self._endpoint = endpoint

    def measure(self, crash: Crash) -> Outcome:
        repository = common_job.make_repository(self._folder / "repository")
        self._endpoint.reset(latency_s=crash.latency_s)
        job = Job(
            self._folder,
            repository,
            crash.rollouts,
            crash.workers,
            self._endpoint.url,
            turn_limit=crash.turns + 1,
        )
        self._peer.prepare(job)
        with Meter.open("crash-peer", self._folder / "meter") as meter:
            argv, env = self._peer.command(job)
            with job.log.open("wb") as log:
                runner = meter.popen(argv, env=env, stdout=log, stderr=log)
            acts = Acts(crash, self._endpoint, runner)
            acts.kill_engine()
            acts.kill_sandboxes(lambda count: _kill_sandboxes(meter, job, crash.turns, count))
            acts.kill_everything(lambda: _kill(runner))
            finished = len(self._peer.patches(job))
            began = time.monotonic()
            argv, env = self._peer.command(job, again=True)
            meter.run(argv, job.log, env=env)
            resume_wall = time.monotonic() - began
            left = _settled(lambda: _left_by_peer(job, meter))
            cpu = meter.seconds()
            kill_all(meter.pids(), signal.SIGKILL)
        verdicts = self._verdicts(job)
        return Outcome(
            side=f"{self._peer.name} {self._peer.version}",
            rollouts=crash.rollouts,
            ideal_calls=crash.ideal_calls,
            finished_at_kill=finished,
            calls=len(self._endpoint.bought()),
            in_flight=acts.in_flight(),
            resume_wall=resume_wall,
            cpu=cpu,
            right=verdicts.resolved,
            zeros=verdicts.zeros,
            left_behind=left,
            sandboxes_killed=crash.sandboxes,
        )

    def _verdicts(self, job: Job) -> Verdicts:
        if self._peer.grades:
            return self._peer.verdicts(job)
        with Meter.open("crash-grade", job.folder / "grading-meter") as meter:
            grading = Grading(job.repository, job.folder / "grading", meter)
            return grading.verdicts(self._peer.patches(job), job.workers)


def _kill_with_client(stack: Stack, client: "subprocess.Popen[bytes]") -> None:
    stack.kill()
    _kill(client)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _victim(box: SandboxFolder, number: int) -> ProcessId | None:
    return box.keeper if number % 2 == 0 else box.holder


def _kill_sandboxes(meter: Meter, job: Job, turns: int, count: int) -> tuple[str, ...]:
    """Kill `count` of a peer's sandboxes while they run a command of the agent.

    Such a sandbox is a folder and one bubblewrap process per command. Its process dies and its folder
    is taken away, so that later commands fail, as in a container that was killed. No model call is in
    flight while a command runs, so this returns no session.
    """
    killed = 0
    deadline = time.monotonic() + LIMIT_S
    while killed < count:
        for pid in meter.pids():
            box = sandbox_of(command_of(pid), job.temporary, common_job.commands(turns))
            if box is None or not box.exists():
                continue
            box.rename(job.temporary / f"killed-{killed}")
            kill_all((p for p in meter.pids() if str(box) in command_of(p)), signal.SIGKILL)
            killed += 1
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {killed} sandboxes could be killed")
    return ()


def sandbox_of(command: str, folder: Path, agents: Collection[str]) -> Path | None:
    """The sandbox's folder, a child of `folder`, if this is the command line of a bubblewrap process
    that runs one of the `agents`' commands; otherwise None."""
    if not any(command.endswith(f" bash -c {one}") for one in agents):
        return None
    paths = (Path(word) for word in command.split() if word.startswith(f"{folder}/"))
    return next((folder / path.relative_to(folder).parts[0] for path in paths), None)


def _settled(look: Callable[[], LeftBehind]) -> LeftBehind:
    """Leaks after the clean-up time, which is the same for every side."""
    deadline = time.monotonic() + SETTLE_S
    while not (left := look()).nothing and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return left


def _left_by_peer(job: Job, meter: Meter) -> LeftBehind:
    prefixes = ("harbor-box-", "inspect-box-", "mini")
    folders = [p for p in job.temporary.glob("*") if p.name.startswith(prefixes)]
    return LeftBehind(
        folders=len(folders),
        mounts=mounts_below(job.temporary),
        groups=0,
        processes=len(meter.pids()),
    )


def _is_left(pid: int, ours: Collection[int]) -> bool:
    """Whether a process runs and does not belong to the running stack. The stack's own processes, their
    idle children (fork server, output readers) and the host's life process do not count."""
    serves = pid in ours or parent_of(pid) in ours
    command = command_of(pid)
    return bool(command) and not serves and "workers.host.host_heartbeat" not in command


def _groups(run_id: str, crash: Crash) -> int:
    """Counts control groups on this host that are named after this run's sandboxes."""
    names = set()
    for name in common_job.instance_ids(crash.rollouts):
        rollout = f"rollout/{run_id}/{name}/0"
        for purpose in ("agent", "grade"):
            for generation in range(1, 4):
                names.add("perdure-" + identity_of(run_id, rollout, purpose, generation))
    return sum(folder in names for _, folders, _ in os.walk("/sys/fs/cgroup") for folder in folders)
