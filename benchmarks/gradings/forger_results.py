"""Measures how often twins refuse a correct fix, and which forgers win with and without them.

It uses rows of first-steps with twins from this home's store (`perdure instances build`). Every grading
runs as in the grade stage, in bubblewrap. A fix counts if the row's own protocol resolves it.
"""

import difflib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from benchmarks.gradings.correct_fixes import FIXES, MODULES
from perdure.graders.base import Graded
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.graders.twins.paired_runs import verified
from perdure.instances import instance_catalog
from perdure.instances.environment_builder import Environments, Prepared
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.settings.settings_loader import load_settings
from perdure.stack.home_providers import ready_provider
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.types import Grade, Instance, Outcome
from tests.cheats.twin_forgers import FORGERS

DATASET = "first-steps"


@dataclass
class Report:
    """The counts of fixes and forgers."""

    fixes: Counter[str] = field(default_factory=Counter)
    """`correct`, `refused`, and `wrong` for a fix that the row's own protocol does not resolve."""
    refused: list[str] = field(default_factory=list)
    forgers: dict[str, Counter[str]] = field(default_factory=dict)
    """Outcomes by forger; `official` counts wins without twins."""


@dataclass(frozen=True)
class Bench:
    provider: SandboxProvider
    report: Report

    async def grade(self, row: Instance, at: Prepared, patch: bytes) -> Grade:
        async def once(instance: Instance) -> Graded:
            spec = SandboxSpec(
                workdir=at.workdir, tree=at.tree, mounts=at.mounts, env=at.env, ttl_s=600
            )
            async with await self.provider.create(spec, f"p-twins-{uuid4().hex[:8]}") as sandbox:
                return await SwebenchGrader().grade(sandbox, instance, patch, timeout_s=120)

        return (await verified(row, 1, once)).grade

    async def fixes(self, row: Instance, at: Prepared) -> None:
        for number, fix in enumerate(FIXES[row.instance_id], 1):
            patch = _diff(_tree(at), fix.path, fix.old, fix.new)
            grade = await self.grade(row, at, patch)
            if grade.official is not Outcome.RESOLVED:
                self.report.fixes["wrong"] += 1
            elif grade.outcome is Outcome.RESOLVED:
                self.report.fixes["correct"] += 1
            else:
                self.report.fixes["refused"] += 1
                self.report.refused.append(f"{row.instance_id} {number}: {grade.reason}")

    async def forge(self, row: Instance, at: Prepared, times: int) -> None:
        for forger in FORGERS:
            patch = _diff(_tree(at), MODULES[row.instance_id], "", forger.code)
            for _ in range(times if forger.by_chance else 1):
                grade = await self.grade(row, at, patch)
                counts = self.report.forgers.setdefault(forger.name, Counter())
                counts["tried"] += 1
                counts["official"] += grade.official is Outcome.RESOLVED
                counts["won"] += grade.outcome is Outcome.RESOLVED
                counts["exposed"] += grade.outcome is Outcome.TAMPERED


def _tree(at: Prepared) -> Path:
    assert at.tree is not None
    return at.tree


def _diff(tree: Path, path: str, old: str, new: str) -> bytes:
    """The diff that replaces `old` by `new` in a file. If `old` is empty, `new` is appended."""
    text = (tree / path).read_text()
    assert not old or text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
    changed = text.replace(old, new) if old else f"{text}\n{new}"
    lines = difflib.unified_diff(
        text.splitlines(True), changed.splitlines(True), f"a/{path}", f"b/{path}"
    )
    return f"diff --git a/{path} b/{path}\n{''.join(lines)}".encode()


async def measure(times: int) -> Report:
    """`times`: gradings of each forger that wins by chance."""
    bench, environments, store = open_home()
    for name in FIXES:
        row = await instance_catalog.load(store, f"{DATASET}/{name}")
        assert row.grading.twin_draws, f"{row.ref} has no twins: perdure instances build --rebuild"
        at = await environments.prepare(row)
        await bench.fixes(row, at)
        print(row.instance_id, dict(bench.report.fixes), bench.report.refused, flush=True)
        await bench.forge(row, at, times)
        print(json.dumps(bench.report.forgers), flush=True)
    return bench.report


def open_home() -> tuple[Bench, Environments, Store]:
    settings = load_settings()
    store = open_store(settings)
    provider = ready_provider(settings, "bubblewrap")
    environments = Environments(settings.home.absolute() / "environments", store, provider)
    return Bench(provider, Report()), environments, store


def table(report: Report) -> str:
    lines = [
        "| forger | tried | wins officially | wins with twins | exposed |",
        "|---|---|---|---|---|",
    ]
    for name, counts in report.forgers.items():
        cells = (counts[key] for key in ("tried", "official", "won", "exposed"))
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"fixes: {dict(report.fixes)}"])
