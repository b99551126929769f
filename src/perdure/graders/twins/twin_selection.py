"""Calibration: chooses twins that fail under gold and its honest variants, and that fail under the
base as their test does.

Copies of all candidates run next to their test, in the kind of sandbox that grades, and must behave
the same in all runs. The chosen twins then run in place of their tests, in the draws that gradings
will use.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from perdure.errors import InstanceError
from perdure.graders import verdict_rules
from perdure.graders.diff.git_diff_parser import MalformedDiff
from perdure.graders.protocols.eval_cmd import EXIT_CODE
from perdure.graders.twins import class_relations
from perdure.graders.twins.calibration_runs import Bench
from perdure.graders.twins.canary_proof import has_proven_canary
from perdure.graders.twins.changed_line import as_twin
from perdure.graders.twins.copied_tests import Copy, exchanges, with_copies
from perdure.graders.twins.draw_proof import FAILING, is_proven, parse_statuses, proven_draws
from perdure.graders.twins.expectation_mutation import ARGUMENT, Candidate, candidates
from perdure.graders.twins.failure_locations import NOT_RUN, Behaviour, Place, behaviours
from perdure.graders.twins.honest_variants import changes_equality, honest_variants
from perdure.graders.twins.other_languages.languages import language_of
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.patch_lines import added_lines, changed_lines
from perdure.graders.twins.published_test_ids import Target, targets
from perdure.graders.twins.selection_in_place import proven_pools
from perdure.graders.twins.twin_lint import Lint, lint
from perdure.graders.twins.twin_support import why_no_twins
from perdure.instances.calibration_proof import MakeSandbox
from perdure.types import Instance, Twin, distinct_twins

UNPROVEN = "in place of its test, none of its twins fails without disturbing another test"

LEAST_VARIANTS = 2
"""Honest variants of gold under which a twin must fail."""
SCREENED = 14
"""Most candidates of one test that calibration runs."""

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
    """The honest variants of gold under which every twin failed."""
    runs: int = 0
    """Number of sandboxes used."""


@dataclass(frozen=True)
class Chosen:
    """The instance with `grading.twin_draws` and `grading.canary`, and the evidence."""

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
    plain = _changed(instance, twin_draws=(), canary=False)
    grading = instance.grading
    if (reason := why_no_twins(grading)) is not None:
        return Chosen(plain, ChosenReport(without=dict.fromkeys(grading.fail_to_pass, reason)))
    plain = _changed(plain, canary=await has_proven_canary(bench, plain))
    added = _added(bench.instance)
    tests: Sequence[str] = (EXIT_CODE,) if bench.by_exit_code else grading.fail_to_pass
    pools, without, variants = await _copied(bench, added, tests, wanted, runs)
    if bench.by_exit_code or any(map(language_of, added)):
        rest = [test for test in tests if test in without]
        more, others = await proven_pools(bench, plain, added, rest, wanted)
        pools += more
        without = {test: why for test, why in without.items() if test not in rest} | others
    draws = await proven_draws(bench, plain, pools, wanted)
    twins = distinct_twins(draws)
    counts = Counter(test for twin in twins for test in twin.tests)
    lost = [test for pool in pools for test in pool[0].tests if test not in counts]
    without |= dict.fromkeys(lost, UNPROVEN)
    weak = tuple(dict.fromkeys(test for twin in twins if twin.weak for test in twin.tests))
    return Chosen(
        _changed(plain, twin_draws=tuple(draws)),
        ChosenReport(dict(counts), weak, without, variants, bench.runs),
    )


class _Copied(NamedTuple):
    pools: list[list[Twin]]
    """Twins by function."""
    without: dict[str, str]
    """Test -> why it has none."""
    variants: tuple[str, ...]
    """The honest variants that were used."""


async def _copied(
    bench: Bench,
    added: dict[str, frozenset[int]],
    tests: Sequence[str],
    wanted: int,
    runs: int,
) -> _Copied:
    """Twins of Python tests, chosen by running copies."""
    sources, unread = await _sources(bench, added)
    if not sources or bench.by_exit_code:
        why = unread or "the test patch adds no Python lines"
        return _Copied([], dict.fromkeys(tests, why), ())
    found, without = targets(sources, tests, bench.instance.grading.pass_to_pass)
    fix = await _fix_sources(bench)
    tried = await _exclusive(bench, fix, [_screened(target) for target in found])
    for number in range(runs):
        tried = await _failing(bench, tried, str(number + 1))
    tried, variants = await _under_variants(bench, fix, tried)
    tried = await _not_undone(bench, tried, wanted)
    for one in tried:
        if not one.left:
            without |= dict.fromkeys(one.target.tests, one.why)
    return _Copied([pool for one in tried if (pool := one.pool(wanted))], without, variants)


def _changed(instance: Instance, **grading: object) -> Instance:
    return instance.model_copy(update={"grading": instance.grading.model_copy(update=grading)})


def _added(instance: Instance) -> dict[str, frozenset[int]]:
    try:
        return added_lines(instance.grading.test_patch)
    except MalformedDiff as error:
        raise InstanceError(f"{instance.ref}: `test_patch` is not a git diff: {error}") from error


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
            as_twin(one, self.target.source.path, self.target.tests, weak=one in self.weak)
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


async def _sources(bench: Bench, added: dict[str, frozenset[int]]) -> tuple[list[Source], str]:
    """The Python files that the test patch changes, and why the last unreadable one was skipped."""
    paths = [path for path in added if path.endswith(".py")]
    if not paths:
        return [], ""
    texts = await bench.read_files(paths)
    sources, reason = [], ""
    for path, data in texts.items():
        try:
            sources.append(Source(path, data, added[path]))
        except ValueError as error:
            reason = str(error)
    return sources, reason


async def _exclusive(bench: Bench, fix: Sequence[Source], tried: list[_Tried]) -> list[_Tried]:
    """Drop candidates that a correct fix could pass: they exchange a class for a related or unknown
    one, the fix may raise a class that inherits from both, or its equality may ignore an
    argument."""
    if _MAKES_EQUALITY.search(bench.gold) is not None or any(map(changes_equality, fix)):
        why = "a correct fix may make an equality that ignores an argument"
        tried = [one.keep([c for c in one.left if c.rule != ARGUMENT], why) for one in tried]
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


_MAKES_EQUALITY = re.compile(
    rb"^\+(?!\+\+ ).*?\b(?:class|dataclass\w*|[nN]amed[tT]uple|attrs?|define)\b",
    re.MULTILINE,
)
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
    if not shown.statuses or shown.statuses - FAILING:
        return False
    kinds = {kind for kind, _ in shown.failures}
    if candidate.needs_unrelated:
        return bool(kinds) and not kinds & _BROKEN
    return bool(kinds) and kinds <= _BY_ASSERTION


async def _under_variants(
    bench: Bench, fix: Sequence[Source], tried: list[_Tried]
) -> tuple[list[_Tried], tuple[str, ...]]:
    """Drop candidates that do not fail under an honest variant of gold: other correct fixes would
    pass them. Also the names of the variants, which are those that pass all originals."""
    plan = {
        one.target: [Copy(one.target.function), *(_copy(c) for c in one.left)]
        for one in tried
        if one.left
    }
    used = []
    for variant in honest_variants(fix) if plan else []:
        name = variant.name.replace(" ", "-")
        originals, shown = await asyncio.gather(
            bench.run(bench.gold, f"originals-{name}", dict(variant.files)),
            _copies(bench, bench.gold, f"twins-{name}", plan, variant.files),
        )
        if not is_proven(bench.instance.grading, (), await bench.read(parse_statuses, originals)):
            continue
        used.append(variant.name)
        why = f"another correct fix passes its twins, or fails a copy of it: {variant.name}"
        tried = [one.keep(_failing_alone(one, shown), why) for one in tried]
    if len(used) < LEAST_VARIANTS:
        why = f"the fix has {len(used)} honest variants that pass its tests, of {LEAST_VARIANTS}"
        tried = [one.keep([], why) for one in tried]
    return tried, tuple(used)


def _failing_alone(one: _Tried, shown: Mapping[Copy, Behaviour]) -> list[Candidate]:
    """The candidates that fail where an unchanged copy of their test passes."""
    if not one.left or shown[Copy(one.target.function)].statuses - verdict_rules.F2P_PASSES:
        return []
    return [c for c in one.left if _fails_rightly(c, shown[_copy(c)])]


async def _fix_sources(bench: Bench) -> list[Source]:
    """The Python files of the fixed tree that the fix changes; `added` are the changed lines."""
    changed = {p: lines for p, lines in changed_lines(bench.gold).items() if p.endswith(".py")}
    sources = []
    if changed:
        for path, data in (await bench.read_files(list(changed))).items():
            with contextlib.suppress(ValueError):  # not Python of this interpreter
                sources.append(Source(path, data, changed[path]))
    return sources


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
