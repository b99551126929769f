"""Proves an instance before it costs GPU time: the gold patch resolves it, the unpatched base does
not.

If a row lacks test lists, calibration computes them from the difference between the two. The caller
makes the sandboxes, so calibration runs in the same kind of sandbox as grading.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from perdure.errors import InstanceError
from perdure.graders import forged_results
from perdure.graders.base import Grader
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.hidden_test_run import TestRun
from perdure.graders.protocols.eval_cmd import EvalCmdGrader
from perdure.graders.protocols.test_lists import (
    SuiteRun,
    SwebenchGrader,
    invalid_by_protocol,
    reading_of,
    run_suite,
    validate_suite,
)
from perdure.graders.twins.twin_selection import Chosen, ChosenReport, choose_twins
from perdure.graders.verdict_rules import (
    F2P_PASSES,
    first_error,
    judge_filtered,
    judge_killed,
    judge_refusal,
    last_line,
)
from perdure.instances.calibration_proof import Calibrated, CalibrationReport, MakeSandbox
from perdure.limited_process import Unparsable, read
from perdure.types import Instance, Outcome, TestStatus


async def calibrate(
    instance: Instance,
    make_sandbox: MakeSandbox,
    *,
    runs: int = 3,
    twins: int = 5,
    timeout_s: float | None = None,
) -> Calibrated:
    """Compute FAIL_TO_PASS and PASS_TO_PASS by running the tests, prove the lists with the grader,
    and choose at most `twins` twins for each FAIL_TO_PASS test.

    F2P: failed or missing in every run of the base, passed in every run of gold.
    P2P: passed in every run of both. Every other test is in neither list.
    Raises: InstanceError saying why the instance is unfit; any error of the sandboxes.
    """
    validate_suite(instance)
    limit_s = timeout_s or instance.grading.timeout_s
    gold, nop, longest_run_s = await _passed(instance, make_sandbox, runs, limit_s)
    fail_to_pass = _fixed(gold, nop)
    pass_to_pass = _in_all(gold) & _in_all(nop)
    lists = {
        "fail_to_pass": tuple(sorted(fail_to_pass)),
        "pass_to_pass": tuple(sorted(pass_to_pass)),
    }
    listed = instance.model_copy(update={"grading": instance.grading.model_copy(update=lists)})
    await _prove(SwebenchGrader(), listed, make_sandbox, limit_s, "proof")
    unstable = (set().union(*gold) - _in_all(gold)) | (set().union(*nop) - _in_all(nop))
    chosen = await _with_twins(listed, make_sandbox, runs, twins, limit_s)
    report = CalibrationReport(
        runs,
        len(fail_to_pass),
        len(pass_to_pass),
        tuple(sorted(unstable)),
        filter_patch(instance.gold_patch, instance).dropped_paths,
        longest_run_s,
        chosen.report.without,
        chosen.report.variants,
    )
    return Calibrated(chosen.instance, report)


async def verify(
    instance: Instance,
    make_sandbox: MakeSandbox,
    *,
    runs: int = 3,
    twins: int = 5,
    timeout_s: float | None = None,
) -> Calibrated:
    """Prove a row's lists (or its `eval_cmd`) without changing them, and choose its twins.

    Raises: InstanceError saying why the instance is unfit; any error of the sandboxes.
    """
    grading = instance.grading
    grader: Grader = EvalCmdGrader() if grading.protocol == "eval_cmd" else SwebenchGrader()
    grader.validate(instance)
    limit_s = timeout_s or grading.timeout_s
    seconds = [
        await _prove(grader, instance, make_sandbox, limit_s, str(n + 1)) for n in range(runs)
    ]
    chosen = await _with_twins(instance, make_sandbox, runs, twins, limit_s)
    report = CalibrationReport(
        runs,
        len(grading.fail_to_pass),
        len(grading.pass_to_pass),
        dropped_paths=filter_patch(instance.gold_patch, instance).dropped_paths,
        longest_run_s=max(seconds),
        without_twins=chosen.report.without,
        variants=chosen.report.variants,
    )
    return Calibrated(chosen.instance, report)


async def _with_twins(
    instance: Instance, make_sandbox: MakeSandbox, runs: int, wanted: int, limit_s: float
) -> Chosen:
    if not wanted:
        return Chosen(instance, ChosenReport())
    return await choose_twins(instance, make_sandbox, wanted=wanted, runs=runs, timeout_s=limit_s)


class _Passed(NamedTuple):
    """The test ids that passed, one set per run."""

    gold: list[set[str]]
    nop: list[set[str]]
    longest_run_s: float


async def _passed(
    instance: Instance, make_sandbox: MakeSandbox, runs: int, limit_s: float
) -> _Passed:
    """Raises: InstanceError as soon as no test can be in FAIL_TO_PASS."""
    gold: list[set[str]] = []
    nop: list[set[str]] = []
    longest = 0.0
    for number in range(runs):
        both = await _both(instance, make_sandbox, number + 1, limit_s)
        gold.append(await _passed_in(both[0], instance))
        nop.append(await _passed_in(both[1], instance))
        if not _fixed(gold, nop):
            raise InstanceError(_nothing_fixed(instance, gold, both[0].run))
        longest = max(longest, *(suite.run.status.seconds or 0.0 for suite in both))
    return _Passed(gold, nop, longest)


async def _both(
    instance: Instance, make_sandbox: MakeSandbox, run: int, limit_s: float
) -> tuple[SuiteRun, SuiteRun]:
    gold, nop = await asyncio.gather(
        _suite(instance, instance.gold_patch, make_sandbox, f"gold-{run}", limit_s),
        _suite(instance, b"", make_sandbox, f"nop-{run}", limit_s),
    )
    return gold, nop


async def _suite(
    instance: Instance, patch: bytes, make_sandbox: MakeSandbox, purpose: str, limit_s: float
) -> SuiteRun:
    filtered = filter_patch(patch, instance)
    if (early := judge_filtered(filtered)) is not None:
        raise InstanceError(f"{instance.ref}: `patch` cannot be graded: {early.reason}")
    async with await make_sandbox(purpose) as sandbox:
        return await run_suite(sandbox, instance, filtered.data, timeout_s=limit_s)


async def _passed_in(suite: SuiteRun, instance: Instance) -> set[str]:
    """The test ids that passed in a run. Only the unpatched base may end early; then none passed.

    Raises: InstanceError when the run cannot be trusted.
    """
    try:
        return await read(parse_passed_tests, suite, instance.ref)
    except Unparsable as error:
        raise InstanceError(
            f"{instance.ref}: the tests' output cannot be parsed: {error}"
        ) from error


def parse_passed_tests(suite: SuiteRun, ref: str) -> set[str]:
    """Call this through `read`. Raises: InstanceError."""
    unfit = judge_refusal(suite.run) if suite.run.refusal else judge_killed(suite.run)
    if unfit is not None:
        raise InstanceError(f"{ref}: the tests did not finish: {unfit.reason}")
    reading, code = reading_of(suite), suite.run.status.code
    if suite.canary is None and invalid_by_protocol(suite, reading.statuses):
        return set()
    if suite.canary and reading.canary_status is TestStatus.MISSING and code != 0:
        return set()  # collection failed: the base lacks a module that the hidden tests import
    if forged := forged_results.find_forgery(reading, code, ()):
        raise InstanceError(
            f"{ref}: no canary test can guard the tests: {forged}; {last_line(suite.run)}"
        )
    passed = {test for test, status in reading.statuses.items() if status in F2P_PASSES}
    # A test counts only if junit confirms it: printed text can look like a result.
    return {test for test in passed if not forged_results.find_forgery(reading, code, (test,))}


def _fixed(gold: Sequence[set[str]], nop: Sequence[set[str]]) -> set[str]:
    return _in_all(gold) - set().union(*nop)


def _in_all(runs: Sequence[set[str]]) -> set[str]:
    return set.intersection(*runs)


def _nothing_fixed(instance: Instance, gold: Sequence[set[str]], run: TestRun) -> str:
    if not _in_all(gold):
        return (
            f"{instance.ref}: no test passes with `patch` applied; complete the environment: "
            f"{first_error(run)}"
        )
    return (
        f"{instance.ref}: FAIL_TO_PASS would be empty, because `patch` makes no failing test pass"
    )


async def _prove(
    grader: Grader, instance: Instance, make_sandbox: MakeSandbox, limit_s: float, run: str
) -> float:
    """Require that gold resolves and the base does not. Return the longer run's seconds."""

    async def grade(patch: bytes, purpose: str) -> tuple[Outcome, str, float]:
        async with await make_sandbox(f"{purpose}-{run}") as sandbox:
            graded = await grader.grade(sandbox, instance, patch, timeout_s=limit_s)
            return graded.grade.outcome, graded.grade.reason, graded.grade.seconds

    gold, nop = await asyncio.gather(grade(instance.gold_patch, "gold"), grade(b"", "nop"))
    if gold[0] is not Outcome.RESOLVED:
        raise InstanceError(f"{instance.ref}: `patch` does not resolve it: {gold[0]}, {gold[1]}")
    if nop[0] is not Outcome.UNRESOLVED:
        raise InstanceError(
            f"{instance.ref}: without `patch`, the outcome must be unresolved, not {nop[0]}: {nop[1]}"
        )
    return max(gold[2], nop[2])
