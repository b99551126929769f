"""`python -m benchmarks.report`: seconds and memory of the end of a run of 16,500 rollouts, and of its report.

The run is made: episodes with 40 turns, 200 tests and 20 kept files each, 1 in 20 failed, on a local
store. Each step is timed as a process of its own, imports included.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perdure.episodes.episode import AttemptSummary, Episode, Provenance
from perdure.errors import Boundary
from perdure.storage import keys
from perdure.types import (
    AgentEnd,
    Failure,
    Grade,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Sampling,
    TestStatus,
)

SAMPLES = 4
TURNS = 40
TESTS = 200
FILES = ("sandbox.json", "agent.json", "patch.json", "patch.diff", "turns.parquet", "grade-1.json")
MORE_FILES = 14
"""The agent's own."""
ENDS = ("client", "worker")
"""What reads all episodes when a run ends."""
FORMS: dict[str, list[str]] = {"text": [], "json": ["--json"], "html": ["--html", "report.html"]}
LIMIT_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=16_500)
    parser.add_argument("--runs", type=int, default=1, help="runs to report and compare")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        names = [f"big-{number}" for number in range(asked.runs)]
        for seed, name in enumerate(names):
            make_run(home / "store", name, asked.rollouts, random.Random(seed))
        rows = [_timed(home, names, form) for form in (*ENDS, *FORMS)]
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    print("| form | seconds | CPU seconds | peak memory, MB | output, kB |\n|---|---|---|---|---|")
    for row in rows:
        print("| {form} | {seconds} | {cpu_s} | {memory_mb} | {output_kb} |".format(**row))


def _timed(home: Path, names: list[str], form: str) -> dict[str, Any]:
    """One call. The peak is that of the largest child so far, so memory grows down the rows."""
    ours = {"PERDURE_HOME": str(home), "PERDURE_STORE": str(home / "store")}
    environment = {**os.environ, **ours, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m"]
    if form in ENDS:
        command += ["benchmarks.report.end_of_run", form, str(home / "store"), names[0]]
    else:
        command += ["perdure.cli.main", "report", *names, *FORMS[form]]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, timeout=LIMIT_S, check=True
    )
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    page = home / "report.html"
    size = page.stat().st_size if form == "html" else len(done.stdout)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "form": form,
        "seconds": round(seconds, 1),
        "cpu_s": round(cpu, 1),
        "memory_mb": round(after.ru_maxrss / 1024),
        "output_kb": round(size / 1024),
    }


def make_run(store: Path, run_id: str, rollouts: int, drawn: random.Random) -> None:
    """Written without the store's fsync, which would take longer than all that is measured."""
    for number in range(rollouts):
        instance = f"project__repo-{number // SAMPLES:05d}"
        episode = made_episode(run_id, instance, number % SAMPLES, drawn)
        path = store / episode.key
        attempt = path.parent / "attempts" / "1"
        (attempt / "agent").mkdir(parents=True)
        for key in episode.attempts[0].evidence:
            (store / key).touch()
        path.write_text(episode.model_dump_json(indent=1))


def made_episode(run_id: str, instance: str, sample: int, drawn: random.Random) -> Episode:
    request = RolloutRequest(
        run_id=run_id, instance=f"made/{instance}", sample_index=sample, agent="mini_swe_agent"
    )
    hard = random.Random(instance).random()
    failed = drawn.random() < 0.05
    resolved = drawn.random() > hard
    turns = tuple(_turns(drawn))
    agent_s = drawn.lognormvariate(5, 0.5)
    started = drawn.uniform(0, 20_000)
    grade = None if failed else _grade(resolved, drawn)
    return Episode(
        run_id=run_id,
        group_id=f"{run_id}/{instance}",
        instance=request.instance,
        sample_index=sample,
        rollout_id=request.workflow_id,
        status=RolloutStatus.FAILED if failed else RolloutStatus.GRADED,
        outcome=grade.outcome if grade else None,
        reward=grade.reward if grade else None,
        rewards=grade.rewards if grade else None,
        agent_end=AgentEnd.FINISHED,
        failure=_failure(drawn) if failed else None,
        turns=len(turns),
        turn_tokens=turns,
        prompt_tokens=sum(prompt for prompt, _ in turns),
        sampled_tokens=sum(sampled for _, sampled in turns),
        started_at=started,
        finished_at=started + agent_s + 60,
        seconds=agent_s + 60,
        stage_seconds={
            "boot": drawn.uniform(1, 9),
            "agent": agent_s,
            "grade": drawn.uniform(5, 50),
        },
        engine_seconds=agent_s * 0.6,
        attempts=(
            AttemptSummary(attempt=1, provider="podman", evidence=tuple(_evidence(request))),
        ),
        grade=grade,
        tokens_key=keys.episode_tokens(request),
        provenance=Provenance(
            perdure_version="0",
            agent=request.agent,
            sandbox="podman",
            model="made",
            sampling=Sampling(),
            request=request.model_dump(mode="json", exclude_unset=True),
        ),
    )


def _turns(drawn: random.Random) -> Iterator[tuple[int, int]]:
    prompt = 2000
    for _ in range(drawn.randint(5, 2 * TURNS - 5)):
        sampled = drawn.randint(20, 600)
        yield prompt, sampled
        prompt += sampled + drawn.randint(50, 2000)


def _grade(resolved: bool, drawn: random.Random) -> Grade:
    names = [f"tests/test_module_{n % 9}.py::TestCase::test_name_{n}" for n in range(TESTS)]
    status = TestStatus.PASSED if resolved else TestStatus.FAILED
    return Grade(
        outcome=Outcome.RESOLVED if resolved else Outcome.UNRESOLVED,
        rewards=Rewards(binary=float(resolved)),
        fail_to_pass=dict.fromkeys(names[:5], status),
        pass_to_pass=dict.fromkeys(names[5:], TestStatus.PASSED),
        patch_sha256=f"{drawn.getrandbits(256):064x}",
    )


def _failure(drawn: random.Random) -> Failure:
    pid = drawn.randint(100, 99_999)
    message = f"sandbox p-{pid:x} died while the agent was running"
    return Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message=message)


def _evidence(request: RolloutRequest) -> Iterator[str]:
    folder = keys.attempt(request, 1)
    for name in FILES:
        yield f"{folder}/{name}"
    for number in range(MORE_FILES):
        yield f"{folder}/agent/file-{number}"


if __name__ == "__main__":
    main()
