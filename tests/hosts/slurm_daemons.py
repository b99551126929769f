"""A Slurm cluster on this machine: munged, slurmctld and one slurmd per node, all of Debian.

The nodes share the machine's disk, host name and address; each has its own port. A killed node loses
what Slurm runs on it.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from perdure.serving.ray_cluster import process_tree
from tests import held_ports
from tests.stack.host_requirements import cmdline, pids
from tests.stack.wait_until import until

NODES = ("node1", "node2")
PARTITION, URGENT = "spot", "urgent"
"""Jobs of the second preempt those of the first."""
CPUS = 2
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
SEARCHED = f"{os.environ['PATH']}:/usr/sbin"
CONFIGURATION = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
SlurmdTimeout=30
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName={partition} Nodes={names} Default=YES State=UP
PartitionName={urgent} Nodes={names} State=UP PriorityTier=9 PreemptMode=OFF
"""


def why_not() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    packages = "apt-get install slurmctld slurmd slurm-client munge util-linux"
    return f"{', '.join(missing)}: not installed (Debian: {packages})" if missing else ""


class SlurmDaemons:
    def __init__(self, folder: Path, nodes: Sequence[str] = NODES) -> None:
        self.folder, self.nodes = folder, nodes
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        self.folder.mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._configure()
        paths = {"key-file": key} | {
            f"{kind}{'' if kind == 'socket' else '-file'}": self.folder / f"munge.{kind}"
            for kind in ("socket", "pid", "log", "seed")
        }
        munged = ("munged", "--foreground", "--force")
        self._start("munged", *munged, *(f"--{name}={path}" for name, path in paths.items()))
        await until((self.folder / "munge.socket").exists, "munged listens")
        await self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        idle = dict.fromkeys(self.nodes, "idle")
        await until(lambda: self._states() == idle, f"{len(idle)} idle nodes")

    async def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        await until(lambda: "UP" in self._tried("scontrol", "ping"), "slurmctld answers")

    def start_node(self, name: str, *, without: Path | None = None) -> None:
        """`without`: a folder that the node does not see. Needs root."""
        slurmd = ("slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])
        hide = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
        self._start(name, *((*hide, str(without)) if without else ()), *slurmd)

    def stop_node(self, name: str) -> None:
        self._kill(name)

    async def save_state(self) -> None:
        """Make the controller save which jobs run. If it is killed before, the next controller ends
        the jobs that it does not know."""
        began, saved = time.time(), self.folder / "state" / "job_state"
        for job, _, _ in self.running():
            self.run("scontrol", "update", f"JobId={job}", "Comment=runs")
        await until(lambda: saved.stat().st_mtime > began, "the controller saves its state")

    def kill_controller(self) -> None:
        """kill -9; nodes and jobs stay."""
        self._kill("slurmctld")

    def kill_node(self, name: str) -> None:
        """kill -9 of its slurmd and of the jobs there, and of their processes."""
        [job] = [job for job, _, node in self.running() if node == name]
        [step] = self._steps(job)
        below = process_tree(step)
        self._kill(name)
        for pid in (step, *below):
            with contextlib.suppress(ProcessLookupError):  # a command of its agent has ended
                os.kill(pid, signal.SIGKILL)

    def running(self) -> list[tuple[str, int, str]]:
        """Job id, array task and node of what runs."""
        lines = self.run("squeue", "-h", "--array", "-t", "RUNNING", "-o", "%A %K %N").splitlines()
        return [(job, int(task), node) for job, task, node in map(str.split, lines)]

    def active(self) -> str:
        return self.run("squeue", "-h", "--array", "-o", "%i %T %N %r")

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.environment},
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}{done.stdout}"
        return done.stdout

    async def stop(self) -> None:
        """Nothing of it remains but its files."""
        for step in self._steps():
            for pid in (step, *process_tree(step)):
                os.kill(pid, signal.SIGKILL)
        for name in list(self._processes):
            self._kill(name)

    def _configure(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        with held_ports.held(1 + len(self.nodes)) as (controller, *ports):
            nodes = [
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
                for name, port in zip(self.nodes, ports, strict=True)
            ]
            text = CONFIGURATION.format(
                name=f"perdure-{os.getpid()}",
                host=host,
                controller=controller,
                user=getpass.getuser(),
                folder=self.folder,
                nodes="\n".join(nodes),
                partition=PARTITION,
                urgent=URGENT,
                names=",".join(self.nodes),
            )
        Path(self.environment["SLURM_CONF"]).write_text(text)

    def _start(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def _steps(self, job: str = "") -> Sequence[int]:
        """The pids of slurmstepd for our jobs, or for one. They outlive their slurmd."""
        name = f"slurmstepd: [{job}".encode()
        ours = os.fsencode(self.folder)
        found = [pid for pid in pids() if cmdline(pid).startswith(name)]
        return [pid for pid in found if ours in Path(f"/proc/{pid}/environ").read_bytes()]

    def _states(self) -> dict[str, str]:
        lines = self._tried("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return {name: state for name, _, state in (line.partition(" ") for line in lines)}

    def _tried(self, *argv: str) -> str:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.environment},
        )
        return done.stdout
