"""What interrupted the rollouts of a run, and what that cost. It reads only what episodes recorded."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from perdure.cli.console import many
from perdure.episodes.episode import AttemptSummary, Episode
from perdure.reports.rollout_facts import LOST_GRADING


@dataclass(frozen=True)
class Interruptions:
    """Counts of one rollout, or sums over rollouts."""

    watched_again: int = 0
    """Agents that continued in their sandbox when another worker, or another try, began to watch
    them."""
    continued: int = 0
    """Agents that continued in a new sandbox, from their recorded turns."""
    begun_again: int = 0
    """Agents that began again in a new sandbox, because no turn was recorded."""
    gradings: int = 0
    """Gradings that were repeated because their sandbox was lost."""
    bought_again: int = 0
    """Recorded model calls of lost sandboxes that no later attempt used."""

    def __bool__(self) -> bool:
        return any(astuple(self))

    @classmethod
    def of(cls, episode: Episode) -> "Interruptions":
        lost = _lost(episode)
        replayed = episode.trajectory.replayed_turns
        return cls(
            watched_again=any(one.watched_again for one in episode.attempts),
            continued=bool(lost and replayed),
            begun_again=bool(lost and not replayed),
            gradings=sum(LOST_GRADING in key for one in episode.attempts for key in one.evidence),
            bought_again=sum(usage.turns for one in lost for usage in one.bought),
        )

    @classmethod
    def total(cls, found: Iterable["Interruptions"]) -> "Interruptions":
        return cls(*map(sum, zip(*map(astuple, found), strict=True)))

    def line(self, left_behind: int | None) -> str:
        """`Interrupted: 2 agents continued in a new sandbox; 1 recorded model call bought again`; empty
        if nothing interrupted the run.

        `left_behind`: sandboxes of the run that still exist; None if this host cannot tell.
        """
        if not self:
            return ""
        told = [
            _told(self.watched_again, "agent", "continued in the same sandbox"),
            _told(self.continued, "agent", "continued in a new sandbox"),
            _told(self.begun_again, "agent", "began again in a new sandbox"),
            _told(self.gradings, "grading", "repeated in a new sandbox"),
            _told(self.bought_again, "recorded model call", "bought again"),
        ]
        if left_behind is not None:
            told.append(f"sandboxes left behind: {left_behind}")
        return f"Interrupted: {'; '.join(filter(None, told))}"


def _lost(episode: Episode) -> list[AttemptSummary]:
    """Attempts whose sandbox was lost. An attempt does not count if it had a verdict or the run's
    deadline stopped it: then a later start repeated its rollout."""
    ended = {one.attempt for one in episode.earlier}
    before = episode.attempts[:-1]
    return [one for one in before if one.provider and one.attempt not in ended]


def _told(count: int, noun: str, what: str) -> str:
    return f"{many(count, noun)} {what}" if count else ""
