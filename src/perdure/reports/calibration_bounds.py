"""Bounds of a run: the shares of its instances that the gold patch and no patch resolve.

No model should exceed the first or fall below the second. Calibration measures both, so they are
unknown for instances that were not calibrated.
"""

from dataclasses import dataclass

from perdure.instances import calibration_record
from perdure.reports.rollout_facts import RunFacts
from perdure.reports.run_comparison import shares
from perdure.storage.base import Store

GOLD_AGENT, NO_PATCH_AGENT, BASE_SUITE_AGENT = "oracle", "nop", "base_suite"
BOUND_AGENTS = (GOLD_AGENT, NO_PATCH_AGENT, BASE_SUITE_AGENT)


@dataclass(frozen=True)
class Bounds:
    """Shares of resolved rollouts; None if unknown."""

    upper: float | None = None
    """Share with the gold patch."""
    floor: float | None = None
    """Share without a patch."""
    base_suite: float | None = None
    """Share whose own test suite passes without a patch and without hidden tests."""
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
    """Bounds from runs of the agents `oracle`, `nop` and `base_suite` over the same instances."""
    mine = {one.instance_id for one in run.rollouts}
    found = [_share(mine, others, agent) for agent in BOUND_AGENTS]
    known = [one for _, one in found if one is not None]
    if not known:
        return Bounds()
    upper, floor, base_suite = (share for share, _ in found)
    names = dict.fromkeys(one.run_id for one in known)
    instances = len(mine & shares(known[0]).keys())
    return Bounds(upper, floor, base_suite, instances, " and ".join(names))


def gives_bounds(run: RunFacts, first: RunFacts) -> bool:
    """Whether `run` is of agents that give bounds, and `first` is of another agent."""
    agents = {one.agent for one in run.rollouts}
    return agents <= set(BOUND_AGENTS) and agents != {one.agent for one in first.rollouts}


def _share(
    mine: set[str], others: list[RunFacts], agent: str
) -> tuple[float | None, RunFacts | None]:
    for other in others:
        found = {name: share for name, share in shares(other).items() if name in mine}
        if found and {one.agent for one in other.rollouts} == {agent}:
            return sum(found.values()) / len(found), other
    return None, None
