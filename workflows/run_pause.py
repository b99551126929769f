"""When a run starts no more rollouts: a user paused it, its rollouts fail alike, its budget is spent,
its time is over."""

from dataclasses import dataclass, field

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.rollouts.activity_messages import TRUNCATED, Truncation
    from perdure.types import EpisodeRef

ALIKE = 3
"""The run pauses for a user after this many instances in a row that failed the same way."""
ROLLOUT_SPECIFIC_FAILURES = frozenset({"PolicyTooStale", "WorkflowFailed", TRUNCATED})
"""Failures that do not predict failures of other rollouts."""


@dataclass
class Throttle:
    """How many rollouts may be in flight. A user's updates set it, and the window reads it."""

    concurrency: int = 0
    paused: bool = False
    attention: str = ""
    """The failure for which the window paused itself, and that only a user can fix."""

    alike: tuple[str, ...] = ()
    """The `likeness` that the last failures have in common."""
    failing: set[str] = field(default_factory=set)
    """The instances whose rollouts failed that way, in a row."""

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        if not paused:
            self.attention = ""
            self.failing.clear()

    def stop_for(self, attention: str) -> None:
        self.paused, self.attention = True, attention

    spent: bool = False
    """The budget of the run is used up, so it starts no more rollouts."""
    truncation: Truncation | None = None
    """The time of the run is over, so it starts no more rollouts."""

    def fails_like_before(self, episode: EpisodeRef) -> bool:
        """Whether rollouts of at least `ALIKE` instances in a row failed the same way."""
        failure = episode.failure
        likeness = failure.likeness if failure is not None else ()
        if failure is None or failure.type in ROLLOUT_SPECIFIC_FAILURES or likeness != self.alike:
            self.alike = likeness
            self.failing.clear()
        if failure is None or failure.type in ROLLOUT_SPECIFIC_FAILURES:
            return False
        self.failing.add(episode.instance_id)
        return len(self.failing) >= ALIKE
