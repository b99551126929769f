"""Calibrates a row and grades its patches, in fresh sandboxes of its planted tree."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perdure.graders.base import Grader
from perdure.graders.gold_and_base_check import verify
from perdure.graders.protocols.eval_cmd import EvalCmdGrader
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.instances.environment_builder import FIXED, Prepared
from perdure.sandboxes.base import Sandbox, SandboxProvider
from perdure.testing.grader_contract import make_repository
from perdure.types import Grade, Instance, Outcome, distinct_twins
from tests.languages.frameworks import PATH, Framework, Row
from tests.sandbox_gradings import TIMEOUT_S, fresh_sandbox, graded

TWINS = 2
_GOOD = ("verified", "weak")


@dataclass(frozen=True)
class RowResult:
    """The grades of a row's patches."""

    name: str
    gold: Grade
    honest: Grade
    nothing: Grade
    forged: Mapping[str, Grade]
    strong: int = 0
    """Twins that no reader could recognize."""
    weak: int = 0
    without_twins: Mapping[str, str] = field(default_factory=dict)
    """FAIL_TO_PASS id -> why calibration found no twin."""

    def wrong(self) -> Iterator[str]:
        """The patches with a wrong grade. If a test has no twin, a fix is resolved, but unverified."""
        for patch, grade in (("gold", self.gold), ("honest", self.honest)):
            if not (
                grade.outcome is Outcome.RESOLVED if self.without_twins else is_confirmed(grade)
            ):
                yield f"{self.name}: {patch}: {_shown(grade)}"
        if self.nothing.outcome is not Outcome.UNRESOLVED:
            yield f"{self.name}: nothing: {_shown(self.nothing)}"
        for forger, grade in self.forged.items():
            if grade.outcome is not Outcome.TAMPERED:
                yield f"{self.name}: {forger}: {_shown(grade)}"


def is_confirmed(grade: Grade) -> bool:
    """It resolves the row, and twins confirm it."""
    checked = grade.verification
    return grade.outcome is Outcome.RESOLVED and checked is not None and checked.state in _GOOD


def _shown(grade: Grade) -> str:
    checked = grade.verification
    return f"{grade.outcome} ({grade.reason}), {checked.state if checked else 'unchecked'}"


class RowBench:
    """`pairs`: 0 grades by the row's own protocol, without calibration."""

    def __init__(
        self, provider: SandboxProvider, folder: Path, node_modules: Path, *, pairs: int
    ) -> None:
        self._provider = provider
        self._folder = folder
        self._node_modules = node_modules
        self._pairs = pairs

    async def result(self, framework: Framework, row: Row) -> RowResult:
        """Raises: InstanceError if gold does not resolve the row, or the base does."""
        name = row.instance.instance_id
        tree = self._folder / name
        tree.mkdir(parents=True)
        await asyncio.to_thread(make_repository, tree, row.base)
        made = Prepared(
            workdir="/testbed",
            tree=tree,
            image=None,
            mounts=framework.mounts(self._node_modules),
            env={"PATH": PATH, **FIXED, **framework.env},
            base_commit=None,
        )

        async def fresh(_: str) -> Sandbox:
            return await fresh_sandbox(self._provider, made)

        twins = TWINS if self._pairs else 0
        calibrated = await verify(row.instance, fresh, runs=1, twins=twins, timeout_s=TIMEOUT_S)
        instance = calibrated.instance

        async def grade(patch: bytes) -> Grade:
            grader = _grader(instance)
            found = await graded(self._provider, made, grader, instance, patch, pairs=self._pairs)
            return found.grade

        proven = distinct_twins(instance.grading.twin_draws)
        weak = sum(twin.weak for twin in proven)
        return RowResult(
            name,
            gold=await grade(instance.gold_patch),
            honest=await grade(row.honest),
            nothing=await grade(b""),
            forged={forger: await grade(patch) for forger, patch in row.forged.items()},
            strong=len(proven) - weak,
            weak=weak,
            without_twins=calibrated.report.without_twins,
        )


def _grader(instance: Instance) -> Grader:
    return EvalCmdGrader() if instance.grading.protocol == "eval_cmd" else SwebenchGrader()
