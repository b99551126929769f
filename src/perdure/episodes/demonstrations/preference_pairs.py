"""Pairs two rollouts of one instance; the one with the higher reward is preferred.

Two rollouts share their turns up to the first with different answers. The prompt of that turn is
the pair's prompt; the pair compares everything that follows in each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from perdure.episodes.demonstrations.demonstration_messages import (
    Conversation,
    Message,
    answered,
    asked,
    conversations,
)
from perdure.episodes.episode import Episode
from perdure.episodes.trajectory_segments import MAIN
from perdure.types import Turn


def pairs(tried: Iterable[Episode]) -> list[tuple[Episode, Episode]]:
    """Pair the rollouts of one instance: the best with the worst, the second best with the second
    worst, and so on. Each rollout is in at most one pair, and equal rewards make no pair."""
    graded = [one for one in tried if one.reward is not None]
    ranked = sorted(graded, key=lambda one: (-(one.reward or 0.0), one.sampled_tokens))
    matched = zip(ranked, reversed(ranked), strict=True)
    return list(takewhile(lambda pair: (pair[0].reward or 0) > (pair[1].reward or 0), matched))


@dataclass(frozen=True)
class Side:
    """One rollout of a pair, from the first turn with different answers."""

    episode: Episode
    turns: Sequence[Turn]

    def messages(self) -> list[Message]:
        first, *rest = self.turns
        return [answered(first), *(m for turn in rest for m in (*asked(turn), answered(turn)))]

    def tokens(self) -> tuple[list[int], list[int]]:
        """Ids and mask of the tokens after the pair's prompt: both [R], empty for a hosted API."""
        last, start = self.turns[-1], len(self.turns[0].prompt_ids)
        ids = [*last.prompt_ids, *last.completion_ids][start:]
        mask = [0] * len(ids)
        for turn in self.turns:
            at = len(turn.prompt_ids) - start
            mask[at : at + len(turn.completion_ids)] = [1] * len(turn.completion_ids)
        return ids, mask


def preference(
    better: Episode,
    worse: Episode,
    turns: Mapping[str, Sequence[Turn]],
) -> dict[str, Any] | None:
    """The pair as one row; None if their first prompts differ. `turns`: `rollout_id` -> its turns.

    Shapes: prompt_ids [P]; chosen_ids and chosen_mask [C]; rejected_ids and rejected_mask [R]. If a
    rollout compacted its history, only the part before the first compaction is used.
    """
    chosen, rejected = (_opening(turns[one.rollout_id]) for one in (better, worse))
    if chosen is None or rejected is None:
        return None
    at = _parting(chosen.turns, rejected.turns)
    if at is None:
        return None
    return {
        "instance_id": better.instance_id,
        "prompt": _prompt(chosen.turns[: at + 1]),
        "prompt_ids": list(chosen.turns[at].prompt_ids),
        **_columns("chosen", Side(better, chosen.turns[at:])),
        **_columns("rejected", Side(worse, rejected.turns[at:])),
    }


def _opening(turns: Sequence[Turn]) -> Conversation | None:
    """The longest conversation that starts with the main chain's first turn."""
    first = next((turn for turn in turns if turn.chain == MAIN), None)
    begun = [one for one in conversations(turns) if first and one.turns[0] == first]
    return max(begun, key=lambda one: len(one.turns), default=None)


def _parting(one: Sequence[Turn], other: Sequence[Turn]) -> int | None:
    """The first position at which two lines of turns have equal prompts and different answers."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if _question(a) != _question(b):
            return None
        if _reply(a) != _reply(b):
            return place
    return None


def _question(turn: Turn) -> Any:
    return turn.prompt_ids or [_without_ids(message) for message in asked(turn)]


def _reply(turn: Turn) -> Any:
    return turn.completion_ids or _without_ids(answered(turn))


def _without_ids(message: Message) -> Message:
    """Remove tool-call ids, which the gateway makes unique, so they differ in equal answers."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls, "tool_call_id": None}


def _prompt(turns: Sequence[Turn]) -> list[Message]:
    *before, last = turns
    return [*(m for turn in before for m in (*asked(turn), answered(turn))), *asked(last)]


def _columns(name: str, side: Side) -> dict[str, Any]:
    ids, mask = side.tokens()
    return {
        name: side.messages(),
        f"{name}_ids": ids,
        f"{name}_mask": mask,
        f"{name}_sample": side.episode.sample_index,
        f"{name}_reward": side.episode.reward,
        f"{name}_named_rewards": side.episode.audit()["named_rewards"],
    }
