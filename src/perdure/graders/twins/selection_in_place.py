"""Calibration of tests that cannot be copied: those in languages other than Python, and rows that are
graded by one exit code. Each twin is tried in place of its test.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from perdure.errors import MissingDependency
from perdure.graders import verdict_rules
from perdure.graders.twins.calibration_runs import Bench
from perdure.graders.twins.changed_line import as_twin
from perdure.graders.twins.draw_proof import FAILING, statuses_with
from perdure.graders.twins.expectation_mutation import candidates
from perdure.graders.twins.other_languages.languages import language_of
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.twin_lint import Lint, lint
from perdure.types import Instance, TestStatus, Twin

ROUNDS = 8
"""Most twins of one test that calibration tries."""
ALONE, AT_ONCE = 16, 2
"""Most runs of one twin alone, for twins that disturb others in a common run."""
NO_RULE = "no rule can change one of its expectations so that only one version can pass"
NO_FAILURE = "no candidate fails in its place, under gold and base, without disturbing another test"


@dataclass
class Pool:
    """The twins of one test function, or of one case of its table: those still to be tried, and
    those that were proven."""

    tests: tuple[str, ...]
    """Ids that may name it. A twin has those of them that it makes fail."""
    waiting: list[Twin]
    parents: tuple[str, ...] = ()
    """Ids of the function, which fails with each case of its table."""
    kept: list[Twin] = field(default_factory=list)

    @property
    def ids(self) -> tuple[str, ...]:
        return self.tests + self.parents

    def next(self, wanted: int) -> Twin | None:
        """Weak twins come last, and are tried only if no other was kept."""
        strong = sum(not twin.weak for twin in self.kept)
        if not self.waiting or strong >= wanted:
            return None
        if self.waiting[0].weak and (strong or len(self.kept) >= wanted):
            return None
        return self.waiting.pop(0)

    def proven(self, wanted: int) -> list[Twin]:
        """Twins that make the same tests fail: as many tests as possible."""
        strong = [twin for twin in self.kept if not twin.weak] or self.kept
        most = max((twin.tests for twin in strong), key=len, default=())
        return [twin for twin in strong if twin.tests == most][:wanted]


async def proven_pools(
    bench: Bench,
    plain: Instance,
    added: dict[str, frozenset[int]],
    tests: Sequence[str],
    wanted: int,
) -> tuple[list[list[Twin]], dict[str, str]]:
    """Twins of these tests, by function, and why another test has none.

    `added`: path -> lines that the test patch adds. Raises: any error of the sandboxes.
    """
    try:
        for language in filter(None, map(language_of, added)):
            language.parser()
    except MissingDependency as error:
        return [], dict.fromkeys(tests, str(error))
    texts = await bench.read_files(sorted(added))
    pools, unnamed = _pools(texts, added, tests, bench.by_exit_code)
    without = {test: NO_RULE for pool in pools if not pool.waiting for test in pool.ids}
    left = ALONE
    for number in range(ROUNDS):
        tried = [(pool, twin) for pool in pools if (twin := pool.next(wanted)) is not None]
        if not tried:
            break
        shown, base = await asyncio.gather(
            statuses_with(bench, plain, bench.gold, _twins(tried), f"tried-{number}"),
            statuses_with(bench, plain, b"", _twins(tried), f"tried-base-{number}"),
        )
        passing = {test for test, status in base.items() if status in verdict_rules.F2P_PASSES}
        if _kept(plain, tried, shown, unnamed, passing) or len(tried) == 1:
            continue
        alone, left = tried[:left], max(0, left - len(tried))
        each = await _shown_alone(bench, plain, _twins(alone), f"tried-{number}")
        for one, statuses in zip(alone, each, strict=True):
            _kept(plain, [one], statuses, unnamed, passing)
    found = [twins for pool in pools if (twins := pool.proven(wanted))]
    having = {test for twins in found for test in twins[0].tests}
    reasons = {test: NO_FAILURE for pool in pools for test in pool.ids} | without | unnamed
    return found, {test: why for test, why in reasons.items() if test not in having}


async def _shown_alone(
    bench: Bench, plain: Instance, twins: Sequence[Twin], purpose: str
) -> list[dict[str, TestStatus]]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def shown(number: int, twin: Twin) -> dict[str, TestStatus]:
        async with slots:
            return await statuses_with(bench, plain, bench.gold, [twin], f"{purpose}-{number}")

    return await asyncio.gather(*(shown(*one) for one in enumerate(twins)))


_Tried = Sequence[tuple[Pool, Twin]]


def _twins(tried: _Tried) -> list[Twin]:
    return [twin for _, twin in tried]


def _kept(
    plain: Instance,
    tried: _Tried,
    shown: dict[str, TestStatus],
    unnamed: Collection[str],
    passing: AbstractSet[str],
) -> bool:
    """If each twin makes a test of its function fail and all other tests pass, keep those twins
    that the base does not pass.

    `unnamed`: ids of no function, such as that of a whole file, which fails with each of its tests.
    `passing`: ids that pass under the base with these twins.
    """

    def failing(tests: Iterable[str]) -> tuple[str, ...]:
        return tuple(test for test in tests if verdict_rules.status_of(test, shown) in FAILING)

    own = [failing(pool.tests) and failing(pool.ids) for pool, _ in tried]
    wider = failing(unnamed)
    failed = {test for tests in (*own, wider) for test in tests}
    grading = plain.grading
    others = [t for t in (*grading.fail_to_pass, *grading.pass_to_pass) if t not in failed]
    passed = all(verdict_rules.status_of(t, shown) in verdict_rules.P2P_PASSES for t in others)
    if not passed or not all(own):
        return False
    for (pool, twin), tests in zip(tried, own, strict=True):
        if not passing & set(tests):
            pool.kept.append(twin.model_copy(update={"tests": tests + wider}))
    return True


def _pools(
    texts: dict[str, bytes],
    added: dict[str, frozenset[int]],
    tests: Sequence[str],
    by_exit_code: bool,
) -> tuple[list[Pool], dict[str, str]]:
    # Installed only with the grammars.
    from perdure.graders.twins.other_languages import twin_pools
    from perdure.graders.twins.other_languages.parsed_file import ParsedFile

    files = [
        ParsedFile(path, data, added[path], language)
        for path, data in texts.items()
        if (language := language_of(path)) is not None
    ]
    if by_exit_code:
        parts = [
            twin_pools.twins_of(file, function, tuple(tests))
            for file in files
            for function in file.functions
        ]
        parts += _of_python(texts, added, tuple(tests))
        return [Pool(tuple(tests), _mixed(parts))], {}
    named, without = twin_pools.named_functions(files, tests)
    pools = [
        Pool(one.tests, one.twins, one.parents)
        for (file, function), ids in named.items()
        for one in twin_pools.pools_of(file, function, ids)
    ]
    return pools, without


def _of_python(
    texts: dict[str, bytes], added: dict[str, frozenset[int]], tests: tuple[str, ...]
) -> list[list[Twin]]:
    """Twins that exchange no class: whether two classes are related is not asked here."""
    parts = []
    for path, data in texts.items():
        if not path.endswith(".py"):
            continue
        try:
            source = Source(path, data, added[path])
        except ValueError:
            continue
        for function in source.functions:
            by_lint = [
                (lint(source, one)[0], one)
                for one in candidates(source, function)
                if not one.needs_unrelated
            ]
            parts.append(
                [
                    as_twin(one, path, tests, weak=kind is Lint.WEAK)
                    for kind, one in by_lint
                    if kind is not Lint.REFUSED
                ]
            )
    return parts


def _mixed(parts: Sequence[Sequence[Twin]]) -> list[Twin]:
    """The functions take turns; weak twins come last."""
    longest = max(map(len, parts), default=0)
    turns = [part[number] for number in range(longest) for part in parts if number < len(part)]
    return sorted(turns, key=lambda twin: twin.weak)
