"""Calibration: chooses twins that fail under gold, and that fail under the base as their test does.

Copies of all candidates run next to their test, in the kind of sandbox that grades, and must behave
the same in all runs. Each chosen twin then runs once in place of its test.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perdure.errors import InstanceError
from perdure.graders import verdict_rules
from perdure.graders.diff.git_diff_parser import MalformedDiff
from perdure.graders.protocols.test_lists import SuiteRun, reading_of
from perdure.graders.twins import class_relations
from perdure.graders.twins.calibration_runs import Bench
from perdure.graders.twins.copied_tests import Copy, exchanges, with_copies
from perdure.graders.twins.expectation_mutation import Candidate, candidates
from perdure.graders.twins.failure_locations import NOT_RUN, Behaviour, Place, behaviours
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.patch_lines import added_lines, with_twins
from perdure.graders.twins.published_test_ids import Target, targets
from perdure.graders.twins.twin_draw import pools
from perdure.graders.twins.twin_lint import Lint, lint
from perdure.graders.twins.twin_support import why_no_twins
from perdure.instances.calibration_proof import MakeSandbox
from perdure.types import Grading, Instance, TestStatus, Twin

SCREENED = 14
"""Most candidates of one test that calibration runs."""

_FAILING = frozenset((TestStatus.FAILED, TestStatus.ERROR))
_BY_ASSERTION = frozenset(("AssertionError", "Failed"))
_BROKEN = frozenset(("NameError", "ImportError", "SyntaxError", "UnboundLocalError"))


@dataclass(frozen=True)
class ChosenReport:
    """The result for each FAIL_TO_PASS test."""

    twins: dict[str, int] = field(default_factory=dict)
    """Id -> number of proven twins; absent if there are none."""
    weak: tuple[str, ...] = ()
    """Ids for which a reader could recognize every twin."""
    without: dict[str, str] = field(default_factory=dict)
    """Id -> why it has no twin."""
    runs: int = 0
    """Number of sandboxes used."""


@dataclass(frozen=True)
class Chosen:
    """The instance with `grading.twins`, and the evidence."""

    instance: Instance
    report: ChosenReport


async def choose_twins(
    instance: Instance,
    make_sandbox: MakeSandbox,
    *,
    wanted: int = 5,
    runs: int = 3,
    timeout_s: float | None = None,
) -> Chosen:
    """Choose at most `wanted` twins for each FAIL_TO_PASS test. The instance's lists must be
    complete.

    A test without a twin is no error: the report says why. This uses two sandboxes at a time.
    Raises: InstanceError if `test_patch` or the tests' output cannot be read; any error of the
    sandboxes.
    """
    bench = Bench(instance, make_sandbox, timeout_s or instance.grading.timeout_s)
    plain = instance.model_copy(
        update={"grading": instance.grading.model_copy(update={"twins": ()})}
    )
    grading = instance.grading
    if (reason := why_no_twins(grading)) is not None:
        return Chosen(plain, ChosenReport(without=dict.fromkeys(grading.fail_to_pass, reason)))
    sources, unread = await _sources(bench, grading)
    found, without = targets(sources, grading.fail_to_pass, grading.pass_to_pass)
    if unread and not sources:
        without = dict.fromkeys(grading.fail_to_pass, unread)
    tried = [_screened(target) for target in found]
    tried = await _exclusive(bench, tried)
    for number in range(runs):
        tried = await _failing(bench, tried, str(number + 1))
    tried = await _not_undone(bench, tried, wanted)
    kept = [replace(one, left=one.left[:wanted]) for one in tried]
    twins = await _proven(bench, plain, [twin for one in kept for twin in one.twins])
    counts = {test: len(pool) for pool in pools(twins) for test in pool[0].tests}
    for one in kept:
        if one.target.tests[0] not in counts:
            without |= dict.fromkeys(one.target.tests, one.why)
    weak = tuple(t for one in kept if one.is_weak for t in one.target.tests if t in counts)
    done = instance.model_copy(
        update={"grading": grading.model_copy(update={"twins": tuple(twins)})}
    )
    return Chosen(done, ChosenReport(counts, weak, without, bench.runs))


_Plan = dict[Target, list[Copy]]
"""The copies to run of each function."""


@dataclass(frozen=True)
class _Tried:
    """A test function and its remaining candidates."""

    target: Target
    left: tuple[Candidate, ...]
    is_weak: bool = False
    why: str = "no rule can change one of its expectations so that only one version can pass"

    @property
    def twins(self) -> list[Twin]:
        return [
            Twin(
                tests=self.target.tests,
                path=self.target.source.path,
                line=one.line,
                before=one.before,
                after=one.after,
                rule=one.rule,
            )
            for one in self.left
        ]

    def keep(self, good: Sequence[Candidate], why: str) -> "_Tried":
        return replace(self, left=tuple(good), why=why if self.left and not good else self.why)


def _screened(target: Target) -> _Tried:
    """The candidates to run: clean ones first, then weak ones."""
    by: dict[Lint, list[Candidate]] = {kind: [] for kind in Lint}
    for one in candidates(target.source, target.function):
        by[lint(target.source, one)[0]].append(one)
    clean, weak = by[Lint.CLEAN], by[Lint.WEAK]
    ordered = (clean + weak)[:SCREENED]
    return _Tried(target, tuple(ordered), is_weak=not clean)


async def _sources(bench: Bench, grading: Grading) -> tuple[list[Source], str]:
    """The Python files that the test patch changes, and why the last unreadable one was skipped."""
    try:
        added = {p: n for p, n in added_lines(grading.test_patch).items() if p.endswith(".py")}
    except MalformedDiff as error:
        raise InstanceError(
            f"{bench.instance.ref}: `test_patch` is not a git diff: {error}"
        ) from error
    if not added:
        return [], "the test patch adds no Python lines"
    texts = await class_relations.read_files(bench.in_sandbox, list(added))
    sources, reason = [], ""
    for path, data in texts.items():
        try:
            sources.append(Source(path, data, added[path]))
        except ValueError as error:
            reason = str(error)
    return sources, reason


async def _exclusive(bench: Bench, tried: list[_Tried]) -> list[_Tried]:
    """Drop candidates that exchange a class for a related or unknown one."""
    pairs = {
        (one.target.source.path, *candidate.needs_unrelated)
        for one in tried
        for candidate in one.left
        if candidate.needs_unrelated
    }
    unrelated = (
        await class_relations.unrelated(bench.in_sandbox, sorted(pairs)) if pairs else frozenset()
    )
    return [
        one.keep(
            [
                c
                for c in one.left
                if not c.needs_unrelated
                or (one.target.source.path, *c.needs_unrelated) in unrelated
            ],
            "every candidate class is a subclass or a superclass of the expected one",
        )
        for one in tried
    ]


async def _failing(bench: Bench, tried: list[_Tried], number: str) -> list[_Tried]:
    """Keep candidates that fail under gold by their expectation, and under the base as the test."""
    plan = {
        one.target: [Copy(one.target.function), *(_copy(c) for c in one.left)]
        for one in tried
        if one.left
    }
    if not plan:
        return tried
    gold, base = await asyncio.gather(
        _copies(bench, bench.gold, f"gold-{number}", plan),
        _copies(bench, b"", f"base-{number}", plan),
    )
    kept = []
    for one in tried:
        copies = plan.get(one.target, [])
        if copies and gold[copies[0]].statuses - verdict_rules.F2P_PASSES:
            kept.append(one.keep([], "a renamed copy of it fails with `patch` applied"))
            continue
        if copies and gold[copies[0]] == NOT_RUN:
            kept.append(one.keep([], "the test command does not run copies of it"))
            continue
        good = [
            candidate
            for candidate, copy in zip(one.left, copies[1:], strict=False)
            if _fails_rightly(candidate, gold[copy]) and base[copy] == base[copies[0]]
        ]
        kept.append(one.keep(good, "no candidate fails as required under both gold and base"))
    return kept


def _fails_rightly(candidate: Candidate, shown: Behaviour) -> bool:
    """All its ids fail: a comparison by its assertion, `raises` by anything but a broken test."""
    if not shown.statuses or shown.statuses - _FAILING:
        return False
    kinds = {kind for kind, _ in shown.failures}
    if candidate.rule.startswith("raises"):
        return bool(kinds) and not kinds & _BROKEN
    return bool(kinds) and kinds <= _BY_ASSERTION


async def _not_undone(bench: Bench, tried: list[_Tried], wanted: int) -> list[_Tried]:
    """Drop twins that pass in the base after an exchange of a literal that does not make their test
    pass."""
    spare = [replace(one, left=one.left[: wanted + 2]) for one in tried]
    plan: _Plan = {}
    owners: dict[Copy, Candidate | None] = {}
    for one in spare:
        if not one.left:
            continue
        for twin in (None, *one.left):
            for copy in exchanges(one.target.source, one.target.function, twin):
                plan.setdefault(one.target, []).append(copy)
                owners.setdefault(copy, twin)
    if not plan:
        return spare
    shown = await _copies(bench, b"", "undone", plan)
    kept = []
    for one in spare:
        undone: dict[Candidate | None, set[object]] = {twin: set() for twin in (None, *one.left)}
        for copy in plan.get(one.target, ()):
            if shown[copy].statuses and not shown[copy].statuses - verdict_rules.F2P_PASSES:
                twin = owners[copy]
                own = twin.line if twin is not None else 0
                undone[twin].add(tuple(line for line in copy.lines if line[0] != own))
        good = [twin for twin in one.left if undone[twin] <= undone[None]]
        kept.append(one.keep(good, "exchanging one literal makes each of its twins pass"))
    return kept


def _copy(candidate: Candidate) -> Copy:
    return Copy(candidate.function, ((candidate.line, candidate.after),))


async def _copies(
    bench: Bench,
    patch: bytes,
    purpose: str,
    plan: _Plan,
) -> dict[Copy, Behaviour]:
    """Run the test files once with all copies, and return how each copy behaved."""
    files: dict[str, bytes] = {}
    places: dict[Copy, Place] = {}
    for source in dict.fromkeys(target.source for target in plan):
        copies = dict.fromkeys(
            copy for target in plan if target.source is source for copy in plan[target]
        )
        files[source.path], where = with_copies(source, list(copies), f"t{len(places)}_")
        places |= where
    suite = await bench.run(patch, purpose, files)
    if suite.run.refusal is not None or suite.run.status.code is None:
        return dict.fromkeys(places, NOT_RUN)
    shown = await bench.read(behaviours, suite, list(places.values()))
    return {copy: shown[place] for copy, place in places.items()}


async def _proven(bench: Bench, plain: Instance, twins: list[Twin]) -> list[Twin]:
    """Keep twins that fail in place of their test, under gold and base, and break no other test."""
    proven: list[Twin] = []
    rounds = [
        [pool[number] for pool in pools(twins) if number < len(pool)]
        for number in range(max((len(pool) for pool in pools(twins)), default=0))
    ]
    for number, together in enumerate(rounds):
        patch = with_twins(plain.grading.test_patch, together)
        grading = plain.grading.model_copy(update={"test_patch": patch})
        variant = plain.model_copy(update={"grading": grading})
        gold, base = await asyncio.gather(
            bench.run(bench.gold, f"proof-gold-{number + 1}", instance=variant),
            bench.run(b"", f"proof-base-{number + 1}", instance=variant),
        )
        with_gold = await bench.read(_statuses, gold)
        with_base = await bench.read(_statuses, base)
        twin_test_ids = {test for twin in together for test in twin.tests}
        others = [
            t for t in (*grading.fail_to_pass, *grading.pass_to_pass) if t not in twin_test_ids
        ]
        if any(
            verdict_rules.status_of(t, with_gold) not in verdict_rules.P2P_PASSES for t in others
        ):
            continue
        proven += [
            twin
            for twin in together
            if all(verdict_rules.status_of(t, with_gold) in _FAILING for t in twin.tests)
            and not any(
                verdict_rules.status_of(t, with_base) in verdict_rules.F2P_PASSES
                for t in twin.tests
            )
        ]
    return proven


def _statuses(suite: SuiteRun) -> dict[str, TestStatus]:
    return dict(reading_of(suite).statuses)
