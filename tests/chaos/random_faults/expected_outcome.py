"""What each rollout must give, however many things broke while it ran."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_episode
from perdure.errors import NotFound
from perdure.types import AgentEnd, Outcome, RolloutRequest, RolloutStatus
from tests.chaos.random_faults.system_under_test import TURNS, Cut, Record
from tests.stack.gated_engine import IDLE, commands, turn_of
from tests.stack.made_instances import (
    IDLE_INSTANCE,
    INSTANCE,
    SLOW_INSTANCE,
    UNSOLVED_INSTANCE,
)
from tests.stack.running_stack import Stack


@dataclass(frozen=True)
class Due:
    """What an undisturbed rollout of an instance gives."""

    outcome: Outcome
    reward: float
    ran: Sequence[str] = field(default_factory=partial(commands, TURNS))


DUE: Mapping[str, Due] = {
    INSTANCE: Due(Outcome.RESOLVED, 1.0),
    SLOW_INSTANCE: Due(Outcome.RESOLVED, 1.0),
    UNSOLVED_INSTANCE: Due(Outcome.UNRESOLVED, 0.0),
    IDLE_INSTANCE: Due(Outcome.EMPTY_PATCH, 0.0, commands(TURNS, IDLE)),
}


@dataclass(frozen=True)
class Verdict:
    """All that was found wrong, and the figures of a run."""

    wrong: tuple[str, ...]
    bought: int
    repeated_calls: int
    in_flight: int
    """Turns that the acts cut: at most these may be bought again."""
    attempts: Counter[int]
    crashed: int


@dataclass
class Turn:
    """One turn of one rollout, over all its attempts."""

    begun: float
    """By the monotonic clock: when it was first sampled."""
    last: float
    bought: int = 0


async def judge(stack: Stack, requests: Sequence[RolloutRequest], record: Record) -> Verdict:
    wrong: list[str] = []
    attempts: Counter[int] = Counter()
    crashed = in_flight = again = 0
    bought = _bought(stack)
    for request in requests:
        found = await read_episode(stack.store, request)
        if found is None:
            wrong.append(f"{request.workflow_id}: no episode")
            continue
        attempts[len(found.attempts)] += 1
        crashed += _died(found)
        turns = bought[stack.identity(request, "agent").rpartition("-")[0]]
        own = [cut for cut in record.cuts if cut.rollout in ("", request.workflow_id)]
        cuts = {turn: _times_cut(turns, turn, own) for turn in turns}
        in_flight += sum(cuts.values())
        again += sum(turn.bought - 1 for turn in turns.values())
        said = [
            *_wrong_in(found, DUE[request.instance], request.workflow_id in record.agents_killed),
            *_too_often(found, record),
            *(
                f"turn {turn} was bought {one.bought} times, and cut {cuts[turn]} times"
                for turn, one in turns.items()
                if one.bought > 1 + cuts[turn]
            ),
            *await _wrong_commands(stack, request, found),
        ]
        if said:
            state = await stack.handle(request).query("state")
            said.append("; ".join(map(str, state["story"])))
        wrong += [f"{request.workflow_id}: {one}" for one in said]
    total = sum(turn.bought for turns in bought.values() for turn in turns.values())
    return Verdict(tuple(wrong), total, again, in_flight, attempts, crashed)


def _wrong_in(episode: Episode, due: Due, agent_was_killed: bool) -> Iterator[str]:
    verdict = (episode.status, episode.outcome, episode.reward)
    if _died(episode):
        if not agent_was_killed:
            yield "its agent died, and no act had killed it"
        # What it had done is graded, unless its last call had got no answer.
        graded = ((due.outcome, due.reward), (Outcome.EMPTY_PATCH, 0.0))
        kinds = {(RolloutStatus.GRADED, *one) for one in graded} | {
            (RolloutStatus.FAILED, None, None)
        }
        if verdict not in kinds:
            yield f"crashed and {verdict}: {episode.failure}"
        return
    if verdict != (RolloutStatus.GRADED, due.outcome, due.reward):
        yield f"{verdict}, due {due.outcome}: {episode.failure}"
    if episode.turns != len(due.ran) + 1:
        yield f"{episode.turns} turns"


def _too_often(episode: Episode, record: Record) -> Iterator[str]:
    """An agent that ends while no gateway answers is tried again: its last call may have failed."""
    taken = record.sandboxes_taken[episode.rollout_id]
    outages = sum(not cut.rollout for cut in record.cuts)
    if len(episode.attempts) > 1 + taken + outages:
        yield (
            f"{len(episode.attempts)} attempts, {taken} sandboxes were taken from it, and all gateways"
            f" were away {outages} times"
        )


def _died(episode: Episode) -> bool:
    """Whether the agent ended before it was done."""
    return episode.agent_end in (AgentEnd.CRASHED, AgentEnd.NEVER_CALLED_MODEL)


async def _wrong_commands(stack: Stack, request: RolloutRequest, episode: Episode) -> list[str]:
    """The last attempt's agent ran each command once, in one process."""
    found = []
    attempt = len(episode.attempts)
    due = list(DUE[request.instance].ran)
    ran = await _lines(stack, request, "commands.log", attempt)
    if ran != (due[: len(ran)] if _died(episode) else due):
        found.append(f"it ran {ran}")
    starts = await _lines(stack, request, "starts.log", attempt)
    if len(starts) != 1 and (starts or not _died(episode)):  # it may die before it says so
        found.append(f"its agent started {len(starts)} times")
    return found


async def _lines(stack: Stack, request: RolloutRequest, name: str, attempt: int) -> list[str]:
    """No lines if the agent ended before it wrote the file."""
    try:
        return await stack.lines(request, name, attempt)
    except NotFound:
        return []


def _bought(stack: Stack) -> Mapping[str, dict[int, Turn]]:
    """Sandbox identity without its attempt -> number of the turn -> what was bought."""
    found: defaultdict[str, dict[int, Turn]] = defaultdict(dict)
    for call in stack.engine.calls:
        turns = found[call.session_id.rpartition("-")[0]]
        turn = turns.setdefault(turn_of(call.prompt_ids), Turn(call.at, call.at))
        turn.last = call.at
        turn.bought += 1
    return found


def _times_cut(turns: Mapping[int, Turn], number: int, cuts: Sequence[Cut]) -> int:
    """How often this turn was cut: between the end of the turn before and the begin of the next."""
    begun = turns[number - 1].begun if number - 1 in turns else 0.0
    ended = turns[number + 1].begun if number + 1 in turns else turns[number].last
    return sum(cut.begun <= ended and cut.ended >= begun for cut in cuts)
