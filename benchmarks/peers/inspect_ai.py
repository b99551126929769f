"""Inspect with a checkpoint after every turn: `inspect eval-set --checkpoint`, its `react` agent, and a
bubblewrap sandbox."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks import common_job
from benchmarks.peers.base import Job, Verdicts
from benchmarks.peers.peer_environments import Pinned, Unavailable, environment
from perdure.adoption import reader_process
from perdure.adoption.foreign_rollouts import ForeignRollout

VERSION = "0.3.285"
PINNED = Pinned("inspect", (f"inspect-ai=={VERSION}", "openai==3.57.0"), ("3.13", "3.12", "3.11"))
RESTIC = "0.18.1"
PLUGIN = Path(__file__).parent / "inspect_plugin"
ROOT = Path(__file__).parents[2]
CHECKPOINT = {
    "trigger": {"type": "turn", "every": 1},
    "sandbox_paths": {"default": {"paths": ["/app"], "strategy": "archive"}},
    "max_consecutive_failures": 0,
}
"""After a failed checkpoint, the sample fails and is retried from the last good one."""


class InspectAi:
    name: ClassVar[str] = "Inspect"
    version: ClassVar[str] = VERSION
    grades: ClassVar[bool] = True

    def __init__(self, root: Path) -> None:
        """Raises: Unavailable."""
        self._environment = environment(PINNED, root)
        self._cache = self._environment / "cache"
        _provide_restic(self._environment / "bin" / "inspect", self._cache)

    def prepare(self, job: Job) -> None:
        job.temporary.mkdir(parents=True)
        (job.folder / "checkpoint.json").write_text(json.dumps(CHECKPOINT))

    def command(self, job: Job, *, again: bool = False) -> tuple[list[str], dict[str, str]]:
        """A resumed run uses the same command, because an eval set continues."""
        argv = [str(self._environment / "bin" / "inspect"), "eval-set", "--display", "plain"]
        argv += [f"{PLUGIN / 'bench_task.py'}@calc", "-T", f"rollouts={job.rollouts}"]
        argv += ["--model", "openai-api/bench/policy", "--log-dir", str(job.folder / "logs")]
        argv += ["--checkpoint", str(job.folder / "checkpoint.json"), "--log-buffer", "1"]
        argv += ["--max-samples", str(job.workers), "--max-subprocesses", str(job.workers)]
        argv += ["--continue-on-fail", "--turn-limit", str(job.turn_limit)]
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(job.folder),
            "TMPDIR": str(job.temporary),
            "XDG_CACHE_HOME": str(self._cache),
            "PYTHONPATH": os.pathsep.join(map(str, (PLUGIN, ROOT))),
            "BENCH_API_KEY": "none",
            "BENCH_BASE_URL": f"{job.endpoint_url}/v1",
            "BENCH_BWRAP": json.dumps(common_job.bwrap_flags(job.repository)),
        }
        return argv, env

    def patches(self, job: Job) -> Mapping[str, str]:
        return {one.instance_id: one.patch or "" for one in self._samples(job) if one.scores}

    def verdicts(self, job: Job) -> Verdicts:
        return counted(self._samples(job))

    def _samples(self, job: Job) -> tuple[ForeignRollout, ...]:
        """The samples of its logs, as `perdure adopt` reads them."""
        if not (job.folder / "logs").is_dir():
            return ()
        python = str(self._environment / "bin" / "python")
        return reader_process.read(reader_process.INSPECT, job.folder / "logs", python).rollouts


def counted(samples: Sequence[ForeignRollout]) -> Verdicts:
    """A sample that ended with an error has no scores."""
    given = [sample.scores["hidden_test"] for sample in samples if sample.scores]
    return Verdicts(resolved=given.count(1), zeros=given.count(0))


def _provide_restic(inspect: Path, cache: Path) -> None:
    """Put restic where Inspect looks for it: this host's restic 0.18, or else the one that Inspect
    downloads. Its checkpoints need one on the host for messages, even if sandboxes are archived.

    Raises: Unavailable.
    """
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    cached = cache / "inspect_ai" / "bin" / f"restic_{RESTIC}_linux_{machine}"
    if cached.exists():
        return
    own = shutil.which("restic")
    if own and " 0.18." in subprocess.check_output([own, "version"], text=True):
        cached.parent.mkdir(parents=True)
        shutil.copy2(own, cached)
        return
    env = {"PATH": os.environ["PATH"], "HOME": str(cache), "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [inspect, "download", "restic"], capture_output=True, env=env, check=False
    )
    if done.returncode != 0:
        raise Unavailable(
            f"Inspect's checkpoints need restic {RESTIC}, which cannot be downloaded here: put restic"
            " 0.18 on PATH"
        )
