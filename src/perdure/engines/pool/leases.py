"""Which engine a session uses: kept for its KV cache, moved only for a reason.

Owns the leases and their rules, and no clock, socket or task. Waiting for room is in `queueing`.
Processes agree without messages: a group orders the engines the same way everywhere (weighted
rendezvous hashing), and a session that another process served stays on that process's engine.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perdure.engines.clients.vllm_control import Vitals

LEAST_AGENTS, MOST_AGENTS = 64, 128
"""Agents of one engine, the range Anyscale reports; KV pressure may lower it further. The setting
`engine.agents` changes the upper one."""
KV_SHARE = 0.9
"""Share of the KV cache that agents' contexts may fill on average."""
IDLE_S = 600.0
"""Seconds without a call after which a session's lease ends."""
RECLAIM_S = 60.0
"""Seconds without a call after which a session loses its lease if others wait for room."""
OVERLOAD, SLACK = 1.5, 4.0
"""An engine is overloaded above 1.5 times the average load plus 4 agents."""
EVEN = 1.25
"""When an engine joins, the others give it sessions until none has over 1.25 times its share."""
NEAR, FEW = 1.1, 2.0
"""A group that is new here takes the engines in its own order. It goes to the first one whose load
would be at most 1.1 times the lowest load plus 2 agents. Processes see loads that differ, mostly by
less than that. With a larger margin, two small groups share one of two engines and the other
idles."""
HASHED = 1 << 64
WASTED = 0.5
"""Below this hit rate of the prefix cache, an engine prefills prompts that it has prefilled
before."""
CUT = 0.75
"""Factor on the number of agents when their contexts do not fit and the cache is wasted."""
SETTLING = 10
"""Health checks after a cut that do not judge: agents leave at the end of their turn, not before."""
SATURATED = 0.6
"""Share of health checks with requests waiting inside, above which an engine has no spare time."""
MEMORY = 0.95
"""Weight of earlier counts at each health check: about twenty checks are judged together."""


@dataclass
class Candidate:
    """An engine that could take a session, with its load and its limit."""

    name: str
    generation: int
    weight: float = 1.0
    capacity: int = LEAST_AGENTS
    foreign: float = 0.0
    """Requests of other gateways' agents on it."""
    strict: bool = False
    """If more agents than its capacity hold a lease, they wait at their next turn. If False, only
    new agents wait."""

    @property
    def start(self) -> "EngineStart":
        return EngineStart(self.name, self.generation)


class EngineStart(NamedTuple):
    """One start of an engine: its name and generation."""

    name: str
    generation: int


@dataclass
class Lease:
    """One session's right to one engine. `context`: its last prompt's length in tokens."""

    session: str
    group: str
    engine: str
    generation: int
    context: int = 0
    last_used: float = 0.0
    busy: int = 0

    @property
    def start(self) -> EngineStart:
        return EngineStart(self.engine, self.generation)


@dataclass
class Leases:
    """All leases of one gateway process."""

    clock: Callable[[], float] = time.monotonic
    _table: dict[str, Lease] = field(default_factory=dict)
    _agents: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    """Sessions that changed engines: each costs one prefill."""

    def get(self, session: str) -> Lease | None:
        return self._table.get(session)

    def agents(self, engine: str) -> int:
        return self._agents[engine]

    def mean_context(self, engine: str) -> float:
        contexts = [lease.context for lease in self._table.values() if lease.engine == engine]
        return sum(contexts) / len(contexts) if contexts else 0.0

    def take(
        self,
        session: str,
        group: str,
        candidates: Collection[Candidate],
        avoid: Collection[str] = (),
        last: EngineStart | None = None,
    ) -> Lease | None:
        """The session's lease, kept, moved or new; None if no engine has room.

        `avoid`: engines that just failed this call; used only if there is no other. `last`: the
        engine that another process used for the session since this one did.
        """
        usable = [one for one in candidates if one.name not in avoid] or list(candidates)
        lease = self._table.get(session)
        if last is not None and (there := _find(last, usable)) is not None:
            lease = self._lease(session, group, there)
        at = _find(lease.start, usable) if lease is not None else None
        if lease is not None and at is not None and self._is_surplus(lease, at):
            self.release(session)
            lease = None
        if lease is not None and at is not None and not self._should_leave(lease, at, usable):
            return lease
        # A session that must move never goes back to the queue: its engine is gone, not full.
        chosen = self._choose(session, group, usable, full_ok=lease is not None)
        if chosen is None:
            return None
        if lease is not None and lease.engine != chosen.name:
            self.moved += 1
        return self._lease(session, group, chosen)

    def _lease(self, session: str, group: str, candidate: Candidate) -> Lease:
        before = self._table.get(session)
        if before is not None and before.start == candidate.start:
            return before
        fresh = Lease(session, group, candidate.name, candidate.generation, last_used=self.clock())
        if before is not None:
            fresh.context, fresh.busy = before.context, before.busy
        self.release(session)
        self._table[session] = fresh
        self._agents[fresh.engine] += 1
        return fresh

    def _choose(
        self, session: str, group: str, candidates: Collection[Candidate], *, full_ok: bool
    ) -> Candidate | None:
        """The engine of the group's other sessions; otherwise the one of highest affinity among
        those close to the least load.

        A session without a group shares no prompt, so it goes to the least loaded engine.
        """
        roomy = [one for one in candidates if self._has_room(one)] or (
            list(candidates) if full_ok else []
        )
        if not roomy:
            return None
        siblings = self._siblings(group, session)
        for candidate in sorted(roomy, key=lambda one: -siblings.get(one.name, 0)):
            if siblings.get(candidate.name) and not self._overloaded(candidate, candidates):
                return candidate
        near, more = (NEAR, FEW) if group else (1.0, 0.0)
        least = near * min(self._load(one, 1.0) for one in roomy)
        fitting = [one for one in roomy if self._load(one, 1.0) <= least + more / one.weight]
        return max(fitting, key=lambda one: affinity(group or session, one))

    def _siblings(self, group: str, session: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for lease in self._table.values():
            if group and lease.group == group and lease.session != session:
                counts[lease.engine] = counts.get(lease.engine, 0) + 1
        return counts

    def _load(self, candidate: Candidate, more: float = 0.0) -> float:
        """Agents relative to its weight, with `more` additional ones."""
        return (self.agents(candidate.name) + candidate.foreign + more) / candidate.weight

    def _has_room(self, candidate: Candidate) -> bool:
        return self.agents(candidate.name) + candidate.foreign < candidate.capacity

    def _overloaded(self, candidate: Candidate, candidates: Collection[Candidate]) -> bool:
        if len(candidates) < 2:
            return False
        total = sum(self._load(other) * other.weight for other in candidates)
        average = total / sum(other.weight for other in candidates)
        return self._load(candidate) > OVERLOAD * average + SLACK / candidate.weight

    def _is_surplus(self, lease: Lease, at: Candidate) -> bool:
        return at.strict and lease.busy == 0 and self.agents(at.name) + at.foreign > at.capacity

    def _should_leave(self, lease: Lease, at: Candidate, candidates: Collection[Candidate]) -> bool:
        return lease.busy == 0 and self._overloaded(at, candidates)

    def use(self, session: str, context: int) -> None:
        """A call of this session begins. `context`: tokens."""
        lease = self._table[session]
        lease.busy += 1
        lease.context, lease.last_used = context, self.clock()

    def done(self, session: str, context: int) -> None:
        lease = self._table.get(session)
        if lease is not None:
            lease.busy = max(0, lease.busy - 1)
            lease.context, lease.last_used = context, self.clock()

    def release(self, session: str) -> None:
        lease = self._table.pop(session, None)
        if lease is not None:
            self._agents[lease.engine] -= 1

    def expire(self) -> int:
        """End the leases of idle sessions; returns how many."""
        return self._drop(self._idle(IDLE_S))

    def reclaim(self, candidates: Iterable[Candidate]) -> bool:
        """End the lease of the session that was idle longest on one of these; False if none was."""
        names = {one.name for one in candidates}
        idle = [lease for lease in self._idle(RECLAIM_S) if lease.engine in names]
        return bool(self._drop(idle[:1]))

    def _idle(self, seconds: float) -> list[Lease]:
        """Leases without a call for `seconds`, the longest idle first."""
        before = self.clock() - seconds
        idle = [x for x in self._table.values() if not x.busy and x.last_used < before]
        return sorted(idle, key=lambda lease: lease.last_used)

    def _drop(self, leases: Sequence[Lease]) -> int:
        for lease in leases:
            self.release(lease.session)
        return len(leases)

    def rebalance(self, candidates: Collection[Candidate], joined: str) -> int:
        """An engine joined: give it its share of the sessions; returns how many. A session with a
        call in flight finishes it on its old engine."""
        target = next(one for one in candidates if one.name == joined)
        total = sum(self.agents(one.name) for one in candidates)
        weights = sum(one.weight for one in candidates)
        moved = 0
        for candidate in candidates:
            share = total * candidate.weight / weights
            surplus = int(self.agents(candidate.name) - EVEN * share)
            for lease in self._movable(candidate, target)[: max(0, surplus)]:
                self._agents[lease.engine] -= 1
                self._agents[joined] += 1
                lease.engine, lease.generation = target.start
                moved += 1
        self.moved += moved
        return moved

    def _movable(self, candidate: Candidate, target: Candidate) -> list[Lease]:
        """Groups that prefer the target come first, the same ones in every process; within them,
        small contexts first, because they cost the least prefill."""
        here = [lease for lease in self._table.values() if lease.engine == candidate.name]

        def cost(lease: Lease) -> tuple[bool, float, int]:
            return lease.busy > 0, -_preference(lease.group, target, candidate), lease.context

        return sorted(here, key=cost) if candidate is not target else []


def affinity(key: str, candidate: Candidate) -> float:
    """A group's preference for an engine; the highest wins. Each engine is the first choice of a
    share of all groups in proportion to its weight. An engine that joins or leaves changes the first
    choice of that share only."""
    digest = hashlib.sha256(f"{key}\0{candidate.name}".encode()).digest()
    uniform = (int.from_bytes(digest[:8], "big") + 0.5) / HASHED
    return -candidate.weight / math.log(uniform)


def _preference(group: str, target: Candidate, candidate: Candidate) -> float:
    """How much the group prefers `target`; 0 for sessions without a group."""
    return affinity(group, target) / affinity(group, candidate) if group else 0.0


def _find(start: EngineStart, candidates: Collection[Candidate]) -> Candidate | None:
    return next((one for one in candidates if one.start == start), None)


@dataclass
class Capacity:
    """How many agents an engine may have: by its KV cache, fewer if it thrashes, more if it idles.

    If not all contexts fit, more agents still help while the engine has time to read some prompts
    again. Once it has no spare time, each prefill evicts what another agent needs next, and it does
    little else. Then only as many agents stay as fit.

    Example:
        capacity = Capacity()
        capacity.observe(Vitals(kv_tokens=4_800_000), agents=40, mean_context=32_000)
        assert capacity.agents == 128
    """

    most: int = MOST_AGENTS
    agents: int = LEAST_AGENTS
    _before: Vitals | None = None
    lowered: bool = False
    """The limit was lowered under pressure; agents above it wait at their next turn."""
    _settling: int = 0
    _short: float = 0.0
    _asked: float = 0.0
    _hit: float = 0.0

    def __post_init__(self) -> None:
        self.agents = min(self.agents, self.most)

    def observe(self, vitals: Vitals, *, agents: int, mean_context: float) -> None:
        """Adjust to one health check of the engine. `mean_context`: tokens per agent."""
        fits = self._fitting(vitals, mean_context)
        pressed = self._is_pressed(vitals, agents * mean_context)
        self._before = vitals
        if self._settling:
            self._settling -= 1
        elif pressed:
            least = self.agents * 0.9 if self.agents <= fits else max(fits, self.agents * CUT)
            self.agents = max(1, int(least))
            self.lowered, self._settling = True, SETTLING
        elif fits > self.agents:
            self.agents = self.agents + 1 if self.lowered else int(fits)
        elif agents >= self.agents and not (vitals.running or vitals.waiting):
            self.agents = min(self.agents + 1, self.most)

    def _is_pressed(self, vitals: Vitals, committed: float) -> bool:
        """Whether it thrashes: it evicts KV that it needs again, and has no spare time."""
        before = self._before or vitals
        asked, hit = vitals.cache_queries, vitals.cache_hits
        self._asked = self._asked * MEMORY + max(0.0, asked - before.cache_queries)
        self._hit = self._hit * MEMORY + max(0.0, hit - before.cache_hits)
        short = vitals.starved > 0 or vitals.preemptions > before.preemptions
        self._short = self._short * MEMORY + short * (1 - MEMORY)
        if self._short < SATURATED:
            return False
        too_many = committed > KV_SHARE * (vitals.kv_tokens or committed)
        wasted = too_many and self._hit < WASTED * self._asked
        return wasted or vitals.kv_used > KV_SHARE or vitals.preemptions > before.preemptions

    def _fitting(self, vitals: Vitals, mean_context: float) -> float:
        """Agents whose contexts fit into the KV cache; 0 if unknown."""
        if not (vitals.kv_tokens and mean_context):
            return 0.0
        return min(KV_SHARE * vitals.kv_tokens / mean_context, float(self.most))
