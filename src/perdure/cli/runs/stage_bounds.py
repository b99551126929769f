"""How long a stage may take before `perdure status --stuck` lists its rollout.

The bound is the p95 of the run's completed rollouts. If the run has too few, it is the p95 over all
runs, and if these have too few, a fixed bound.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from temporalio.client import Client

from perdure.cli.runs.run_text import clock
from perdure.client.rollout_listing import newest_completed
from perdure.episodes.episode import parse_episode
from perdure.errors import PerdureError
from perdure.reports.report_statistics import quantile
from perdure.storage.base import Store
from perdure.types import EpisodeRef

READ = 100
"""Number of completed rollouts whose stage times are read, the newest first."""
ENOUGH = 10
"""With fewer completed rollouts, a p95 says little."""
P95 = 0.95
LEAST_S = 60.0
"""A stage is not stuck in its first minute, however fast the others were."""
AT_ONCE = 32
STORE_S = 5.0
"""Seconds for reading the episodes of a run. The store may be what is stuck."""
FIXED_S = {
    "boot_sandbox": 900.0,
    "run_agent": 3600.0,
    "capture_diff": 600.0,
    "grade_in_fresh_sandbox": 3600.0,
}
FIXED_OF_OTHERS_S = 600.0
MEASURED = {"boot_sandbox": "boot", "run_agent": "agent", "grade_in_fresh_sandbox": "grade"}
"""Activity -> its name in an episode's `stage_seconds`."""

Seconds = Mapping[str, list[float]]


@dataclass(frozen=True)
class Bound:
    """Seconds that a stage may take. `rollouts`: how many ended ones it rests on; 0 = fixed."""

    seconds: float
    rollouts: int = 0

    def __str__(self) -> str:
        """Example: `31:00, p95 of 100 rollouts`."""
        return f"{clock(self.seconds)}, " + (
            f"p95 of {self.rollouts} rollouts" if self.rollouts else "a fixed bound"
        )


class StageBounds:
    """The bounds of the stages of some runs."""

    def __init__(self, of_runs: Mapping[str, Seconds], of_all: Seconds) -> None:
        self._of_runs = of_runs
        self._of_all = of_all

    @classmethod
    async def read(
        cls, client: Client, store: Store | None, runs: Collection[str]
    ) -> "StageBounds":
        """`store`: None if it cannot be read here. Raises: RPCError."""
        if store is None:
            return cls({}, {})
        slots = asyncio.Semaphore(AT_ONCE)
        seconds = await asyncio.gather(*(_stage_seconds(client, store, run, slots) for run in runs))
        of_runs = dict(zip(runs, seconds, strict=True))
        is_young = any(not _is_known(one) for one in seconds)
        return cls(of_runs, await _stage_seconds(client, store, None, slots) if is_young else {})

    def of(self, run_id: str, activity: str) -> Bound:
        name = MEASURED.get(activity, "")
        for seconds in (self._of_runs.get(run_id, {}), self._of_all):
            if len(taken := sorted(seconds.get(name, []))) >= ENOUGH:
                return Bound(max(quantile(taken, P95), LEAST_S), len(taken))
        return Bound(FIXED_S.get(activity, FIXED_OF_OTHERS_S))


def _is_known(seconds: Seconds) -> bool:
    return all(len(seconds.get(name, [])) >= ENOUGH for name in MEASURED.values())


async def _stage_seconds(
    client: Client, store: Store, run_id: str | None, slots: asyncio.Semaphore
) -> Seconds:
    """Seconds by stage of the rollouts that completed last, as far as the store can be read."""
    found: dict[str, list[float]] = defaultdict(list)

    async def read(episode: EpisodeRef) -> None:
        key = episode.uri.removeprefix(f"{store.url}/")
        async with slots:
            data = (await store.get(key)).data
        with contextlib.suppress(ValueError):  # a damaged episode says nothing about stages
            for name, seconds in parse_episode(key, data).stage_seconds.items():
                found[name].append(seconds)

    ended = await newest_completed(client, run_id, READ)
    with contextlib.suppress(PerdureError, TimeoutError):
        async with asyncio.timeout(STORE_S):
            await asyncio.gather(*map(read, ended))
    return found
