"""Rows whose tree is in an image, in their publishers' layouts: gold is 1, the base is 0, and the agent's
sandbox shows neither tests nor fix."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
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


DRAW = """\
import struct, zlib


def part(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def drawn(color):
    size = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\\0" + bytes(color))
    return b"\\x89PNG\\r\\n\\x1a\\n" + part(b"IHDR", size) + part(b"IDAT", pixels) + part(b"IEND", b"")


def line():
    return drawn((255, 0, 0))
"""
BLUE = "return drawn((0, 0, 255))"
SPEC = """\
from pathlib import Path

import draw

tests = {"draws a line": draw.line() == Path("fixtures/line.png").read_bytes()}
tests["makes a PNG"] = draw.line()[1:4] == b"PNG"
for name, passes in tests.items():
    if not passes:
        print(f"Chrome 120.0.0.0 (Linux x86_64) {name} FAILED")
print(f"Executed {len(tests)} of {len(tests)}")
raise SystemExit(not all(tests.values()))
"""


def write_chart(root: Path) -> None:
    """/chart: a clone that draws its line red. Its next commit has the fix and the spec."""
    tree = root / "chart"
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    (tree / "draw.py").write_text(DRAW)
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "base")


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
    write_chart(root)
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


def added(path: str, text: str) -> str:
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    lines = text.splitlines(keepends=True)
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}" for line in lines)


@pytest.fixture
def chart(image: tuple[Path, str, str], tmp_path: Path) -> Instance:
    """A row of SWE-bench Multimodal whose test compares a picture with the row's own."""
    fixed = tmp_path / "chart"
    shutil.copytree(image[0] / "chart", fixed)
    text = DRAW.replace("return drawn((255, 0, 0))", BLUE)
    (fixed / "draw.py").write_text(text)
    picture = subprocess.check_output(
        [sys.executable, "-c", "import sys, draw; sys.stdout.buffer.write(draw.line())"], cwd=fixed
    )
    content = base64.b64encode(picture).decode()
    row: dict[str, Any] = {
        "instance_id": "chartjs__Chart.js-1",
        "repo": "chartjs/Chart.js",
        "version": "4.0",
        "base_commit": git(fixed, "rev-parse", "HEAD"),
        "problem_statement": "The line is red.",
        "patch": git(fixed, "diff", "--", "draw.py") + "\n",
        "test_patch": added("spec.py", SPEC),
        "image_assets": {"test_patch": [{"path": "fixtures/line.png", "content": content}]},
        "FAIL_TO_PASS": ["draws a line "],
        "PASS_TO_PASS": ["makes a PNG "],
        "image": str(image[0]),
        "workdir": "/chart",
        "log_parser": "parse_log_chart_js",
        "eval_type": "fail_only",
        "eval_script": "#!/bin/bash\nset -uxo pipefail\ncd /chart\n: '>>>>> Start Test Output'\n"
        "python3 spec.py\n: '>>>>> End Test Output'\n",
    }
    return to_instance(row, "mm", 1)


@pytest.fixture
def harbor(image: tuple[Path, str, str], tmp_path: Path) -> Instance:
    folder = write_harbor(tmp_path / "add", str(image[0]), "/task")
    made = to_instance({"data_source": "harbor", "task_folder": str(folder)}, "h", 1)
    return in_fresh_sandbox(made)


def in_fresh_sandbox(instance: Instance) -> Instance:
    """The row, if its tests reach other hosts than its agent."""
    grading = instance.grading.model_copy(update={"in_place": False})
    return instance.model_copy(update={"grading": grading})


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


async def test_a_multimodal_row_is_graded(services: Services, chart: Instance) -> None:
    """Its test reads the picture that came with the row, also if the agent draws one of its own
    there. A browser that does not start is no success, though no test failed."""
    own = added("fixtures/line.png", "mine\n").encode()
    dead = added("pathlib.py", "raise SystemExit\n").encode()
    gold = await graded(services, chart, chart.gold_patch, 0)
    nop = await graded(services, chart, b"", 1)
    drawn = await graded(services, chart, own, 2)
    quiet = await graded(services, chart, dead, 3)

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert (nop.outcome, nop.fail_to_pass) == ("unresolved", {"draws a line ": "FAILED"})
    assert nop.rewards.p2p_fraction == 1.0
    assert drawn.outcome == "unresolved"
    assert quiet.outcome == "unresolved"


@pytest.mark.longer
async def test_a_harbor_task_is_graded(services: Services, pro: Instance, harbor: Instance) -> None:
    """The number in the reward file is the reward: 1 for the fix, a part of it for the base."""
    gold = await graded(services, harbor, pro.gold_patch, 0)
    nop = await graded(services, harbor, b"", 1)

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert (nop.outcome, nop.reward, nop.rewards.partial) == ("unresolved", 0.5, 0.5)
