"""What gold and no patch resolve of a run's instances: no model can do better, none should do worse.

Calibration has tried both. Instances that were not calibrated count as unknown.
"""

from dataclasses import dataclass

from perdure.instances import calibration
from perdure.reports.comparison import shares
from perdure.reports.facts import RunFacts
from perdure.storage.base import Store

GOLD_AGENT, NO_PATCH_AGENT = "oracle", "nop"


@dataclass(frozen=True)
class Bounds:
    """Shares of rollouts that are resolved; None where nothing was tried."""

    upper: float | None = None
    """By the gold patch."""
    floor: float | None = None
    """By no patch."""
    instances: int = 0
    """Of the run, for which they are known."""
    source: str = ""
    """`calibration`, or the run that tried it."""


async def calibrated(store: Store, run: RunFacts, sandbox: str) -> Bounds:
    """From the calibration of the run's instances in this kind of sandbox."""
    refs = sorted({one.instance for one in run.rollouts})
    found = await calibration.records(store, refs, sandbox)
    known = [records[0] for records in found.values() if records]
    runs = sum(record.runs for record in known)
    if not runs:
        return Bounds()
    return Bounds(
        upper=sum(record.gold_resolved for record in known) / runs,
        floor=sum(record.base_resolved for record in known) / runs,
        instances=len(known),
        source="calibration",
    )


def of_runs(run: RunFacts, others: list[RunFacts]) -> Bounds:
    """From runs of the agents `oracle` and `nop` over the same instances."""
    mine = {one.instance_id for one in run.rollouts}
    upper, upper_run = _share(mine, others, GOLD_AGENT)
    floor, floor_run = _share(mine, others, NO_PATCH_AGENT)
    known = upper_run or floor_run
    if known is None:
        return Bounds()
    names = dict.fromkeys(one.run_id for one in (upper_run, floor_run) if one)
    instances = len(mine & shares(known).keys())
    return Bounds(upper, floor, instances, " and ".join(names))


def gives_bounds(run: RunFacts, first: RunFacts) -> bool:
    """Whether it is a run of gold or of no patch beside a run of another agent."""
    agents = {one.agent for one in run.rollouts}
    return agents <= {GOLD_AGENT, NO_PATCH_AGENT} and agents != {
        one.agent for one in first.rollouts
    }


def _share(
    mine: set[str], others: list[RunFacts], agent: str
) -> tuple[float | None, RunFacts | None]:
    for other in others:
        found = {name: share for name, share in shares(other).items() if name in mine}
        if found and {one.agent for one in other.rollouts} == {agent}:
            return sum(found.values()) / len(found), other
    return None, None
