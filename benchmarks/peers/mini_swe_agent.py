"""mini-swe-agent's batch runner: `mini-extra swebench` with its own bubblewrap environment."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks import common_job
from benchmarks.peers.base import Job, Verdicts
from benchmarks.peers.peer_environments import Pinned, environment

PINNED = Pinned(
    "mini-swe-agent",
    # litellm needs `mcp` for tools and does not declare it.
    ("mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp==2.3.0"),
    ("3.11", "3.12", "3.13"),
)


class MiniSweAgent:
    name: ClassVar[str] = "mini-swe-agent"
    version: ClassVar[str] = "2.4.6"
    grades: ClassVar[bool] = False

    def __init__(self, root: Path) -> None:
        """Raises: Unavailable."""
        self._environment = environment(PINNED, root)

    def prepare(self, job: Job) -> None:
        common_job.write_swebench_rows(job.folder / "rows", job.rollouts)
        job.temporary.mkdir(parents=True)
        config = {
            "agent": {
                "system_template": "You are a helpful assistant that can use a shell.",
                "instance_template": "{{task}}",
                "step_limit": job.turn_limit,
                "cost_limit": 0.0,
            },
            "environment": {
                "timeout": 60,
                "wrapper_args": common_job.bwrap_flags(job.repository),
            },
            "model": {
                "model_kwargs": {"api_base": f"{job.endpoint_url}/v1", "api_key": "none"},
            },
            "run": {"env_startup_command": "git clone -q /repo ."},
        }
        (job.folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML

    def command(self, job: Job, *, again: bool = False) -> tuple[list[str], dict[str, str]]:
        """A resumed run uses the same command, because the runner skips finished instances."""
        argv = [str(self._environment / "bin" / "mini-extra"), "swebench"]
        argv += ["--subset", str(job.folder / "rows"), "--split", "test"]
        argv += ["--output", str(job.folder / "out"), "--workers", str(job.workers)]
        argv += ["--model", "openai/policy", "--environment-class", "bubblewrap"]
        argv += ["--config", str(job.folder / "config.yaml")]
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(job.folder),
            "TMPDIR": str(job.temporary),
            "MSWEA_GLOBAL_CONFIG_DIR": str(job.folder / "config"),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(job.folder / "hf"),
        }
        return argv, env

    def patches(self, job: Job) -> Mapping[str, str]:
        path = job.folder / "out" / "preds.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text())
        except ValueError:
            return {}  # it is not written atomically, so the kill may have truncated it
        return {name: row["model_patch"] or "" for name, row in found.items()}

    def verdicts(self, job: Job) -> Verdicts:
        raise NotImplementedError("mini-swe-agent does not grade: use Grading")
