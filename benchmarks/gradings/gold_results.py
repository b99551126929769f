"""Grades the gold patch of each row of first-steps many times, with twins: a fix must never fail by
chance."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.gradings.forger_results import DATASET, open_home
from perdure.instances import instance_catalog
from perdure.types import Grade, Outcome

Found = dict[str, Counter[str]]
"""Row -> how many gradings: `tried`, `official` (the row's own protocol resolves it), `resolved` (also
with twins), and how many of those are `verified`, `weak` or `unverified`."""


async def measure(times: int, names: Sequence[str]) -> Found:
    """The rows are those of this home's store: `perdure instances build first-steps`. `names`: the
    start of their instance ids."""
    bench, environments, store = open_home()
    found: Found = {}
    for ref in await instance_catalog.refs(store, DATASET):
        if not ref.removeprefix(f"{DATASET}/").startswith(tuple(names)):
            continue
        row = await instance_catalog.load(store, ref)
        at = await environments.prepare(row)
        counts = found[ref] = Counter(tried=times)
        for _ in range(times):
            grade = await bench.grade(row, at, row.gold_patch)
            counts.update(_told(grade))
            if grade.outcome is not Outcome.RESOLVED:
                print(f"{ref}: {grade.outcome}, {grade.reason}", flush=True)
        print(ref, dict(counts), flush=True)
    return found


def _told(grade: Grade) -> list[str]:
    told = ["official"] if grade.official is Outcome.RESOLVED else []
    if grade.outcome is Outcome.RESOLVED and grade.verification is not None:
        told += ["resolved", grade.verification.state]
    return told


COLUMNS = ("tried", "official", "resolved", "verified", "weak", "unverified")


def table(found: Found) -> str:
    lines = [f"| gold of | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for ref, counts in found.items():
        lines.append(f"| {ref} | {' | '.join(str(counts[column]) for column in COLUMNS)} |")
    return "\n".join(lines)
