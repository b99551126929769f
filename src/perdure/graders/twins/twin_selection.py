"""Calibration: chooses twins that fail under gold and its honest variants, and that fail under the
base as their test does.

Copies of all candidates run next to their test, in the kind of sandbox that grades, and must behave
the same in all runs. The chosen twins then run in place of their tests, in the draws that gradings
will use.
"""

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from perdure.errors import InstanceError
from perdure.graders import verdict_rules
from perdure.graders.diff.git_diff_parser import MalformedDiff
from perdure.graders.protocols.test_lists import SuiteRun, reading_of
from perdure.graders.twins import class_relations
from perdure.graders.twins.calibration_runs import Bench
from perdure.graders.twins.copied_tests import Copy, exchanges, with_copies
from perdure.graders.twins.expectation_mutation import Candidate, candidates
from perdure.graders.twins.failure_locations import NOT_RUN, Behaviour, Place, behaviours
from perdure.graders.twins.honest_variants import Variant, honest_variants
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.patch_lines import added_lines, changed_lines, with_twins
from perdure.graders.twins.published_test_ids import Target, targets
from perdure.graders.twins.twin_lint import Lint, lint
from perdure.graders.twins.twin_support import why_no_twins
from perdure.instances.calibration_proof import MakeSandbox
from perdure.types import Grading, Instance, TestStatus, Twin, TwinDraw, distinct_twins

UNPROVEN = "in place of its test, none of its twins fails without disturbing another test"

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
    variants: tuple[str, ...] = ()
    """The honest variants of gold under which every twin failed; with fewer than two, calibration
    has not shown that other correct fixes fail the twins."""
    runs: int = 0
    """Number of sandboxes used."""


@dataclass(frozen=True)
class Chosen:
    """The instance with `grading.twin_draws`, and the evidence."""

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
    plain = _with_draws(instance, ())
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
    tried, variants = await _under_variants(bench, tried)
    tried = await _not_undone(bench, tried, wanted)
    pools = [pool for one in tried if (pool := one.pool(wanted))]
    draws = await _proven_draws(bench, plain, pools, wanted)
    twins = distinct_twins(draws)
    counts = Counter(test for twin in twins for test in twin.tests)
    for one in tried:
        if one.target.tests[0] not in counts:
            why = UNPROVEN if one.left else one.why
            without |= dict.fromkeys(one.target.tests, why)
    weak = tuple(dict.fromkeys(test for twin in twins if twin.weak for test in twin.tests))
    report = ChosenReport(dict(counts), weak, without, variants, bench.runs)
    return Chosen(_with_draws(instance, draws), report)


def _with_draws(instance: Instance, draws: Sequence[TwinDraw]) -> Instance:
    grading = instance.grading.model_copy(update={"twin_draws": tuple(draws)})
    return instance.model_copy(update={"grading": grading})


_Plan = dict[Target, list[Copy]]
"""The copies to run of each function."""


@dataclass(frozen=True)
class _Tried:
    """A test function and its remaining candidates."""

    target: Target
    left: tuple[Candidate, ...]
    weak: frozenset[Candidate] = frozenset()
    why: str = "no rule can change one of its expectations so that only one version can pass"

    def pool(self, wanted: int) -> list[Twin]:
        """At most `wanted` twins; weak ones only if no other is left."""
        clean = [one for one in self.left if one not in self.weak]
        return [
            Twin(
                tests=self.target.tests,
                path=self.target.source.path,
                line=one.line,
                before=one.before,
                after=one.after,
                rule=one.rule,
                weak=one in self.weak,
            )
            for one in (clean or self.left)[:wanted]
        ]

    def keep(self, good: Sequence[Candidate], why: str) -> "_Tried":
        return replace(self, left=tuple(good), why=why if self.left and not good else self.why)


def _screened(target: Target) -> _Tried:
    """The candidates to run: clean ones first, then weak ones."""
    by: dict[Lint, list[Candidate]] = {kind: [] for kind in Lint}
    for one in candidates(target.source, target.function):
        by[lint(target.source, one)[0]].append(one)
    clean, weak = by[Lint.CLEAN], by[Lint.WEAK]
    return _Tried(target, tuple((clean + weak)[:SCREENED]), frozenset(weak))


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
    """Drop candidates that exchange a class for a related or unknown one, or for which a fix could
    make a class of both."""
    if _fix_raises(bench.gold):
        why = "a correct fix may raise an exception that is of both classes"
        tried = [one.keep([c for c in one.left if not c.needs_unrelated], why) for one in tried]
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


_MAKES_CLASS = re.compile(rb"^\+(?!\+\+ ).*?\b(?:raise|class)\b", re.MULTILINE)


def _fix_raises(patch: bytes) -> bool:
    """Whether the fix itself raises or defines classes. Another correct fix may then raise a class
    that inherits from both, for example from the expected one and from RuntimeError."""
    return _MAKES_CLASS.search(patch) is not None


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


async def _under_variants(
    bench: Bench, tried: list[_Tried]
) -> tuple[list[_Tried], tuple[str, ...]]:
    """Drop candidates that do not fail under an honest variant of gold: other correct fixes would
    pass them. Also the names of the variants, which are those that pass all originals."""
    plan = {
        one.target: [Copy(one.target.function), *(_copy(c) for c in one.left)]
        for one in tried
        if one.left
    }
    used = []
    for variant in await _variants(bench, tried) if plan else []:
        name = variant.name.replace(" ", "-")
        originals, shown = await asyncio.gather(
            bench.run(bench.gold, f"originals-{name}", dict(variant.files)),
            _copies(bench, bench.gold, f"twins-{name}", plan, variant.files),
        )
        if not _is_proven(bench.instance.grading, (), await bench.read(_statuses, originals)):
            continue
        used.append(variant.name)
        why = f"another correct fix passes its twins, or fails a copy of it: {variant.name}"
        tried = [one.keep(_failing_alone(one, shown), why) for one in tried]
    return tried, tuple(used)


def _failing_alone(one: _Tried, shown: Mapping[Copy, Behaviour]) -> list[Candidate]:
    """The candidates that fail where an unchanged copy of their test passes."""
    if not one.left or shown[Copy(one.target.function)].statuses - verdict_rules.F2P_PASSES:
        return []
    return [c for c in one.left if _fails_rightly(c, shown[_copy(c)])]


async def _variants(bench: Bench, tried: list[_Tried]) -> list[Variant]:
    changed = {p: lines for p, lines in changed_lines(bench.gold).items() if p.endswith(".py")}
    if not changed:
        return []
    sources = []
    for path, data in (await class_relations.read_files(bench.in_sandbox, list(changed))).items():
        with contextlib.suppress(ValueError):  # not Python of this interpreter
            sources.append(Source(path, data, changed[path]))
    expected = (c.needs_unrelated for one in tried for c in one.left if c.needs_unrelated)
    return honest_variants(sources, [other for _, other in expected])


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
    others: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[Copy, Behaviour]:
    """Run the test files once with all copies and these other files, and return how each copy
    behaved."""
    files = dict(others)
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


async def _proven_draws(
    bench: Bench, plain: Instance, pools: list[list[Twin]], wanted: int
) -> list[TwinDraw]:
    """At most `wanted` draws that all have a twin of the same functions: of as many as possible."""
    proven: list[TwinDraw] = []
    for number in range(min(wanted, max(map(len, pools), default=0))):
        together = [pool[number % len(pool)] for pool in pools]
        draw = await _proven_draw(bench, plain, together, str(number + 1))
        if draw is not None:
            proven.append(draw)
    most = max((_functions(draw) for draw in proven), key=len, default=frozenset())
    return [draw for draw in proven if _functions(draw) == most]


def _functions(draw: TwinDraw) -> frozenset[tuple[str, ...]]:
    return frozenset(twin.tests for run in draw.runs for twin in run)


async def _proven_draw(
    bench: Bench, plain: Instance, together: list[Twin], number: str
) -> TwinDraw | None:
    """The first division of these twins into runs that is proven under gold: in each run, the twins
    fail and all other tests pass. Twins that the base passes, or that pass, are left out."""
    base = await _statuses_with(bench, plain, b"", together, f"proof-base-{number}")
    together = [twin for twin in together if not _any(twin, base, verdict_rules.F2P_PASSES)]
    for division, runs in enumerate(_divisions(together)):
        found = await asyncio.gather(
            *(
                _statuses_with(bench, plain, bench.gold, run, f"proof-{number}-{division}-{side}")
                for side, run in enumerate(runs)
            )
        )
        if all(
            _is_proven(plain.grading, run, shown) for run, shown in zip(runs, found, strict=True)
        ):
            return TwinDraw(runs=runs)
    return None


DIVISIONS = 3
"""Random divisions between two runs that calibration tries, before all twins share one run."""


def _divisions(twins: Sequence[Twin]) -> Iterator[tuple[tuple[Twin, ...], ...]]:
    """Divided between two runs, a forger must judge each test by itself; together, one is enough."""
    for _ in range(DIVISIONS if len(twins) > 1 else 0):
        mixed = random.sample(twins, len(twins))
        cut = random.randrange(1, len(twins))
        yield tuple(mixed[:cut]), tuple(mixed[cut:])
    if twins:
        yield (tuple(twins),)


async def _statuses_with(
    bench: Bench, plain: Instance, patch: bytes, twins: Sequence[Twin], purpose: str
) -> dict[str, TestStatus]:
    tests = with_twins(plain.grading.test_patch, twins)
    grading = plain.grading.model_copy(update={"test_patch": tests})
    variant = plain.model_copy(update={"grading": grading})
    return await bench.read(_statuses, await bench.run(patch, purpose, instance=variant))


def _is_proven(grading: Grading, twins: Sequence[Twin], shown: dict[str, TestStatus]) -> bool:
    having = {test for twin in twins for test in twin.tests}
    others = [t for t in (*grading.fail_to_pass, *grading.pass_to_pass) if t not in having]
    return all(_all(twin, shown, _FAILING) for twin in twins) and all(
        verdict_rules.status_of(test, shown) in verdict_rules.P2P_PASSES for test in others
    )


def _all(twin: Twin, shown: dict[str, TestStatus], statuses: frozenset[TestStatus]) -> bool:
    return all(verdict_rules.status_of(test, shown) in statuses for test in twin.tests)


def _any(twin: Twin, shown: dict[str, TestStatus], statuses: frozenset[TestStatus]) -> bool:
    return any(verdict_rules.status_of(test, shown) in statuses for test in twin.tests)


def _statuses(suite: SuiteRun) -> dict[str, TestStatus]:
    return dict(reading_of(suite).statuses)
