"""What `perdure demo --break` proves at its end, from the run's episodes and the proxy's count."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.cli.console import many
from perdure.cli.demo.faults import Hit
from perdure.cli.demo.left_behind import Traces
from perdure.episodes.episode import Episode
from perdure.sandboxes.base import identity_of
from perdure.types import Outcome


def sessions_of(run_id: str, workflow_id: str) -> str:
    """The beginning of the names of all sessions of a rollout: `Call.rollout`."""
    return identity_of(run_id, workflow_id, "agent", 1).rpartition("-")[0]


@dataclass(frozen=True)
class BreakSummary:
    """`right`: the outcome that each instance deserves. `hits`: by the fault's title. `calls`: model
    calls that the engine got."""

    rollouts: int
    episodes: Sequence[Episode]
    right: Mapping[str, Outcome]
    hits: Mapping[str, Hit]
    calls: int
    left: Traces

    @property
    def graded_right(self) -> int:
        return sum(one.outcome is self.right[one.instance_id] for one in self.episodes)

    @property
    def turns(self) -> int:
        return sum(one.turns for one in self.episodes)

    @property
    def bought_twice(self) -> int:
        return self.calls - self.turns

    @property
    def cut(self) -> int:
        """Calls in flight when a sandbox, a gateway or an engine was killed."""
        return sum(hit.cut for hit in self.hits.values())

    @property
    def continued(self) -> list[str]:
        """The agents that continued in a new sandbox, and at which turn."""
        return [
            f"{one.instance_id} #{one.sample_index} at turn {one.trajectory.replayed_turns + 1}"
            for one in self.episodes
            if one.trajectory.replayed_turns
        ]

    @property
    def wrong_zeros(self) -> int:
        """Rewards of 1 that a loop without recovery would have recorded as 0."""
        struck = frozenset[str]().union(*(hit.struck for hit in self.hits.values()))
        return sum(
            sessions_of(one.run_id, one.rollout_id) in struck for one in self.episodes if one.reward
        )

    @property
    def problems(self) -> list[str]:
        wrong = self.graded_right < self.rollouts
        return [
            *(["some rollouts were graded wrong or not at all"] if wrong else []),
            *(
                ["more model calls were bought twice than were in flight at the kills"]
                if self._bought_too_many
                else []
            ),
            *(["something was left behind"] if self.left else []),
        ]

    @property
    def _bought_too_many(self) -> bool:
        return not 0 <= self.bought_twice <= self.cut

    def lines(self) -> list[str]:
        same = sum(len(one.attempts) == 1 for one in self.episodes)
        zeros = sum(one.reward == 0 for one in self.episodes)
        told = {
            "Graded right": f"{self.graded_right} of {self.rollouts}",
            "Continued": f"{many(same, 'agent')} in the same sandbox at the interrupted turn;"
            f" in a new one {', '.join(self.continued) or 'none'}",
            "Bought twice": f"{self.bought_twice} of {many(self.calls, 'model call')}"
            f" ({self.cut} were in flight at the kills)",
            "Zeros": f"{zeros}; a loop that scores lost rollouts 0 would have given"
            f" {zeros + self.wrong_zeros}",
            "Left behind": "; ".join(self.left.lines())
            or f"nothing (no {', '.join(vars(self.left))})",
        }
        return [f"{name:<14}{text}" for name, text in told.items()]

    def document(self) -> dict[str, Any]:
        return {
            "faults": [
                {"fault": title, "hit": hit.what, "went_on": hit.went_on, "seconds": hit.seconds}
                for title, hit in self.hits.items()
            ],
            "graded_right": self.graded_right,
            "rollouts": self.rollouts,
            "continued": self.continued,
            "calls": self.calls,
            "bought_twice": self.bought_twice,
            "in_flight_at_kills": self.cut,
            "wrong_zeros_without_recovery": self.wrong_zeros,
            "left_behind": self.left.lines(),
            "problems": self.problems,
        }
