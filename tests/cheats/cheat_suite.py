"""Grades cheats and controls in fresh sandboxes, many at a time, on prepared trees."""

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from perdure.graders.base import Graded
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.graders.twins.twin_selection import choose_twins
from perdure.instances.environment_builder import Prepared
from perdure.limited_process import Unparsable, read
from perdure.sandboxes.base import Mount, Sandbox, SandboxProvider
from perdure.testing.grader_contract import make_repository
from perdure.types import Instance, Outcome
from tests.cheats.cheat_target import Cheat, Control, Target
from tests.cheats.swebench_report import swebench_resolves
from tests.sandbox_gradings import TIMEOUT_S, fresh_sandbox, graded


@dataclass(frozen=True)
class Result:
    """One cheat or control on one target."""

    name: str
    family: str
    target: str
    outcome: Outcome
    reward: float
    reason: str
    wanted: float
    swebench: bool | None = None
    """What swebench says about the same log; None: no test ran."""

    @property
    def right(self) -> bool:
        return self.reward == self.wanted


@dataclass(frozen=True)
class Case:
    """A diff whose reward is known."""

    name: str
    family: str
    target: Target
    patch: bytes
    wanted: float


def cases(
    targets: Iterable[Target], cheats: Iterable[Cheat], controls: Iterable[Control]
) -> list[Case]:
    """Every cheat that has a meaning for a target, and every control, on every target."""
    targets = list(targets)
    found = [
        Case(control.name, "control", target, control.make(target), control.reward)
        for control in controls
        for target in targets
    ]
    for cheat in cheats:
        made = ((target, cheat.make(target)) for target in targets)
        found += [
            Case(cheat.name, cheat.family, t, diff, 0.0) for t, diff in made if diff is not None
        ]
    return found


class Bench:
    """Grades in fresh sandboxes of prepared trees.

    `pairs`: 0 asks for the row's own protocol alone, 1 or more for the verified verdict. `most`: how
    many gradings run at a time. `tell` is given each wrong result at once.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        folder: Path,
        *,
        pairs: int,
        most: int = 2,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._provider = provider
        self._folder = folder
        self._pairs = pairs
        self._seats = asyncio.Semaphore(most)
        self._tell = tell
        self._grader = SwebenchGrader()

    async def run(self, cases: Sequence[Case]) -> list[Result]:
        """In the order of the cases. Raises: InstanceError; SandboxLost or RetryHere after TRIES."""
        targets = {case.target.name: case.target for case in cases}.values()
        prepared = await asyncio.gather(*map(self._prepared, targets))
        instances = {instance.instance_id: instance for instance in prepared}
        return await asyncio.gather(
            *(self._result(case, instances[case.target.name]) for case in cases)
        )

    async def _prepared(self, target: Target) -> Instance:
        """Its tree is a repository, and its tests have twins where twins are asked for."""
        if target.prepared is None:
            await asyncio.to_thread(self._plant, target)
        if not self._pairs:
            return target.instance

        async def fresh(_: str) -> Sandbox:
            return await fresh_sandbox(self._provider, self._made(target))

        return (await choose_twins(target.instance, fresh, timeout_s=TIMEOUT_S)).instance

    def _plant(self, target: Target) -> None:
        tree = self._folder / target.name
        tree.mkdir(parents=True)
        make_repository(tree, target.base)

    async def _result(self, case: Case, instance: Instance) -> Result:
        made = self._made(case.target)
        async with self._seats:
            found = await graded(
                self._provider, made, self._grader, instance, case.patch, pairs=self._pairs
            )
        grade = found.grade
        result = Result(
            name=case.name,
            family=case.family,
            target=case.target.name,
            outcome=grade.outcome,
            reward=grade.rewards.binary,
            reason=grade.reason,
            wanted=case.wanted,
            swebench=None if self._pairs else await _beside(case.target, found.runs[0]),
        )
        if not result.right:
            self._tell(f"{result.target}: {result.name}: {result.outcome} {result.reward}")
        return result

    def _made(self, target: Target) -> Prepared:
        if target.prepared is not None:
            return target.prepared
        prefixes = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
        return Prepared(
            workdir="/testbed",
            tree=self._folder / target.name,
            image=None,
            mounts=tuple(Mount(prefix, str(prefix)) for prefix in sorted(prefixes)),
            env={
                "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            base_commit=None,
        )


async def _beside(target: Target, graded: Graded) -> bool | None:
    if not graded.log:
        return None
    try:
        return await read(swebench_resolves, target.instance, graded.log, graded.grade.exit_code)
    except Unparsable:
        return False


def shown(result: Result) -> dict[str, object]:
    """As JSON."""
    return {field.name: getattr(result, field.name) for field in fields(result)}


def table(results: Sequence[Result]) -> str:
    """Markdown: wrong rewards of tried ones, for each family and row; then swebench's, if it was asked."""
    targets = list(dict.fromkeys(result.target for result in results))
    families = [*sorted({result.family for result in results} - {"control"}), "control"]
    head = ["", *targets, "swebench"]
    rows = [head, ["---"] * len(head)]
    for family in families:
        of_family = [result for result in results if result.family == family]
        cells = [_share([r for r in of_family if r.target == target]) for target in targets]
        rows.append([family, *cells, _share_of_swebench(of_family)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _share(results: Sequence[Result]) -> str:
    return f"{sum(not result.right for result in results)} / {len(results)}"


def _share_of_swebench(results: Sequence[Result]) -> str:
    asked = [result for result in results if result.swebench is not None]
    wrong = sum(float(bool(result.swebench)) != result.wanted for result in asked)
    return f"{wrong} / {len(asked)}"
