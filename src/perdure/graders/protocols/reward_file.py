"""Grades as Harbor does: `/tests/test.sh` writes an object of numbers into
`/logs/verifier/reward.json`, as rewardkit does, or a number into `reward.txt`.

A shared verifier tests the agent's own sandbox, as in Harbor, unless agent and tests may reach
different hosts: then it tests a fresh one, which gets the diff and the artifacts. A separate verifier
tests a fresh one, which gets only the artifacts. Code under test can write the reward file too. So,
like `eval_cmd`, this protocol suits only tasks whose tests guard themselves.
"""

import json
import shlex
from typing import ClassVar, NamedTuple

from perdure.errors import InstanceError
from perdure.graders.hidden_test_run import Command, TestRun
from perdure.graders.named_rewards import MAIN, main_reward, parse_named_rewards
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.verdict_rules import Verdict, last_line
from perdure.instances.rows.formats.harbor import FOLDER
from perdure.limited_process import read
from perdure.sandboxes.base import Sandbox
from perdure.types import Instance, Outcome, Rewards, Verifier

SCRIPT = f"{FOLDER}/test.sh"
"""`grading.files` has the tests below FOLDER; the command moves them to /tests."""
LOGS = "/logs/verifier"
MAX_BYTES = 16 << 10


class RewardFileGrader(ProtocolGrader):
    name: ClassVar[str] = "reward_file"
    version: ClassVar[int] = 2

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


def tests_instance(instance: Instance, verifier: Verifier, cwd: str) -> Instance:
    """The instance with the environment of its verifier, whose tests start in `cwd`."""
    grading = instance.grading.model_copy(
        update={"verifier": verifier.model_copy(update={"cwd": cwd})}
    )
    own = {"environment": verifier.environment, "base_commit": None, "grading": grading}
    return instance.model_copy(update=own)


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
    run = " && ".join([*steps, "chmod +x /tests/test.sh", "/tests/test.sh"])
    return Command(
        f"{run}\n{{ cat {LOGS}/reward.json || cat {LOGS}/reward.txt; }} 2>/dev/null "
        f"| head -c {MAX_BYTES} >{reward}",
        {},
        junit_path=f"{scratch}/reward",
    )


async def _judged(run: TestRun) -> Verdict:
    found = await read(parse_reward_file, run.junit or b"")
    if found.problem:
        return Verdict(Outcome.UNRESOLVED, f"{found.problem}: {last_line(run)}")
    reward, named = main_reward(found.rewards), found.rewards
    named = {} if list(named) == [MAIN] else named
    if not 0 <= reward <= 1:
        reason = f"the reward {reward:g} is not from 0 to 1"
        return Verdict(Outcome.UNRESOLVED, reason, named_rewards=named)
    outcome = Outcome.RESOLVED if reward == 1 else Outcome.UNRESOLVED
    reason = "" if reward == 1 else f"reward {reward:g}"
    rewards = Rewards(binary=float(reward == 1), partial=reward)
    return Verdict(outcome, reason, rewards, named_rewards=named, reward_form="partial")


class RewardFile(NamedTuple):
    """The content of the reward file."""

    rewards: dict[str, float]
    problem: str = ""
    """Why there are none."""


def parse_reward_file(text: bytes) -> RewardFile:
    """An object of numbers, or one number, which is the reward MAIN. Call this through `read`."""
    if not text:
        return RewardFile({}, "test.sh wrote no reward")
    try:
        found = _number_or_json(text)
        return RewardFile(parse_named_rewards(found if isinstance(found, dict) else {MAIN: found}))
    except (ValueError, RecursionError) as error:
        return RewardFile({}, f"the reward file is unreadable ({error})"[:300])


def _number_or_json(text: bytes) -> object:
    """Harbor reads `reward.txt` as Python does, so `.5` is a number. Raises: ValueError."""
    try:
        return float(text)
    except ValueError:
        return json.loads(text)
