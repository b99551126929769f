"""Calibration: proves that a canary added to the test patch fails under gold and disturbs no test."""

from perdure.graders import forged_results, verdict_rules
from perdure.graders.canary_insertion import insert_canary
from perdure.graders.protocols.test_lists import SuiteRun, reading_of
from perdure.graders.reports.log_parsers import LogParser
from perdure.graders.twins.calibration_runs import Bench
from perdure.types import Instance


async def has_proven_canary(bench: Bench, plain: Instance) -> bool:
    """False where no canary can be added, such as for a runner that ends at the first failure.
    False also for Python: its runners get a canary without proof. Raises: any error of the
    sandboxes."""
    grading = plain.grading
    if grading.protocol != "swebench" or LogParser(grading.log_parser).runner:
        return False
    if insert_canary(grading.test_patch) is None:
        return False
    with_canary = plain.model_copy(update={"grading": grading.model_copy(update={"canary": True})})
    suite = await bench.run(bench.gold, "canary", instance=with_canary)
    return await bench.read(is_reported, suite, (*grading.fail_to_pass, *grading.pass_to_pass))


def is_reported(suite: SuiteRun, tests: tuple[str, ...]) -> bool:
    """Whether the canary failed and these tests passed. Call this through `read`."""
    reading = reading_of(suite)
    return forged_results.find_forgery(reading, suite.run.status.code, tests) is None and all(
        verdict_rules.status_of(test, reading.statuses) in verdict_rules.P2P_PASSES
        for test in tests
    )
