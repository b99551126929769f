"""The job, its kills and their cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.call_log import EndpointCall, KillWindow


@dataclass(frozen=True)
class Crash:
    """The job, and the shares of its calls after which each kill happens.

    `sandboxes`: how many sandboxes are killed.
    """

    rollouts: int
    turns: int
    latency_s: float
    workers: int
    sandboxes: int
    engine_at: float
    sandboxes_at: float
    everything_at: float

    @property
    def ideal_calls(self) -> int:
        return self.rollouts * self.turns


@dataclass(frozen=True)
class Kill:
    """One kill. `sessions`: those of the killed sandboxes. None: it affected every call."""

    what: str
    moment: KillWindow
    sessions: tuple[str, ...] | None = None

    def in_flight(self, calls: Sequence[EndpointCall], agents: int) -> int:
        """Turns in flight that this kill could cut: at most one per agent.

        `agents`: how many run at once, for callers that name no session.
        """
        struck = [call.session for call in calls if call.in_flight(self.moment)]
        if self.sessions is not None:
            return len(set(struck) & set(self.sessions))
        return min(len(struck), agents) if "" in struck else len(set(struck))


@dataclass(frozen=True)
class LeftBehind:
    """The side's own sandbox folders, mounts, control groups and processes."""

    folders: int
    mounts: int
    groups: int
    processes: int

    def __str__(self) -> str:
        found = {name: count for name, count in vars(self).items() if count}
        return ", ".join(f"{count} {name}" for name, count in found.items()) or "0"

    @property
    def nothing(self) -> bool:
        return not any(vars(self).values())


@dataclass(frozen=True)
class Outcome:
    """The cost of the crash. `calls`: model calls of all parts of the job together."""

    side: str
    rollouts: int
    ideal_calls: int
    finished_at_kill: int
    calls: int
    in_flight: dict[str, int]
    """Maps each kill to the turns in flight at that moment."""
    resume_wall: float
    cpu: float
    """Seconds of all processes of the side, in both parts of the job."""
    right: int
    zeros: int
    """Results that say that the agent did not solve the task. Each is wrong: the answers solve it."""
    left_behind: LeftBehind
    sandboxes_killed: int
    attempts_lost: int = 0
    """Sandboxes that rollouts lost."""

    @property
    def repeated_calls(self) -> int:
        return self.calls - self.ideal_calls

    @property
    def unscored(self) -> int:
        """Rollouts without a verdict."""
        return self.rollouts - self.right - self.zeros

    @property
    def max_repeated_calls(self) -> int:
        return sum(self.in_flight.values())

    @property
    def meets_guarantees(self) -> bool:
        """Whether only turns in flight were bought again, nothing leaked and no result was lost."""
        cheap = self.repeated_calls <= self.max_repeated_calls
        lost = self.attempts_lost <= self.sandboxes_killed
        return cheap and lost and self.left_behind.nothing and self.right == self.rollouts
