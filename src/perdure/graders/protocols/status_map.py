"""Grades as R2E-Gym does: every test must have the status that it has with the reference fix.

A test that failed there must fail again, and no test may be missing or new. A test's key is its id
without the file. The run has the same guards as a run of `swebench`.
"""

from collections.abc import Mapping
from typing import ClassVar

from perdure.errors import InstanceError
from perdure.graders import forged_results, verdict_rules
from perdure.graders.protocols.grading_protocol import Plan, ProtocolGrader
from perdure.graders.protocols.image_setup_edits import without_image_edits
from perdure.graders.protocols.test_lists import SuiteRun, planned, reading_of, validate_suite
from perdure.graders.reports.log_parsers import Statuses, worst
from perdure.graders.verdict_rules import Verdict, last_line
from perdure.sandboxes.base import Sandbox
from perdure.types import Instance, Outcome, Rewards, TestStatus


class StatusMapGrader(ProtocolGrader):
    name: ClassVar[str] = "status_map"
    version: ClassVar[int] = 1

    def validate(self, instance: Instance) -> None:
        """Raises: InstanceError."""
        validate_suite(instance)
        expected = instance.grading.expected
        if not expected:
            raise InstanceError(f"{instance.ref}: lacks `expected`: the status of each test")
        if odd := set(expected.values()) - set(TestStatus):
            raise InstanceError(f"{instance.ref}: `expected` has the unknown status {min(odd)!r}")
        if TestStatus.PASSED not in expected.values():
            raise InstanceError(f"{instance.ref}: `expected` has no test that passes")

    async def prepared(self, sandbox: Sandbox, instance: Instance) -> Instance:
        return await without_image_edits(sandbox, instance)

    def plan(self, instance: Instance, scratch: str) -> Plan:
        return planned(instance, scratch, judge, instance.grading.expected)


def judge(suite: SuiteRun, expected: Mapping[str, str]) -> Verdict:
    """The verdict on a finished run. Call this through `read`."""
    reading, code = reading_of(suite), suite.run.status.code
    found = compared(reading.statuses, expected)
    if reading.canary_status is TestStatus.MISSING and code != 0 and found.rewards.binary == 0:
        reason = f"the test run ended early (exit code {code}): {last_line(suite.run)}"
        return Verdict(Outcome.UNRESOLVED, reason)
    if forged := forged_results.find_forgery(reading, code, ()) or _unconfirmed(reading):
        return Verdict(Outcome.TAMPERED, forged, score=found.score)
    return found


def _unconfirmed(reading: forged_results.Reading) -> str:
    """A test that passed in the log but not in junit; empty if there is none. Each id is looked up
    once, because these ids are never cut and hostile code may print any number of them."""
    for test, said in reading.statuses.items():
        written = reading.junit.get(test) if reading.junit is not None else said
        if said in verdict_rules.F2P_PASSES and written not in verdict_rules.F2P_PASSES:
            return f"log and junit disagree on {test}: {said} and {written}"
    return ""


def compared(statuses: Statuses, expected: Mapping[str, str]) -> Verdict:
    """The verdict on a run that is trusted; `partial` is the fraction of tests that match."""
    found = by_key(statuses)
    wrong = [
        f"{key} {found.get(key, TestStatus.MISSING)} instead of {status}"
        for key, status in expected.items()
        if found.get(key) != status
    ]
    new = [f"{key} {found[key]} is new" for key in found if key not in expected]
    dense = (len(expected) - len(wrong)) / len(expected)
    resolved = not wrong and not new
    rewards = Rewards(binary=float(resolved), f2p_fraction=dense, p2p_fraction=1.0, partial=dense)
    outcome = Outcome.RESOLVED if resolved else Outcome.UNRESOLVED
    listed = {key: found.get(key, TestStatus.MISSING) for key in expected}
    score = verdict_rules.Score(listed, {}, outcome, rewards)
    return Verdict(outcome, "; ".join([*wrong, *new][:3]), rewards, score)


def by_key(statuses: Statuses) -> Statuses:
    """`r2e_tests/test_1.py::A::test_b` -> `A.test_b`. If two files share a key, the worse status
    counts."""
    found: dict[str, list[TestStatus]] = {}
    for test, status in statuses.items():
        found.setdefault(".".join(test.split("::")[1:]) or test, []).append(status)
    return {key: worst(each) for key, each in found.items()}
