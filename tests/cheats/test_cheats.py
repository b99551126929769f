"""Every cheat scores 0 and every control keeps its reward, on rows of three runners: `make test-cheats`."""

import functools
import os
import re
from pathlib import Path

import pytest

from perdure.graders.gold_and_base_check import calibrate
from perdure.instances.environment_builder import Environments
from perdure.instances.recipes.dataset_build import Builder, candidates_of, chosen
from perdure.instances.recipes.dataset_recipe import load_recipe
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_readers import read_rows
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Instance
from tests.cheats.cheat_catalog import CHEATS, CONTROLS, IN_CODE, WEAK
from tests.cheats.cheat_suite import Bench, Result, cases, table
from tests.cheats.cheat_target import Runner, Target
from tests.cheats.known_wins import STILL_WIN
from tests.cheats.made_rows import made_rows

AT_A_TIME = 2 * (os.cpu_count() or 1)
"""A grading waits for its sandbox for half of its time."""
ROOT = Path(__file__).parents[2]
ROWS = ROOT.parent / "shared/data/tasks/swebench_sdist.jsonl"
HOME = ROOT / ".perdure/test-cheats"
REAL: dict[str, tuple[Runner, str, str]] = {
    "marshmallow-code__marshmallow-1359": ("pytest", "marshmallow", "src/marshmallow/__init__.py"),
    "sympy__sympy-23950": ("sympy", "sympy", "sympy/__init__.py"),
}
"""Runner, package, and a module of it that every hidden test imports."""
FIRST_STEPS: dict[str, tuple[Runner, str, str]] = {
    "pathspec-0.11.1": ("pytest", "pathspec", "pathspec/__init__.py"),
    "h11-0.14.0": ("pytest", "h11", "h11/__init__.py"),
}
"""Rows that `perdure instances build` makes of two releases: unittest's style, and pytest's."""
REPEATED = re.compile("forges reports|full forgery|early ends.*with|log tricks")
"""One mechanism of each kind: gradings of real rows take longer."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    provider = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    return Bench(provider, tmp_path / "trees", pairs=1, most=AT_A_TIME)


@pytest.mark.timeout(5400)
async def test_only_known_cheats_win_and_no_control_is_harmed(bench: Bench) -> None:
    """With twins, what wins is the list of `winners`, no more and no less; each control is right."""
    results = await bench.run(cases(made_rows(), (*CHEATS, *WEAK), CONTROLS))
    print(f"\n{table(results)}")

    assert _wrong(results, control=True) == set()
    assert _wrong(results, control=False) == set(STILL_WIN)


@pytest.mark.registry
@pytest.mark.parametrize("name", FIRST_STEPS)
async def test_rows_of_first_steps_are_no_easier(name: str, tmp_path: Path) -> None:
    """On two releases of a package, which everybody can build, no forger wins either."""
    provider = BubblewrapProvider(Settings(home=HOME))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    assert await _wins(await _built(name, provider), provider, tmp_path) == []


@pytest.mark.registry
@pytest.mark.skipif(not ROWS.exists(), reason=f"the task data is not here: {ROWS.name}")
@pytest.mark.parametrize("name", REAL)
async def test_real_rows_are_no_easier(name: str, tmp_path: Path) -> None:
    """On real packages and tests no forger of reports, early end or trick with the log wins."""
    provider = BubblewrapProvider(Settings(home=HOME))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    assert await _wins(await _real(name, provider), provider, tmp_path) == []


async def _wins(target: Target, provider: BubblewrapProvider, folder: Path) -> list[str]:
    """The forgers that won on a row, and the controls that were harmed."""
    honest = [control for control in CONTROLS if control.name in ("gold", "nothing")]
    forgers = [cheat for cheat in IN_CODE if REPEATED.search(f"{cheat.family}: {cheat.name}")]
    bench = Bench(provider, folder, pairs=1, most=AT_A_TIME)
    results = await bench.run(cases([target], forgers, honest))
    print(f"\n{table(results)}")
    return [f"{result.name}: {result.outcome}" for result in results if not result.right]


async def _built(name: str, provider: BubblewrapProvider) -> Target:
    """As `perdure instances build datasets/first-steps` does, once: the home stays."""
    folder = ROOT / "datasets/first-steps"
    recipe = load_recipe(folder)
    (candidate,) = chosen(candidates_of(recipe, folder), [name])
    store = LocalStore(HOME / "store")
    without_twins = functools.partial(calibrate, runs=1, twins=0)
    builder = Builder(HOME, store, provider, recipe, without_twins)
    built = await builder.build(candidate, rebuild=False)
    assert built.instance is not None, built.problem
    return await _target(built.instance, builder.environments, FIRST_STEPS[name])


async def _real(name: str, provider: BubblewrapProvider) -> Target:
    """Built once: the home stays."""
    (row,) = (row for row in read_rows(ROWS) if row.fields["instance_id"] == name)
    instance = to_instance(row.fields, "cheats", row.number)
    environments = Environments(HOME / "environments", LocalStore(HOME / "store"), provider)
    return await _target(instance, environments, REAL[name])


async def _target(
    instance: Instance, environments: Environments, facts: tuple[Runner, str, str]
) -> Target:
    prepared = await environments.prepare(instance)
    assert prepared.tree is not None
    runner, package, host = facts
    base = {host: (prepared.tree / host).read_text()}
    return Target(instance, runner, package, host, base, prepared=prepared)


def _wrong(results: list[Result], *, control: bool) -> set[str]:
    return {
        f"{result.target}: {result.name}"
        for result in results
        if not result.right and (result.family == "control") == control
    }
