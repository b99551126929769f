"""The grader by lists passes the grader contract in a real, isolated sandbox."""

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.graders.swebench import SwebenchGrader
from perdure.sandboxes.base import Mount, Sandbox, SandboxSpec
from perdure.sandboxes.bubblewrap import BubblewrapProvider
from perdure.testing.grader_contract import GraderContract


class TestSwebenchGrader(GraderContract):
    @pytest.fixture
    def grader(self) -> SwebenchGrader:
        return SwebenchGrader()

    @pytest.fixture
    async def sandbox(self, repository: Path, tmp_path: Path) -> AsyncIterator[Sandbox]:
        provider = BubblewrapProvider(tmp_path / "sandboxes")
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
            },
        )
        async with await provider.create(spec, f"p-grader-{uuid4().hex[:8]}") as sandbox:
            yield sandbox
