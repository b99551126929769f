"""The interface of a peer: it runs the common job and resumes it after a crash."""

import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from benchmarks import common_job
from benchmarks.cpu_measurement import Meter


@dataclass(frozen=True)
class Job:
    """One batch. `folder`: the folder for this run's outputs, temporary files and logs."""

    folder: Path
    repository: Path
    rollouts: int
    workers: int
    endpoint_url: str
    turn_limit: int = 60
    """An agent ends after this many turns, even if its sandbox runs no more commands."""

    @property
    def log(self) -> Path:
        return self.folder / "runner.log"

    @property
    def temporary(self) -> Path:
        """The folder of the peer's sandboxes, where leaks are counted."""
        return self.folder / "tmp"


@dataclass(frozen=True)
class Verdicts:
    """The results of a batch. `zeros`: results that say that the agent did not solve the task. A rollout
    without a verdict counts as neither."""

    resolved: int
    zeros: int


class Peer(Protocol):
    name: ClassVar[str]
    version: ClassVar[str]
    grades: ClassVar[bool]
    """False: this benchmark grades its patches."""

    def prepare(self, job: Job) -> None:
        """Write the inputs."""
        ...

    def command(self, job: Job, *, again: bool = False) -> tuple[list[str], dict[str, str]]:
        """The command line and its environment. `again`: resume in the documented way."""
        ...

    def patches(self, job: Job) -> Mapping[str, str]:
        """Maps each result to its diff."""
        ...

    def verdicts(self, job: Job) -> Verdicts:
        """The verdicts of the peer's own grading."""
        ...


@dataclass
class Grading:
    """Runs the hidden test in fresh bubblewrap sandboxes for peers that do not grade."""

    repository: Path
    folder: Path
    meter: Meter
    flags: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.flags = common_job.bwrap_flags(self.repository)
        self.folder.mkdir(parents=True, exist_ok=True)

    def verdicts(self, patches: Mapping[str, str], workers: int) -> Verdicts:
        resolved = self.resolved(patches, workers)
        return Verdicts(resolved, zeros=len(patches) - resolved)

    def resolved(self, patches: Mapping[str, str], workers: int = 8) -> int:
        with ThreadPoolExecutor(workers) as pool:
            return sum(pool.map(self._passes, patches.values()))

    def _passes(self, patch: str) -> bool:
        with tempfile.TemporaryDirectory(dir=self.folder) as box:
            (Path(box) / "model.patch").write_text(patch)
            (Path(box) / "test_calc.py").write_text(common_job.TEST)
            script = (
                "git clone -q /repo w && cd w && git apply ../model.patch && "
                f"cp ../test_calc.py . && {common_job.PYTHON} test_calc.py"
            )
            argv = ["bwrap", *self.flags, "--bind", box, "/box", "--chdir", "/box"]
            process = self.meter.popen(
                [*argv, "bash", "-c", script],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )
            return process.wait() == 0
