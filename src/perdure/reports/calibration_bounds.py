"""Bounds of a run: the shares of its instances that the gold patch and no patch resolve.

No model should exceed the first or fall below the second. Calibration measures both, so they are
unknown for instances that were not calibrated.
"""

from dataclasses import dataclass

from perdure.instances import calibration_record
from perdure.reports.rollout_facts import RunFacts
from perdure.reports.run_comparison import shares
from perdure.storage.base import Store

GOLD_AGENT, NO_PATCH_AGENT = "oracle", "nop"


@dataclass(frozen=True)
class Bounds:
    """Shares of resolved rollouts; None if unknown."""

    upper: float | None = None
    """Share with the gold patch."""
    floor: float | None = None
    """Share without a patch."""
    instances: int = 0
    """Instances of the run for which the shares are known."""
    source: str = ""
    """`calibration`, or the runs that measured them."""


async def calibrated(store: Store, run: RunFacts, sandbox: str) -> Bounds:
    """Bounds from the calibration of the run's instances in this kind of sandbox."""
    refs = sorted({one.instance for one in run.rollouts})
    found = await calibration_record.records(store, refs, sandbox)
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
    """Bounds from runs of the agents `oracle` and `nop` over the same instances."""
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
    """Whether `run` is of the agents oracle or nop, and `first` is of another agent."""
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
