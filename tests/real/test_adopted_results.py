"""Results that the real Harbor and Inspect wrote, read by their own models.

Both run in environments of their own, which uv makes; run by `make test-real`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common_job
from benchmarks.peers.peer_environments import Pinned, Unavailable, environment
from perdure.adoption import reader_process, result_formats
from perdure.adoption.foreign_rollouts import ForeignRollout
from perdure.errors import ConfigurationError

pytestmark = pytest.mark.registry

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "adoption"
PLUGIN = ROOT / "benchmarks" / "peers" / "harbor_plugin"
ENVIRONMENTS = ROOT / ".perdure" / "peers"
SAYS = {
    "toy-0000": "fix",
    "toy-0001": "nothing",
    "toy-0002": "fix, break",
    "toy-0003": "fix, wait",
    "toy-0004": "fix, and the tests write no reward",
}
"""Task -> what the scripted agent does."""
TESTS = "cd /app && grep -q 'a + b' calc.py; echo $((1 - $?)) > /logs/verifier/reward.txt\n"


def programs(reader: reader_process.Reader) -> Path:
    """The folder of the programs of the reader's package."""
    pinned = Pinned(reader.name, (reader.package,), reader.pythons)
    try:
        return environment(pinned, ENVIRONMENTS) / "bin"
    except Unavailable as error:
        pytest.skip(str(error))


def run(argv: list[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
    known = {"PATH": os.environ["PATH"], "HOME": str(folder), "HARBOR_TELEMETRY": "0"}
    known |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        argv, cwd=HERE, env={**known, **(env or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]


@pytest.fixture(scope="module")
def harbor_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with a trial for each end."""
    harbor = programs(reader_process.HARBOR) / "harbor"
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    folder = tmp_path_factory.mktemp("harbor")
    repository = common_job.make_repository(folder / "repository")
    tasks = common_job.write_harbor_tasks(folder / "tasks", len(SAYS))
    for name, text in SAYS.items():
        (tasks / name / "instruction.md").write_text(text)
        config = common_job.TASK_TOML.replace('"separate"', '"shared"')
        limit = "timeout_sec = 2.0" if "wait" in text else "timeout_sec = 60.0"
        config = config.replace("timeout_sec = 600.0", limit)
        (tasks / name / "task.toml").write_text(config)
        tests = "true\n" if "no reward" in text else TESTS
        (tasks / name / "tests" / "test.sh").write_text(f"#!/bin/bash\n{tests}")
    argv = [str(harbor), "run", "-y", "-q", "-p", str(tasks), "-o", str(folder / "jobs")]
    argv += ["--job-name", "night", "-n", "2", "-m", "openai/policy"]
    argv += ["-a", "scripted_job:ScriptedAgent", "-e", "scripted_job:Environment"]
    env = {"PYTHONPATH": f"{PLUGIN}:{HERE}", "TMPDIR": str(folder)}
    env["BENCH_BWRAP"] = json.dumps(common_job.bwrap_flags(repository))
    run(argv, folder, env)
    return folder / "jobs" / "night"


def by_instance(path: Path) -> dict[str, ForeignRollout]:
    return {one.instance_id: one for one in result_formats.read(path).rollouts}


def test_a_job_of_harbor(harbor_job: Path) -> None:
    """Harbor gives a trial whose API failed the reward 0; here it lacks a verdict, and its patch is not
    whole. The agent's own timeout keeps its verdict. A lost reward file leaves a patch to grade."""
    found = by_instance(harbor_job)

    rewards = {name: one.scores and one.scores["reward"] for name, one in found.items()}
    assert rewards == dict(zip(SAYS, (1.0, 0.0, None, 1.0, None), strict=True))
    assert found["toy-0002"].patch is None
    assert "+    return a + b" in (found["toy-0004"].patch or "")
    lacks = [one.lacks for one in found.values()]
    assert lacks == ["", "", "ConnectionError", "", "RewardFileNotFoundError"]
    assert {(one.agent, one.model) for one in found.values()} == {("scripted", "openai/policy")}


def test_a_job_that_was_killed(harbor_job: Path, tmp_path: Path) -> None:
    """A trial without a result, and one that was being written, are named. The others are read."""
    job = tmp_path / "night"
    shutil.copytree(harbor_job, job)
    cut, missing = (next(job.glob(f"{name}__*/result.json")) for name in ("toy-0000", "toy-0001"))
    cut.write_bytes(cut.read_bytes()[:100])
    missing.unlink()

    reading = result_formats.read(job)

    assert [one.instance_id for one in reading.rollouts] == ["toy-0002", "toy-0003", "toy-0004"]
    assert [note.split("/")[0].split(" ")[0] for note in reading.notes] == [
        cut.parent.name,
        missing.parent.name,
    ]


def test_a_trial_that_is_none_is_refused(harbor_job: Path, tmp_path: Path) -> None:
    """The message names file, field and fix."""
    job = tmp_path / "night"
    shutil.copytree(harbor_job, job)
    path = next(job.glob("toy-0000__*/result.json"))
    document: dict[str, Any] = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "agent_info": 3}))

    with pytest.raises(ConfigurationError, match=r"result\.json: `agent_info`: .*remove it"):
        result_formats.read(job)


@pytest.mark.parametrize("form", ["eval", "json"])
def test_logs_of_inspect(tmp_path: Path, form: str) -> None:
    """Scores are verdicts, per epoch. An error is none, and so is a sample that was not scored; its patch
    is graded. A log that was cut off is named."""
    inspect = programs(reader_process.INSPECT) / "inspect"
    logs = tmp_path / "logs"
    argv = [str(inspect), "eval", "inspect_task.py", "--model", "mockllm/model", "--epochs", "2"]
    argv += [
        "--log-dir",
        str(logs),
        "--log-format",
        form,
        "--no-fail-on-error",
        "--display",
        "none",
    ]
    run(argv, tmp_path)
    whole = next(logs.glob(f"*.{form}"))
    cut = logs / f"2020-01-01T00-00-00-00-00_calc_cut.{form}"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])

    reading = result_formats.read(logs, str(inspect.with_name("python")))
    first = [one for one in reading.rollouts if one.file.endswith("epoch 1")]

    scores = {one.instance_id: one.scores and one.scores["tests_pass"] for one in first}
    assert scores == {"toy-0000": 1.0, "toy-0001": 0.0, "toy-0002": None, "toy-0003": None}
    patches = {one.instance_id: bool(one.patch) for one in first}
    assert patches == {"toy-0000": True, "toy-0001": True, "toy-0002": False, "toy-0003": True}
    assert len(reading.rollouts) == 2 * len(first)
    assert [note.partition(" is not whole: ")[0] for note in reading.notes] == [cut.name]
