"""Grades as Harbor does: `/tests/test.sh` writes a number into `/logs/verifier/reward.txt`.

Harbor tests the sandbox in which the agent worked. Perdure tests a fresh one with the agent's diff,
so changes outside the repository do not count. Code under test can write the reward file too: like
`eval_cmd`, this protocol suits only tasks whose tests guard themselves.
"""

import json
import math
import shlex
from typing import ClassVar

from perdure.errors import InstanceError
from perdure.graders.hidden_test_run import Command, TestRun
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.verdict_rules import Verdict, last_line
from perdure.instances.rows.formats.harbor import FOLDER
from perdure.limited_process import read
from perdure.sandboxes.base import Sandbox
from perdure.types import Instance, Outcome, Rewards, Verifier

SCRIPT = f"{FOLDER}/test.sh"
"""`grading.files` has the tests below FOLDER; the command moves them to /tests."""
LOGS = "/logs/verifier"


class RewardFileGrader(ProtocolGrader):
    name: ClassVar[str] = "reward_file"
    version: ClassVar[int] = 1

    def validate(self, instance: Instance) -> None:
        """Raises: InstanceError."""
        verifier = instance.grading.verifier
        if SCRIPT not in instance.grading.files and not (verifier and verifier.has_tests):
            raise InstanceError(f"{instance.ref}: lacks `tests/test.sh`, which writes the reward")

    async def prepared(self, sandbox: Sandbox, instance: Instance) -> Instance:
        """Raises: InstanceError if the sandbox cannot make the task's folders."""
        await _make_folders(sandbox, instance)
        return instance

    def plan(self, instance: Instance, scratch: str) -> Plan:
        return Plan(_command(instance, scratch), _judged)

    def kept(self, run: TestRun) -> tuple[bytes, bytes | None]:
        """Drops `run.junit`, which here holds the reward file."""
        return run.log, None


def tests_instance(instance: Instance, verifier: Verifier) -> Instance:
    """The instance with the environment of its verifier."""
    return instance.model_copy(update={"environment": verifier.environment, "base_commit": None})


async def _make_folders(sandbox: Sandbox, instance: Instance) -> None:
    """Runs before hostile code, so a failure is the sandbox's."""
    verifier = instance.grading.verifier
    has_tests = verifier is not None and verifier.has_tests
    tests = "test -f /tests/test.sh" if has_tests else "rm -rf /tests; mkdir -p /tests"
    done = await sandbox.exec(f"rm -rf {LOGS}; mkdir -p {LOGS} && {tests}")
    if not done.status.ok:
        said = done.stderr.decode("utf-8", "replace").strip()
        if has_tests and not said:
            said = "its image lacks /tests/test.sh: add `COPY . /tests/` to tests/Dockerfile"
        raise InstanceError(
            f"{instance.ref}: a Harbor task needs /tests and {LOGS}, which this sandbox cannot make "
            f"({said}): use a sandbox that runs images as root"
        )


def _command(instance: Instance, scratch: str) -> Command:
    reward = shlex.quote(f"{scratch}/reward")
    verifier = instance.grading.verifier
    has_tests = verifier is not None and verifier.has_tests
    steps = [] if has_tests else [f"cp -r {FOLDER}/. /tests/", f"rm -rf {FOLDER}"]
    steps += [f"cd {shlex.quote(verifier.cwd)}"] if verifier is not None else []
    run = " && ".join([*steps, "bash /tests/test.sh"])
    return Command(
        f"{run}\ncat {LOGS}/reward.json {LOGS}/reward.txt 2>/dev/null | head -c 4096 >{reward}",
        {},
        junit_path=f"{scratch}/reward",
    )


async def _judged(run: TestRun) -> Verdict:
    reward = await read(reward_of, run.junit or b"")
    if reward is None:
        return Verdict(Outcome.UNRESOLVED, f"test.sh wrote no reward from 0 to 1: {last_line(run)}")
    rewards = Rewards(binary=float(reward == 1), partial=reward)
    if reward == 1:
        return Verdict(Outcome.RESOLVED, rewards=rewards)
    return Verdict(Outcome.UNRESOLVED, f"reward {reward:g}", rewards)


def reward_of(text: bytes) -> float | None:
    """A JSON number, or an object's `reward` or only value. Call this through `read`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        found = found.get("reward", next(iter(found.values())) if len(found) == 1 else None)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return float(found) if 0 <= found <= 1 else None
