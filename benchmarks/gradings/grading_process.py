"""The grading process: grades a generated row in bubblewrap, as the grade stage does, on its cores.

It reads one order per line, `{"case": "gold", "pairs": 1, "count": 8, "at_a_time": 2}`, and answers
each with `{"seconds": ..., "runs": ...}`. Its first line is `ready`.
"""

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from perdure.graders.base import Graded
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.graders.twins.paired_runs import verified
from perdure.graders.twins.twin_selection import choose_twins
from perdure.sandboxes.base import Mount, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import make_repository
from perdure.types import Instance, Outcome
from tests.cheats.made_rows import made_rows

TIMEOUT_S = 600.0
EXPECTED = {"gold": Outcome.RESOLVED, "nop": Outcome.UNRESOLVED}


@dataclass(frozen=True)
class Grading:
    """Grades one row in fresh sandboxes."""

    provider: BubblewrapProvider
    tree: Path
    row: Instance

    async def sandbox(self, purpose: str) -> Sandbox:
        prefixes = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
        spec = SandboxSpec(
            workdir="/testbed",
            tree=self.tree,
            mounts=tuple(Mount(prefix, str(prefix)) for prefix in sorted(prefixes)),
            env={
                "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
        )
        return await self.provider.create(spec, f"p-{purpose}-{uuid4().hex[:12]}")

    async def grade(self, case: str, pairs: int) -> int:
        """Grade once and return the number of test runs. An unexpected verdict is a benchmark bug."""
        patch = self.row.gold_patch if case == "gold" else b""

        async def once(row: Instance) -> Graded:
            async with await self.sandbox("gradings") as sandbox:
                return await SwebenchGrader().grade(sandbox, row, patch, timeout_s=TIMEOUT_S)

        found = await verified(self.row, pairs, once)
        assert found.grade.outcome is EXPECTED[case], found.grade.reason
        return len(found.runs)

    async def obey(self, order: dict[str, Any]) -> dict[str, float]:
        slots = asyncio.Semaphore(order["at_a_time"])

        async def one() -> int:
            async with slots:
                return await self.grade(order["case"], order["pairs"])

        started = time.monotonic()
        runs = await asyncio.gather(*(one() for _ in range(order["count"])))
        return {"seconds": time.monotonic() - started, "runs": sum(runs)}


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pd-") as name:
        folder = Path(name)
        target = next(row for row in made_rows() if row.runner == "pytest")
        tree = folder / "tree"
        tree.mkdir()
        make_repository(tree, target.base)
        provider = BubblewrapProvider(Settings(home=folder / "home"))
        grading = Grading(provider, tree, target.instance)
        chosen = await choose_twins(target.instance, grading.sandbox, runs=1)
        assert chosen.instance.grading.twin_draws, chosen.report.without
        grading = Grading(provider, tree, chosen.instance)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await grading.obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
