"""A SWE-smith row's two trees, made out of its image: the agent's, and the one that is graded."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from perdure.graders.image.image_setup import set_up_image, with_committed_tests
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.instances.rows.row_conversion import to_instance
from perdure.sandboxes.base import Mount, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import BASE, GOLD, TESTS, diff_of, make_repository
from perdure.types import Instance, Outcome

IMAGE = {**BASE, **GOLD, **TESTS}
"""Files of the image: the repository as it works, with its tests."""
ROW: dict[str, Any] = {
    "instance_id": "owner__calc.01234567.lm_rewrite__abcd",
    "repo": "swesmith/owner__calc.01234567",
    "image_name": "swesmith.x86_64.owner__calc.01234567",
    "problem_statement": "add() subtracts",
    "patch": diff_of({"calc/core.py": BASE["calc/core.py"]}, IMAGE).decode(),
    "FAIL_TO_PASS": ["tests/test_core.py::test_add"],
    "PASS_TO_PASS": ["tests/test_core.py::test_double", "tests/test_old.py::test_zero"],
    "test_cmd": "python -m pytest --verbose tests/test_core.py tests/test_old.py",
}


@pytest.fixture
def instance() -> Instance:
    return to_instance(ROW, "d", 1)


@asynccontextmanager
async def image(folder: Path) -> AsyncIterator[Sandbox]:
    """A sandbox whose tree and history are those of the image."""
    (tree := folder / f"tree-{uuid4().hex[:8]}").mkdir()
    make_repository(tree, IMAGE)
    provider = BubblewrapProvider(Settings(home=folder / "home"))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    prefixes = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    spec = SandboxSpec(
        workdir="/testbed",
        tree=tree,
        mounts=tuple(Mount(prefix, str(prefix)) for prefix in sorted(prefixes)),
        env={"PATH": f"{sys.prefix}/bin:{os.defpath}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    async with await provider.create(spec, f"p-smith-{uuid4().hex[:8]}") as sandbox:
        yield sandbox


async def said(sandbox: Sandbox, command: str) -> str:
    done = await sandbox.exec(["bash", "-c", command], cwd="/testbed")
    return done.stdout.decode("utf-8", "replace")


async def test_the_agent_gets_the_bug_and_neither_tests_nor_fix(
    instance: Instance, tmp_path: Path
) -> None:
    """Its tree has the bug and no file of FAIL_TO_PASS; its one commit is that tree. Twice is as once."""
    async with image(tmp_path) as sandbox:
        await set_up_image(sandbox, instance)
        await set_up_image(sandbox, instance)

        assert "return a - b" in await said(sandbox, "cat calc/core.py")
        assert await said(sandbox, "ls tests") == "test_more.py\ntest_old.py\n"
        assert await said(sandbox, "git status --porcelain") == ""
        assert await said(sandbox, "git rev-list --all --count") == "1\n"
        assert "a + b" not in await said(
            sandbox, "git cat-file --batch-all-objects --batch --unordered"
        )


@pytest.mark.parametrize(
    ("patch", "outcome", "dropped"),
    [
        ("gold", Outcome.RESOLVED, ()),
        ("nop", Outcome.UNRESOLVED, ()),
        ("tests", Outcome.EMPTY_PATCH, ("tests/test_core.py", "tests/test_old.py")),
    ],
)
async def test_gold_is_the_reverse_of_the_bug(
    instance: Instance, tmp_path: Path, patch: str, outcome: Outcome, dropped: tuple[str, ...]
) -> None:
    """The reverse resolves the row, the tree as it is does not, and the agent's tests count nothing."""
    weak = {
        "tests/test_core.py": "def test_add(): pass\n",
        "tests/test_old.py": "def test_zero(): pass\n",
    }
    agents_base = {name: data for name, data in IMAGE.items() if name != "tests/test_core.py"}
    diff = {"gold": instance.gold_patch, "nop": b"", "tests": diff_of(weak, agents_base)}[patch]
    async with image(tmp_path) as sandbox:
        with_tests = await with_committed_tests(sandbox, instance)
        await set_up_image(sandbox, with_tests)
        graded = await SwebenchGrader().grade(sandbox, with_tests, diff, timeout_s=60)

    assert (graded.grade.outcome, graded.grade.dropped_paths) == (outcome, dropped), (
        graded.grade.reason
    )
