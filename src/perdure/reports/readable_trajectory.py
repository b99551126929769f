"""A rollout's trajectory for people: its turns, which of them are trained, and why others are not.

It comes from the journal until the session is closed, then from the store.
`perdure.episodes.trajectory_segments` decides which tokens are trained.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perdure.episodes import turns_parquet as turn_files
from perdure.episodes.token_accounting import count_trajectory
from perdure.episodes.trajectory_segments import MAIN, cut, untrained
from perdure.errors import NotFound, PerdureError
from perdure.reports.stored_rollout import StoredRollout
from perdure.sandboxes.base import identity_of
from perdure.storage.base import Store
from perdure.types import Purpose, Segment, Turn


class Unreadable(PerdureError):
    """A turns file that cannot be parsed; the message has its key."""


@dataclass(frozen=True)
class Trajectory:
    """The turns of one attempt so far, and the segments cut from them."""

    attempt: int
    source: str
    """`store` (the session is closed) or `journal` (the agent may still run)."""
    turns: Sequence[Turn]

    @property
    def segments(self) -> list[Segment]:
        return cut(self.turns)


async def read(store: Store, rollout: StoredRollout, attempt: int | None) -> Trajectory:
    """The turns of `attempt`, by default the newest. Raises: NotFound."""
    number = attempt or (rollout.last.number if rollout.last else 1)
    key = f"{rollout.name.prefix}/attempts/{number}/turns.parquet"
    with contextlib.suppress(NotFound):
        return Trajectory(number, "store", _decoded(key, (await store.get(key)).data))
    found = await _journaled(store, rollout, number)
    if not found:
        raise NotFound(f"{rollout.name} has no turns in attempt {number} (yet)")
    return Trajectory(number, "journal", found)


def _decoded(key: str, data: bytes) -> list[Turn]:
    try:
        return turn_files.decode(data)
    except ValueError as error:
        raise Unreadable(f"{key} is unreadable: {error}") from error


async def _journaled(store: Store, rollout: StoredRollout, attempt: int) -> list[Turn]:
    """The turns that a gateway has committed to the journal."""
    from perdure.gateway.journal.recorded_turns import turns_of
    from perdure.gateway.journal.turn_journal import Journal
    from perdure.gateway.journal.turn_record import turn_records

    session = identity_of(rollout.name.run_id, rollout.name.workflow_id, "agent", attempt)
    return turns_of(turn_records(await Journal(store).read(session)))


def document(rollout: StoredRollout, found: Trajectory) -> dict[str, Any]:
    """All turns and segments with their full texts."""
    segments = found.segments
    return {
        "rollout": rollout.name.workflow_id,
        "attempt": found.attempt,
        "source": found.source,
        "counts": count_trajectory(found.turns, segments).model_dump(mode="json"),
        "segments": [_segment(segment) for segment in segments],
        "turns": _views(found.turns, segments),
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "index": segment.index,
        "kind": segment.kind.value,
        "chain": segment.chain,
        "turns": list(segment.turns),
        "prompt_tokens": len(segment.prompt_ids),
        "response_tokens": len(segment.response_ids),
        "trained_tokens": sum(segment.loss_mask),
        "reward_share": segment.reward_share,
        "finish_reason": segment.finish_reason.value,
    }


def _views(turns: Sequence[Turn], segments: Sequence[Segment]) -> list[dict[str, Any]]:
    of_turn = {index: segment.index for segment in segments for index in segment.turns}
    reasons = {one.turn: one.reason for one in untrained(turns, segments)}
    lengths = {turn.index: turn.prompt_tokens + turn.sampled_tokens for turn in turns}
    return [
        {
            **turn.model_dump(
                mode="json",
                exclude={"prompt_ids", "completion_ids", "logprobs", "new_messages", "answer"},
            ),
            "prompt_tokens": turn.prompt_tokens,
            "new_prompt_tokens": turn.prompt_tokens - lengths.get(turn.parent or 0, 0)
            if turn.parent is not None and turn.prompt_ids
            else turn.prompt_tokens,
            "sampled_tokens": turn.sampled_tokens,
            "logprob_mean": _mean(turn.logprobs),
            "segment": of_turn.get(turn.index),
            "untrained": reasons.get(turn.index),
            "new_messages": parsed(turn.new_messages, []),
            "answer": parsed(turn.answer, {}),
        }
        for turn in turns
    ]


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def parsed(text: str, empty: Any) -> Any:
    """The value of recorded JSON text; `empty` if it is not JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return empty


def chain_title(turn: dict[str, Any]) -> str:
    """The heading of the chain that the turn is part of."""
    if turn["purpose"] == Purpose.STRAY:
        return "stray calls"
    return MAIN if turn["chain"] == MAIN else f"sub-agent {turn['chain']}"


def facts(turn: dict[str, Any]) -> str:
    """A turn of a document in one line: tokens, engine, versions, how its prompt was made."""
    new, whole = turn["new_prompt_tokens"], turn["prompt_tokens"]
    prompt = f"{whole}" if new == whole else f"{whole} (+{new})"
    said = [f"prompt {prompt} → {turn['sampled_tokens']}"]
    if turn["logprob_mean"] is not None:
        said.append(f"logprob {turn['logprob_mean']:.2f}")
    said.append(turn["finish_reason"])
    versions = dict.fromkeys(span["version"] for span in turn["versions"])
    said.append(turn["model"] or turn["asked_model"])
    said.append(" ".join([turn["engine"], *(f"v{version}" for version in versions)]).strip())
    said.append(f"{turn['seconds']:.2f} s")
    if turn["purpose"] != Purpose.STEP:
        said.append(turn["purpose"])
    if turn["bridged"] or turn["bridge_miss"]:
        said.append("bridged" if turn["bridged"] else f"rendered: {turn['bridge_miss']}")
    if turn["replayed_from"]:
        said.append(f"replayed from {turn['replayed_from']}")
    return " · ".join(fact for fact in said if fact)
