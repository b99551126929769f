"""Real SWE-bench rows through the whole of grading: oracle resolves each, nop resolves none.

Needs the task data beside the checkout and a package registry. Two rows run by default; set
`PERDURE_TEST_ALL_ROWS=1` for all of them, `PERDURE_TEST_CACHE` to keep the built environments.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.graders.base import Graded
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.instances.environment_builder import Environments, Prepared
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_readers import read_rows
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Grade, Instance, Limits, Outcome, TestStatus

ROWS = Path(__file__).parents[3] / "shared/data/tasks/swebench_sdist.jsonl"
DEFAULT = ("marshmallow-code__marshmallow-1359", "psf__requests-6028")
LIMITS = Limits(memory_mb=4096, disk_mb=2048)
RUNS = 3 if os.environ.get("PERDURE_TEST_ALL_ROWS") else 2

pytestmark = pytest.mark.registry


def _instances() -> Sequence[Instance]:
    if not ROWS.exists():
        return []
    rows = [to_instance(row.fields, "swebench-sdist", row.number) for row in read_rows(ROWS)]
    everything = bool(os.environ.get("PERDURE_TEST_ALL_ROWS"))
    return [row for row in rows if everything or row.instance_id in DEFAULT]


INSTANCES = _instances()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("PERDURE_TEST_CACHE")
    return Path(kept) if kept else tmp_path_factory.mktemp("rows")


async def _prepare(instance: Instance, home: Path) -> tuple[BubblewrapProvider, Prepared]:
    provider = BubblewrapProvider(Settings(home=home))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    environments = Environments(home / "environments", LocalStore(home / "store"), provider)
    return provider, await environments.prepare(instance)


async def _grade(
    provider: BubblewrapProvider, prepared: Prepared, instance: Instance, patch: bytes
) -> Graded:
    spec = SandboxSpec(
        workdir=prepared.workdir,
        tree=prepared.tree,
        mounts=prepared.mounts,
        env=prepared.env,
        limits=LIMITS,
    )
    async with await provider.create(spec, f"p-row-{uuid4().hex[:12]}") as sandbox:
        return await SwebenchGrader().grade(sandbox, instance, patch, timeout_s=300)


def _per_test(grade: Grade) -> dict[str, TestStatus]:
    return {**grade.fail_to_pass, **grade.pass_to_pass}


@pytest.mark.skipif(not INSTANCES, reason="task data is not here")
@pytest.mark.parametrize(
    "instance",
    [*(pytest.param(one, marks=pytest.mark.longer) for one in INSTANCES[:-1]), *INSTANCES[-1:]],
    ids=lambda instance: instance.instance_id,
)
async def test_oracle_resolves_and_nop_does_not(instance: Instance, home: Path) -> None:
    """Gold resolves the row and the untouched base does not, the same on every run."""
    provider, prepared = await _prepare(instance, home)

    gold = [await _grade(provider, prepared, instance, instance.gold_patch) for _ in range(RUNS)]
    nop = (await _grade(provider, prepared, instance, b"")).grade

    assert gold[0].grade.outcome is Outcome.RESOLVED, gold[0].grade.reason
    assert all(_per_test(run.grade) == _per_test(gold[0].grade) for run in gold)
    assert (nop.outcome, nop.rewards.p2p_fraction) == (Outcome.UNRESOLVED, 1.0), nop.reason
