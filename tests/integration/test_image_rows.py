"""Rows whose tree is in an image, in their publishers' layouts: gold is 1, the base is 0, and the agent's
sandbox shows neither tests nor fix."""

import hashlib
import json
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.instances import instance_catalog
from perdure.instances.rows.row_conversion import to_instance
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.types import Grade, Instance, PatchRef, RolloutRequest
from tests import small_image
from tests.doubles.apptainer_cli import write_program
from tests.unit.instances.made_rows import NEW, OLD, TEST, r2e_row, write_harbor, write_scripts

UNITTESTS = """\
import unittest

from calc import add


class TestAdd(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(add(2, 3), 5)

    def test_zero(self):
        self.assertEqual(add(2, 0), 2)
"""
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
GitIn = Callable[..., str]


def git(tree: Path, *arguments: str) -> str:
    argv = ["git", "-C", str(tree), "-c", "user.name=u", "-c", "user.email=u@x", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def repository(tree: Path) -> str:
    """A clone at its base in which calc.py is wrong. Returns the base commit."""
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    (tree / "calc.py").write_text(OLD)
    (tree / "Makefile").write_text("all:\n")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "base")
    return git(tree, "rev-parse", "HEAD")


def write_pro(root: Path) -> tuple[str, str]:
    """/app: HEAD is at a later commit, and the fix with its tests is in the history."""
    tree = root / "app"
    base = repository(tree)
    (tree / "calc.py").write_text(NEW)
    (tree / "test_calc.py").write_text(UNITTESTS)
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "the fix")
    return base, git(tree, "rev-parse", "HEAD")


def write_r2e(root: Path) -> None:
    """/testbed and /r2e_tests: tests, results and fix lie open, and the set-up has edited a file."""
    tree = root / "testbed"
    repository(tree)
    (tree / "Makefile").write_text("all: edited by the image\n")
    (tree / "run_tests.sh").write_text("pytest r2e_tests\n")
    (tree / "parsed_commit.json").write_text(json.dumps({"fix": NEW}))
    (root / "r2e_tests").mkdir()
    (root / "r2e_tests" / "test_1.py").write_text(TEST)
    packages = tree / ".venv" / "lib"
    installed = Path(sysconfig.get_path("purelib"))
    for path in [installed / name for name in PACKAGES] + list(installed.glob("pluggy-*")):
        shutil.copytree(path, packages / path.name)
    shutil.copy(installed / "py.py", packages)
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\nPYTHONPATH=/testbed/.venv/lib exec python3 "$@"\n')
    python.chmod(0o755)


def write_task(root: Path) -> None:
    """/task: no repository, as in images of Harbor's tasks."""
    (root / "task").mkdir()
    (root / "task" / "calc.py").write_text(OLD)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A root folder with both layouts; the base and the fix of /app."""
    folder = tmp_path_factory.mktemp("image")
    if missing := small_image.why_not():
        pytest.skip(missing)
    if found := BubblewrapProvider(Settings(home=folder / "h")).check():
        pytest.skip(found[0])
    root = folder / "root"
    small_image.write_root(root)
    write_r2e(root)
    write_task(root)
    return (root, *write_pro(root))


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(
        Settings(
            home=tmp_path / "home",
            store=str(tmp_path / "store"),
            apptainer={"program": write_program(tmp_path / "bin")},
        )
    )


@pytest.fixture
def pro(image: tuple[Path, str, str], tmp_path: Path) -> Instance:
    root, base, fix = image
    write_scripts(tmp_path, "instance_calc")
    row: dict[str, Any] = {
        "instance_id": "instance_calc",
        "repo": "o/calc",
        "base_commit": base,
        "patch": git(root / "app", "diff", base, fix, "--", "calc.py") + "\n",
        "test_patch": git(root / "app", "diff", base, fix, "--", "test_calc.py") + "\n",
        "problem_statement": "add() subtracts.",
        "fail_to_pass": "['test_sum']",
        "pass_to_pass": "['test_zero']",
        "before_repo_set_cmd": f"git reset --hard {base}\ngit clean -fd\ngit checkout {base}\n"
        f"git checkout {fix} -- test_calc.py",
        "selected_test_files_to_run": '["test_calc.py"]',
        "image": str(root),
    }
    return to_instance(row, "pro", 1, tmp_path)


@pytest.fixture
def r2e(image: tuple[Path, str, str]) -> Instance:
    return to_instance(r2e_row(docker_image=str(image[0])), "r2e", 1)


@pytest.fixture
def harbor(image: tuple[Path, str, str], tmp_path: Path) -> Instance:
    folder = write_harbor(tmp_path / "add", str(image[0]), "/task")
    return to_instance({"data_source": "harbor", "task_folder": str(folder)}, "h", 1)


def request_of(instance: Instance, sample: int = 0) -> RolloutRequest:
    return RolloutRequest(
        run_id="r", instance=instance.ref, sample_index=sample, agent="nop", sandbox="apptainer"
    )


async def seen_by_the_agent(services: Services, instance: Instance, places: str = "") -> str:
    """Files and git objects with a test or the fix, in the sandbox that the boot stage made."""
    words = "return a [+] b|test_sum"
    await instance_catalog.save(services.store, instance)
    attempt = Attempt(request=request_of(instance), attempt=1)
    await ActivityEnvironment().run(Stages(services).boot, attempt)
    (info,) = await services.provider("apptainer").list()
    async with await services.provider("apptainer").attach(info.identity) as sandbox:
        objects = "git cat-file --batch-all-objects --batch --unordered"
        files = f"grep -rlE --exclude-dir=.venv '{words}' . /tmp /root /home {places}"
        look = f"{objects} | grep -aE '{words}'; {files} 2>/dev/null; git log --format=%s; git status -s"
        done = await sandbox.exec(look, cwd=instance.environment.workdir, timeout=60)
    return done.stdout.decode()


async def graded(services: Services, instance: Instance, patch: bytes, sample: int) -> Grade:
    await instance_catalog.save(services.store, instance)
    request = request_of(instance, sample).model_copy(update={"grade_empty_patch": True})
    key = f"{store_keys.attempt(request, 1)}/patch.diff"
    await services.store.put(key, patch)
    digest = hashlib.sha256(patch).hexdigest()
    ref = PatchRef(key=key, sha256=digest, size=len(patch), empty=not patch, files=1)
    await stage_checkpoints.write(
        services.store, f"{store_keys.attempt(request, 1)}/patch.json", ref
    )
    attempt = Attempt(request=request, attempt=1, workflow_run_id="00000000")
    await ActivityEnvironment().run(Stages(services).grade, attempt)
    found = await stage_checkpoints.read(
        services.store, f"{store_keys.attempt(request, 1)}/grade-00000000.json", Grade
    )
    assert found is not None
    return found


@pytest.mark.longer
async def test_a_pro_image_shows_the_agent_its_base_only(services: Services, pro: Instance) -> None:
    """HEAD is the base, no test and no later commit is left, and nothing differs from the base."""
    assert await seen_by_the_agent(services, pro) == "base\n"


@pytest.mark.longer
async def test_a_pro_row_is_graded(services: Services, pro: Instance) -> None:
    """Gold is resolved and the base is not; an agent's own version of the tests is dropped."""
    own_tests = b"diff --git a/test_calc.py b/test_calc.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_calc.py\n@@ -0,0 +1 @@\n+x = 1\n"
    gold = await graded(services, pro, pro.gold_patch + own_tests, 0)
    nop = await graded(services, pro, b"", 1)

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert gold.dropped_paths == ("test_calc.py",)
    assert (nop.outcome, nop.fail_to_pass) == ("unresolved", {"test_sum": "FAILED"})


async def test_an_r2e_image_shows_the_agent_no_tests(services: Services, r2e: Instance) -> None:
    """Tests, results and fix are gone from every place, and the environment is no edit."""
    seen = await seen_by_the_agent(services, r2e, "/r2e_tests")

    assert seen == "base\n M Makefile\n"


@pytest.mark.longer
async def test_an_r2e_row_is_graded(services: Services, r2e: Instance) -> None:
    """Every status as expected is resolved; a file that the image edited is dropped and recorded."""
    makefile = b"diff --git a/Makefile b/Makefile\n--- a/Makefile\n+++ b/Makefile\n@@ -1 +1 @@\n-all:\n+all: edited by the image\n"
    gold = await graded(services, r2e, r2e.gold_patch + makefile, 0)
    nop = await graded(services, r2e, b"", 1)

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert gold.dropped_paths == ("Makefile",)
    assert (nop.outcome, nop.rewards.binary) == ("unresolved", 0.0)
    assert nop.rewards.partial == pytest.approx(2 / 3)


@pytest.mark.longer
async def test_a_harbor_task_is_graded(services: Services, pro: Instance, harbor: Instance) -> None:
    """The number in the reward file is the reward: 1 for the fix, a part of it for the base."""
    gold = await graded(services, harbor, pro.gold_patch, 0)
    nop = await graded(services, harbor, b"", 1)

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert (nop.outcome, nop.reward, nop.rewards.partial) == ("unresolved", 0.0, 0.5)
