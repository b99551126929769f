"""What each rollout must give, however many things broke while it ran."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_episode
from perdure.types import AgentEnd, Outcome, RolloutRequest, RolloutStatus
from tests.stack.engine import commands
from tests.stack.stack import Stack


@dataclass(frozen=True)
class Verdict:
    """All that was found wrong, and the figures of a run."""

    wrong: tuple[str, ...]
    bought: int
    bought_again: int
    attempts: Counter[int]


async def judge(
    stack: Stack, requests: Sequence[RolloutRequest], *, interruptions: int, agents_killed: int
) -> Verdict:
    """`interruptions`: acts after which a call in flight may be asked for again."""
    wrong: list[str] = []
    attempts: Counter[int] = Counter()
    crashed = 0
    sampled = stack.engine.times_sampled()
    for request in requests:
        episode = await read_episode(stack.store, request)
        if episode is None:
            wrong.append(f"{request.workflow_id}: no episode")
            continue
        attempts[len(episode.attempts)] += 1
        if episode.agent_end is AgentEnd.CRASHED:
            crashed += 1  # a crash is the agent's own end: no other attempt is bought
            continue
        wrong += [f"{request.workflow_id}: {said}" for said in _wrong_in(episode, stack)]
        wrong += [
            f"{request.workflow_id}: {said}"
            for said in await _wrong_commands(stack, request, len(episode.attempts))
        ]
        turns = _turns_of(stack, request, len(episode.attempts), sampled)
        wrong += [
            f"{request.workflow_id}: turn {turn} was bought {turns[turn]} times"
            for turn in range(stack.engine.turns)
            if not 1 <= turns[turn] <= 1 + interruptions
        ]
    if crashed > agents_killed:
        wrong.append(f"{crashed} agents crashed and {agents_killed} were killed")
    bought = sum(sampled.values())
    return Verdict(tuple(wrong), bought, bought - len(_distinct(sampled)), attempts)


def _wrong_in(episode: Episode, stack: Stack) -> Iterator[str]:
    verdict = (episode.status, episode.outcome, episode.reward)
    if verdict != (RolloutStatus.GRADED, Outcome.RESOLVED, 1.0):
        yield f"{episode.status} {episode.outcome} {episode.reward} {episode.failure}"
    if episode.turns != stack.engine.turns:
        yield f"{episode.turns} turns"


async def _wrong_commands(stack: Stack, request: RolloutRequest, attempt: int) -> list[str]:
    """The last attempt's agent ran each command once, in one process."""
    found = []
    ran = await stack.lines(request, "commands.log", attempt)
    if ran != commands(stack.engine.turns):
        found.append(f"it ran {ran}")
    starts = await stack.lines(request, "starts.log", attempt)
    if len(starts) != 1:
        found.append(f"its agent started {len(starts)} times")
    return found


def _turns_of(
    stack: Stack, request: RolloutRequest, attempts: int, sampled: Counter[str]
) -> Counter[int]:
    """How often each turn was bought, over all attempts."""
    found: Counter[int] = Counter()
    for attempt in range(1, attempts + 1):
        session = stack.identity(request, "agent", attempt)
        for turn in range(stack.engine.turns):
            found[turn] += sampled[f"{session}-{turn}"]
    return found


def _distinct(sampled: Counter[str]) -> set[str]:
    """Each turn of each rollout once, whatever attempt it was bought in."""
    return {_without_attempt(name) for name in sampled}


def _without_attempt(name: str) -> str:
    session, _, turn = name.rpartition("-")
    return f"{session.rpartition('-')[0]}-{turn}"
