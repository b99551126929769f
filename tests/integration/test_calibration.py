"""`perdure instances calibrate` on a real stack: server, worker that is killed, bubblewrap, pytest."""

import asyncio
import importlib.util
import sys
import tarfile
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType

from perdure.client.sdk import CalibrationHandle
from perdure.episodes.episode_store import scan_run
from perdure.graders.twins.honest_variants import EQUAL, INDIRECT
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.environment_builder import WORK
from perdure.storage import store_keys
from perdure.testing.grader_contract import BASE as TREE
from perdure.testing.grader_contract import (
    FAIL_TO_PASS,
    PASS_TO_PASS,
    TESTS,
    diff_of,
    tiny_instance,
    write,
)
from perdure.types import (
    CalibrationRequest,
    CalibrationState,
    Environment,
    Instance,
    Outcome,
    RunRequest,
    Source,
    SourceKind,
    distinct_twins,
)
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import DEATH_S, Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.longer]

PYTEST = ("_pytest", "iniconfig", "packaging", "pluggy", "pygments", "pytest")
PACKAGES = f"{WORK}/packages"
FLAKY = "tests/test_flaky.py::test_weather"
STORM = "storm"
"""A file of the environment. Once it says `yes`, the flaky test fails on the fixed tree. Its size stays, so
the environment still counts as whole."""
LOOKS = f"""\
from pathlib import Path

from calc.core import add


def test_weather():
    assert add(1, 2) != 3 or Path("{WORK}/{STORM}").read_text() != "yes"
"""
USELESS = diff_of({"calc/core.py": str(TREE["calc/core.py"]) + "\n\ndef unused():\n    pass\n"})


def rows(folder: Path) -> tuple[Instance, Instance]:
    """A sound row with one flaky test, and one whose fix changes nothing. The environment's build
    installs this Python's pytest from the tree, so that no package index is needed."""
    write(folder, TREE)
    with tarfile.open(folder / "packages.tar", "w") as packed:
        for name in PYTEST:
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            packed.add(Path(found.origin).parent, name)
    environment = Environment(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        install=(
            f"mkdir {PACKAGES}",
            f"tar -C {PACKAGES} -xf $REPO/packages.tar",
            f"printf 'no ' >{WORK}/{STORM}",
        ),
        env={"PYTHONPATH": PACKAGES, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    sound = tiny_instance(
        test_cmd="python3 -m pytest -rA tests",
        test_patch=diff_of({**TESTS, "tests/test_flaky.py": LOOKS}),
        pass_to_pass=(*PASS_TO_PASS, FLAKY),
    )
    useless = tiny_instance(test_cmd="python3 -m pytest -rA tests")
    common = {
        "dataset": "toy",
        "source": Source(kind=SourceKind.DIRECTORY, path=str(folder)),
        "environment": environment,
    }
    return (
        sound.model_copy(update={**common, "instance_id": "sound"}),
        useless.model_copy(update={**common, "instance_id": "useless", "gold_patch": USELESS}),
    )


async def test_a_dataset_is_proved_over_a_killed_worker(tmp_path: Path) -> None:
    """Flaky tests leave the lists, twins are chosen and then judge a rollout, the useless fix is
    quarantined; the same command afterwards plays nothing."""
    if missing := why_not_here():
        pytest.skip(missing)
    asked = CalibrationRequest(
        dataset="toy",
        runs=2,
        twins=1,
        concurrency=1,
        rollout={"heartbeat_timeout_s": DEATH_S},
    )
    async with running(tmp_path / "home") as stack:
        sound, useless = rows(tmp_path / "tree")
        for row in (sound, useless):
            await instance_catalog.save(stack.store, row)
        handle = await stack.perdure.start_calibration(asked)
        await _kill_the_worker_in_the_middle(stack, handle)
        told = await handle.result()

        assert (told["rows"], told["proved"], told["quarantined"]) == (2, 1, 1)
        assert (
            "FAIL_TO_PASS tests/test_core.py::test_add FAILED"
            in told["why_quarantined"]["toy/useless"]
        )
        assert (told["ceiling"], told["floor"]) == (
            0.25,
            0.0,
        )  # the flaky test failed one of gold's four
        proved = await calibration_record.read(stack.store, sound, "bubblewrap")
        assert proved is not None
        assert (proved.fail_to_pass, proved.pass_to_pass) == (FAIL_TO_PASS, PASS_TO_PASS)
        assert list(proved.dropped) == [FLAKY]
        assert {
            test for twin in distinct_twins(proved.twin_draws or ()) for test in twin.tests
        } == set(FAIL_TO_PASS)
        assert proved.variants == (EQUAL, INDIRECT)
        assert await stack.store.exists(store_keys.calibration_report(asked.workflow_id))

        again = await stack.perdure.start_calibration(asked)
        assert await again.result() == told
        assert await _commands(again) == [
            *("prepare_calibration", "load_calibration_rows", "report_calibration")
        ]

        await _a_run_is_verified(stack)


async def _kill_the_worker_in_the_middle(stack: Stack, handle: CalibrationHandle) -> None:
    """kill -9 when the first verdict is there, with gold; then the weather changes."""
    end = asyncio.ensure_future(handle.result())

    async def verdict() -> bool:
        return end.done() or any(["/grade-" in key async for key in stack.store.list("runs/")])

    await until(verdict, "a first rollout is graded")
    assert not end.done(), end.exception() or end.result()
    end.cancel()
    await stack.workers[0].kill()
    (work,) = stack.home.glob("environments/ready/*/work")
    (work / STORM).write_text("yes")
    await stack.start_worker()


async def _commands(handle: CalibrationHandle) -> list[str]:
    """The activities and child workflows of the newest run, in order."""
    found = []
    async for event in handle.handle.fetch_history_events():
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            found.append(event.activity_task_scheduled_event_attributes.activity_type.name)
        if event.event_type == EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED:
            found.append("a rollout")
    return found


async def _a_run_is_verified(stack: Stack) -> None:
    """A run of the dataset leaves out the quarantined row; the other's twins are in its grade."""
    run = RunRequest(run_id="after", dataset="toy", rollout={"agent": "oracle"})
    await (await stack.perdure.start_run(run)).result()
    (episode,), _ = await scan_run(stack.store, run.run_id)

    assert episode.instance == "toy/sound"
    assert episode.grade is not None
    assert episode.grade.verification is not None
    assert (episode.outcome, episode.grade.verification.state) == (Outcome.RESOLVED, "weak")
    assert set(episode.grade.verification.twins) == set(FAIL_TO_PASS)
    assert episode.grade.calibration is CalibrationState.PROVED
