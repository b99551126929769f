"""A Harbor task whose result is a diff and files outside of the repository: from the agent to named
rewards in the episode."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_episode
from perdure.instances import instance_catalog
from perdure.instances.rows.row_import import import_rows
from perdure.rollouts.activity_messages import Attempt, Ending
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.types import Limits, RolloutRequest, RolloutStatus
from tests import held_ports, small_image
from tests.doubles.apptainer_cli import write_program
from tests.unit.instances.made_rows import OLD, write_harbor

SOLUTION = """\
sed -i 's/a - b/a + b/' calc.py
echo built >out/built.o; echo new >out/new; rm out/old
mkdir -p /data/report; echo 5 >/data/report/sum; echo scratch >/data/other
"""
TEST = """\
#!/bin/bash
code=$(grep -c 'a + b' calc.py)
[ "$(ls out)" = $'built.o\\nnew' ] && out=1 || out=0.5
[ "$(cat /data/report/sum)" = 5 ] && [ ! -e /data/other ] && report=2 || report=0
echo 1 >/logs/verifier/reward.txt
echo "{\\"reward\\": $code, \\"out\\": $out, \\"report\\": $report}" >/logs/verifier/reward.json
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image")
    if missing := small_image.why_not():
        pytest.skip(missing)
    if found := BubblewrapProvider(Settings(home=folder / "h")).check():
        pytest.skip(found[0])
    root = small_image.write_root(folder / "root")
    (root / "task/out").mkdir(parents=True)
    (root / "task/calc.py").write_text(OLD)
    (root / "task/.gitignore").write_text("*.o\n")
    (root / "task/out/old").write_text("old\n")
    return root


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """No gateway runs at its port, not even one of another stack."""
    program = write_program(tmp_path / "bin")
    with held_ports.held(1) as (port,):
        yield Services(
            Settings(
                home=tmp_path / "home",
                store=str(tmp_path / "store"),
                apptainer={"program": program},
                gateway={"url": f"http://127.0.0.1:{port}"},
            )
        )


async def imported(services: Services, root: Path, folder: Path, artifacts: str) -> str:
    task = write_harbor(folder, str(root), "/task")
    text = (task / "task.toml").read_text()
    (task / "task.toml").write_text(f"artifacts = [{artifacts}]\n" + text)
    (task / "environment/Dockerfile").write_text("FROM scratch\nWORKDIR /task\n")
    (task / "solution/solve.sh").write_text(SOLUTION)
    (task / "tests/test.sh").write_text(TEST)
    return await imported_task(services, task)


async def imported_task(services: Services, task: Path) -> str:
    """As if its tests reached other hosts than its agent, so that they need a fresh sandbox."""
    (ref,) = (await import_rows(services.store, task)).refs
    instance = await instance_catalog.load(services.store, ref)
    grading = instance.grading.model_copy(update={"in_place": False})
    await instance_catalog.save(services.store, instance.model_copy(update={"grading": grading}))
    return ref


async def played(services: Services, ref: str, agent: str, limits: Limits | None = None) -> Episode:
    """The stages of one rollout, as its workflow calls them."""
    request = RolloutRequest(
        run_id=agent, instance=ref, agent=agent, sandbox="apptainer", limits=limits or Limits()
    )
    attempt = Attempt(request=request, attempt=1, workflow_run_id="00000000")
    stages, called = Stages(services), ActivityEnvironment()
    for stage in (stages.boot, stages.run_agent, stages.capture):
        await called.run(stage, attempt)
    graded = await called.run(stages.grade, attempt)
    ending = Ending(
        request=request, attempts=1, status=RolloutStatus.GRADED, grade=graded.stored_as,
        started_at=0.0, workflow_run_id="00000000",
    )  # fmt: skip
    await called.run(stages.emit, ending)
    episode = await read_episode(services.store, request)
    assert episode is not None
    return episode


@pytest.mark.parametrize("artifacts", ['"/data/report", "/task/out"', '"/data/report", "/task"'])
async def test_files_are_graded_next_to_the_diff(
    services: Services, root: Path, tmp_path: Path, artifacts: str
) -> None:
    """The tests see the diff's files, ignored and deleted files below an artifact, and artifacts
    outside of the repository, but no other files. All three rewards reach the episode."""
    ref = await imported(services, root, tmp_path / "add", artifacts)
    gold, nothing = [await played(services, ref, agent) for agent in ("oracle", "nop")]

    assert gold.named_rewards == {"reward": 1.0, "out": 1.0, "report": 2.0}
    assert (gold.outcome, gold.reward) == ("resolved", 1.0)
    assert nothing.named_rewards == {"reward": 0.0, "out": 0.5, "report": 0.0}
    assert (nothing.outcome, nothing.reward) == ("unresolved", 0.0)


async def test_artifacts_alone_are_a_result(services: Services, root: Path, tmp_path: Path) -> None:
    """The diff is empty, and the tests run on the files that the agent left elsewhere."""
    ref = await imported(services, root, tmp_path / "add", '"/data/report"')
    (tmp_path / "add/solution/solve.sh").write_text(
        "mkdir -p /data/report; echo 5 >/data/report/sum"
    )
    ref = await imported_task(services, tmp_path / "add")
    found = await played(services, ref, "oracle")
    assert found.patch is not None
    key = f"{store_keys.attempt(RolloutRequest(run_id='oracle', instance=ref), 1)}/artifacts.tar"
    data = (await services.store.get(key)).data

    assert (found.patch.empty, found.patch.artifacts_size) == (True, len(data))
    assert found.named_rewards["report"] == 2.0
    with tarfile.open(fileobj=io.BytesIO(data), ignore_zeros=True) as tar:
        assert "data/report/sum" in tar.getnames()
