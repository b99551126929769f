"""Guards against forgers for other languages than Python, on ten made rows a framework: `make
test-languages`. One framework alone: `-k go`.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Grade, Outcome
from tests.languages.frameworks import FRAMEWORKS, Framework, rows
from tests.languages.row_bench import RowBench, RowResult, is_confirmed

HOME = Path(__file__).parents[2] / ".perdure/test-languages"
"""Outlives the run: npm installs there once."""
WITHOUT_TWINS = {
    "go-wrap": "its tests compare by a helper of their own",
    "java-median": "two numbers can both be within the tolerance of an `assertEquals`",
    "rust-semver": "it compares booleans, and the base passes their negation",
}
"""Rows with a FAIL_TO_PASS test that has no twin, so that a fix stays unverified."""
PACKAGES = ("jest@29.7.0", "mocha@10.8.2", "chai@4.5.0")


@pytest.fixture
def provider(tmp_path: Path) -> BubblewrapProvider:
    made = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := made.check():
        pytest.skip("; ".join(missing))
    return made


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    found = FRAMEWORKS[request.param]
    if missing := found.missing():
        pytest.skip(missing)
    return found


@pytest.fixture(scope="session")
def node_modules() -> Path:
    folder = HOME / "node_modules"
    if not (HOME / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(HOME)]
        subprocess.run([*command, *PACKAGES], check=True, timeout=600)
        (HOME / "installed").touch()
    return folder


@pytest.mark.timeout(3600)
async def test_no_forger_wins_and_every_fix_does(
    framework: Framework, provider: BubblewrapProvider, node_modules: Path, tmp_path: Path
) -> None:
    """With twins, gold and a fix in other words are confirmed, and every forger is exposed."""
    bench = RowBench(provider, tmp_path / "trees", node_modules, pairs=1)
    results = [await bench.result(framework, row) for row in rows(framework)]
    print(f"\n{_HEAD}\n{_table_row(framework, results)}")

    assert [line for result in results for line in result.wrong()] == []
    without = {
        result.name: dict(result.without_twins) for result in results if result.without_twins
    }
    known = {name for name in WITHOUT_TWINS if name.startswith(f"{framework.name}-")}
    assert without.keys() == known, without


@pytest.mark.timeout(1800)
async def test_forgers_win_by_the_protocol_alone(
    framework: Framework, provider: BubblewrapProvider, node_modules: Path, tmp_path: Path
) -> None:
    """Without guards the forgers get the full reward, so the other test proves something."""
    bench = RowBench(provider, tmp_path / "trees", node_modules, pairs=0)
    results = [await bench.result(framework, row) for row in rows(framework)]

    lost = [
        f"{result.name}: {forger}: {grade.outcome} ({grade.reason})"
        for result in results
        for forger, grade in result.forged.items()
        if grade.outcome is not Outcome.RESOLVED
    ]
    assert lost == []


_HEAD = """| framework | rows | gold resolved (verified) | honest resolved (verified) | forgers exposed | twins strong / weak |
|---|---|---|---|---|---|"""


def _table_row(framework: Framework, results: list[RowResult]) -> str:
    forged = [grade for result in results for grade in result.forged.values()]
    exposed = sum(grade.outcome is Outcome.TAMPERED for grade in forged)
    cells = (
        framework.name,
        len(results),
        _counts([result.gold for result in results]),
        _counts([result.honest for result in results]),
        f"{exposed} / {len(forged)}",
        f"{sum(result.strong for result in results)} / {sum(result.weak for result in results)}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _counts(grades: list[Grade]) -> str:
    resolved = sum(grade.outcome is Outcome.RESOLVED for grade in grades)
    return f"{resolved} ({sum(map(is_confirmed, grades))})"
