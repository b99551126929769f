"""Harbor with a bubblewrap environment and a bash-tool agent, given by import path. The agent's loop runs
on the host, like Harbor's own agents of that kind, or in a Python in the sandbox, like Perdure's."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks import common_job
from benchmarks.peers import mini_swe_agent
from benchmarks.peers.base import Job, Verdicts
from benchmarks.peers.peer_environments import Pinned, environment

PINNED = Pinned("harbor", ("harbor==0.24.0",), ("3.13", "3.12", "3.14"))
MOST_TASKS = 50
PLUGIN = Path(__file__).parent / "harbor_plugin"
LOOP = Path(__file__).parents[1] / "overhead" / "bash_loop.py"


class Harbor:
    name: ClassVar[str] = "Harbor"
    version: ClassVar[str] = "0.24.0"
    grades: ClassVar[bool] = True
    agent: ClassVar[str] = "bench_agent:BashAgent"

    def __init__(self, root: Path) -> None:
        """Raises: Unavailable."""
        self._environment = environment(PINNED, root)

    def prepare(self, job: Job) -> None:
        common_job.write_harbor_tasks(job.folder / "tasks", _tasks(job.rollouts))
        job.temporary.mkdir(parents=True)

    def command(self, job: Job, *, again: bool = False) -> tuple[list[str], dict[str, str]]:
        program = str(self._environment / "bin" / "harbor")
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(job.folder),
            "TMPDIR": str(job.temporary),
            "HARBOR_TELEMETRY": "0",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONPATH": str(PLUGIN),
            "BENCH_BWRAP": json.dumps(self.flags(job)),
            "BENCH_ENDPOINT": job.endpoint_url,
            "BENCH_TURNS": str(job.turn_limit),
        }
        if again:
            return [program, "job", "resume", "-p", str(job.folder / "jobs" / "bench")], env
        argv = [program, "run", "-y", "-q", "-p", str(job.folder / "tasks"), "-o"]
        argv += [str(job.folder / "jobs"), "--job-name", "bench", "-n", str(job.workers)]
        argv += ["-k", str(job.rollouts // _tasks(job.rollouts)), "-m", "openai/policy"]
        argv += ["-a", self.agent, "-e", "bench_environment:BwrapEnvironment"]
        return argv, env

    def flags(self, job: Job) -> list[str]:
        """The bubblewrap flags of each sandbox."""
        return common_job.bwrap_flags(job.repository)

    def patches(self, job: Job) -> Mapping[str, str]:
        found = (job.folder / "jobs" / "bench").glob("*/artifacts/logs/artifacts/patch.diff")
        return {path.parents[3].name: path.read_text() for path in found}

    def verdicts(self, job: Job) -> Verdicts:
        rewards = [
            json.loads(path.read_text()).get("verifier_result")
            for path in (job.folder / "jobs" / "bench").glob("*/result.json")
        ]
        given = [r["rewards"].get("reward") for r in rewards if r]
        return Verdicts(resolved=given.count(1), zeros=given.count(0))


class HarborInside(Harbor):
    """Starts the minimal agent of `overhead` in its sandbox, with one command."""

    name: ClassVar[str] = "Harbor, agent in the sandbox"
    agent: ClassVar[str] = "bench_agent:InsideAgent"

    def flags(self, job: Job) -> list[str]:
        """With the host's network, which costs less than Perdure's own network and forwarder."""
        flags = [flag for flag in super().flags(job) if flag != "--unshare-net"]
        python = ["--setenv", "BENCH_PYTHON", common_job.PYTHON]
        return [*flags, "--ro-bind", str(LOOP), "/opt/bench/bash_loop.py", *python]


class HarborMini(Harbor):
    """Runs Harbor's own mini-swe-agent in its sandbox. The program is mounted, not installed, in each sandbox."""

    agent: ClassVar[str] = "bench_mini_agent:BoundMiniSweAgent"

    def __init__(self, root: Path) -> None:
        """Raises: Unavailable."""
        super().__init__(root)
        self._program = environment(mini_swe_agent.PINNED, root)

    def command(self, job: Job, *, again: bool = False) -> tuple[list[str], dict[str, str]]:
        argv, env = super().command(job, again=again)
        connection = {"OPENAI_BASE_URL": f"{job.endpoint_url}/v1", "OPENAI_API_KEY": "none"}
        return argv, env | connection | {"MSWEA_API_KEY": "none"}

    def flags(self, job: Job) -> list[str]:
        """With the host's network, which costs less than Perdure's own network and forwarder."""
        flags = [flag for flag in super().flags(job) if flag != "--unshare-net"]
        for folder in (self._program, (self._program / "bin" / "python").resolve().parents[1]):
            flags += ["--ro-bind", str(folder), str(folder)]
        path = f"{self._program / 'bin'}:{common_job.SANDBOX_PATH}"
        flags += ["--setenv", "PATH", path, "--setenv", "MSWEA_SILENT_STARTUP", "1"]
        return [*flags, "--setenv", "LITELLM_LOCAL_MODEL_COST_MAP", "True"]


def _tasks(rollouts: int) -> int:
    """The number of tasks, a divisor of the rollouts. Further rollouts are attempts at the same tasks."""
    return max(n for n in range(1, min(rollouts, MOST_TASKS) + 1) if rollouts % n == 0)
