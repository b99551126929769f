"""The grader by lists passes the grader contract in a real, isolated sandbox."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.sandboxes.base import Mount, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import GraderContract, make_repository, tiny_instance
from perdure.types import Outcome


@asynccontextmanager
async def boxed(repository: Path, home: Path, **env: str) -> AsyncIterator[Sandbox]:
    """A bubblewrap sandbox with the repository and this test run's pytest."""
    provider = BubblewrapProvider(Settings(home=home))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    prefixes = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    spec = SandboxSpec(
        workdir="/testbed",
        tree=repository,
        mounts=tuple(Mount(prefix, str(prefix)) for prefix in sorted(prefixes)),
        env={
            "PATH": f"{sys.prefix}/bin:{os.defpath}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # twice as fast
            **env,
        },
    )
    async with await provider.create(spec, f"p-grader-{uuid4().hex[:8]}") as sandbox:
        yield sandbox


class TestSwebenchGrader(GraderContract):
    @pytest.fixture
    def grader(self) -> SwebenchGrader:
        return SwebenchGrader()

    @pytest.fixture
    async def sandbox(self, repository: Path, tmp_path: Path) -> AsyncIterator[Sandbox]:
        async with boxed(repository, tmp_path / "sandboxes") as box:
            yield box


async def test_image_without_the_locale_is_graded(tmp_path: Path) -> None:
    """Warnings of bash at its start do not count as junit: the fix is resolved, not tampered."""
    (tree := tmp_path / "repository").mkdir()
    make_repository(tree)
    instance = tiny_instance()

    async with boxed(tree, tmp_path / "sandboxes", LC_ALL="xx_XX.UTF-8") as box:
        warned = await box.exec(["bash", "-c", "true"], timeout=30)
        graded = await SwebenchGrader().grade(box, instance, instance.gold_patch, timeout_s=60)

    assert b"setlocale" in warned.stderr
    assert (graded.grade.outcome, graded.grade.reason) == (Outcome.RESOLVED, "")
