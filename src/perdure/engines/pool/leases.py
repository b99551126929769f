"""Which engine a session talks to: kept for its KV cache, moved only for a reason.

Owns the table and its rules, and no clock, socket or task. Waiting for room is in `queueing`.
Processes agree without talking: a group has the same order of engines everywhere (weighted rendezvous
hashing), and a session that another process served stays where that one had it.
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
"""Agents of one engine, the range Anyscale reports; KV pressure may lower it below."""
KV_SHARE = 0.9
"""Of the KV cache, what agents' contexts may fill on average."""
IDLE_S = 600.0
"""A session not called for so long has left."""
RECLAIM_S = 60.0
"""While others wait, one that has been in a tool for so long gives up its place."""
OVERLOAD, SLACK = 1.5, 4.0
"""An engine is overloaded beyond 1.5 x the average and 4 agents."""
EVEN = 1.25
"""How even a pool is made when an engine joins."""
NEAR, FEW = 1.1, 2.0
"""A group that is new here goes to the first engine of its order that would then have at most 1.1 x
what the emptiest would, and 2 agents more: views differ between processes, mostly by less. With more,
two small groups share one of two engines and the other idles."""
HASHED = 1 << 64
WASTED = 0.5
"""An engine that finds less than half of what it is asked for in its cache reads prompts again."""
CUT = 0.75
"""How many stay of those that do not fit."""
SETTLING = 10
"""Looks after a cut at which it is not judged: agents leave at the end of their turn, not before."""
SATURATED = 0.6
"""Of the looks, those that find requests waiting inside an engine which has no time left."""
MEMORY = 0.95
"""Of what was counted, from one look to the next: some twenty looks are judged together."""


@dataclass
class Place:
    """An engine as somewhere to sit."""

    name: str
    generation: int
    weight: float = 1.0
    capacity: int = LEAST_AGENTS
    foreign: float = 0.0
    """Requests on it that are not ours: other gateways' agents."""
    strict: bool = False
    """Agents over its capacity wait at their next turn; else only new ones do."""

    @property
    def boot(self) -> "Boot":
        return Boot(self.name, self.generation)


class Boot(NamedTuple):
    """One generation of an engine."""

    name: str
    generation: int


@dataclass
class Lease:
    """One session's seat. `context` is its last prompt's length in tokens."""

    session: str
    group: str
    engine: str
    generation: int
    context: int = 0
    last_used: float = 0.0
    busy: int = 0


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
        places: Collection[Place],
        avoid: Collection[str] = (),
        last: Boot | None = None,
    ) -> Lease | None:
        """The session's lease, kept, moved or new; None when no engine has room.

        `avoid`: engines that failed this call just now; used all the same when there is no other.
        `last`: where another process had the session, after us.
        """
        usable = [place for place in places if place.name not in avoid] or list(places)
        lease = self._table.get(session)
        if last is not None and (there := _find(last, usable)) is not None:
            lease = self._lease(session, group, there)
        at = _find(Boot(lease.engine, lease.generation), usable) if lease is not None else None
        if lease is not None and at is not None and self._is_surplus(lease, at):
            self.release(session)
            lease = None
        if lease is not None and at is not None and not self._should_leave(lease, at, usable):
            return lease
        # Who holds a seat is never sent to the queue by a move: its engine is gone, not full.
        chosen = self._choose(session, group, usable, full_ok=lease is not None)
        if chosen is None:
            return None
        if lease is not None and lease.engine != chosen.name:
            self.moved += 1
        return self._lease(session, group, chosen)

    def _lease(self, session: str, group: str, place: Place) -> Lease:
        before = self._table.get(session)
        if before is not None and (before.engine, before.generation) == place.boot:
            return before
        fresh = Lease(session, group, place.name, place.generation, last_used=self.clock())
        if before is not None:
            fresh.context, fresh.busy = before.context, before.busy
        self.release(session)
        self._table[session] = fresh
        self._agents[fresh.engine] += 1
        return fresh

    def _choose(
        self, session: str, group: str, places: Collection[Place], *, full_ok: bool
    ) -> Place | None:
        """Where the group's siblings are; else the first in its order that is not fuller than need be.

        A session without a group shares its prompt with nobody: it goes where the fewest are.
        """
        roomy = [place for place in places if self._has_room(place)] or (
            list(places) if full_ok else []
        )
        if not roomy:
            return None
        siblings = self._siblings(group, session)
        for place in sorted(roomy, key=lambda place: -siblings.get(place.name, 0)):
            if siblings.get(place.name) and not self._overloaded(place, places):
                return place
        near, more = (NEAR, FEW) if group else (1.0, 0.0)
        least = near * min(self._load(place, 1.0) for place in roomy)
        fitting = [p for p in roomy if self._load(p, 1.0) <= least + more / p.weight]
        return max(fitting, key=lambda place: affinity(group or session, place))

    def _siblings(self, group: str, session: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for lease in self._table.values():
            if group and lease.group == group and lease.session != session:
                counts[lease.engine] = counts.get(lease.engine, 0) + 1
        return counts

    def _load(self, place: Place, more: float = 0.0) -> float:
        """Agents for its weight, with so many more."""
        return (self.agents(place.name) + place.foreign + more) / place.weight

    def _has_room(self, place: Place) -> bool:
        return self.agents(place.name) + place.foreign < place.capacity

    def _overloaded(self, place: Place, places: Collection[Place]) -> bool:
        if len(places) < 2:
            return False
        total = sum(self._load(other) * other.weight for other in places)
        average = total / sum(other.weight for other in places)
        return self._load(place) > OVERLOAD * average + SLACK / place.weight

    def _is_surplus(self, lease: Lease, at: Place) -> bool:
        return at.strict and lease.busy == 0 and self.agents(at.name) + at.foreign > at.capacity

    def _should_leave(self, lease: Lease, at: Place, places: Collection[Place]) -> bool:
        return lease.busy == 0 and self._overloaded(at, places)

    def use(self, session: str, context: int) -> None:
        """A call of this session begins. `context` in tokens."""
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
        """Forget sessions that have left; how many."""
        return self._drop(self._idle(IDLE_S))

    def reclaim(self, places: Iterable[Place]) -> bool:
        """Free one seat of an agent that has been away from the engines for long, on one of these."""
        names = {place.name for place in places}
        idle = [lease for lease in self._idle(RECLAIM_S) if lease.engine in names]
        return bool(self._drop(idle[:1]))

    def _idle(self, seconds: float) -> list[Lease]:
        """The one idle for longest first."""
        before = self.clock() - seconds
        idle = [x for x in self._table.values() if not x.busy and x.last_used < before]
        return sorted(idle, key=lambda lease: lease.last_used)

    def _drop(self, leases: Sequence[Lease]) -> int:
        for lease in leases:
            self.release(lease.session)
        return len(leases)

    def rebalance(self, places: Collection[Place], joined: str) -> int:
        """An engine joined: give it its share of the sessions; how many. One that generates ends its
        turn where it is."""
        target = next(place for place in places if place.name == joined)
        total = sum(self.agents(place.name) for place in places)
        weights = sum(place.weight for place in places)
        moved = 0
        for place in places:
            share = total * place.weight / weights
            surplus = int(self.agents(place.name) - EVEN * share)
            for lease in self._movable(place, target)[: max(0, surplus)]:
                self._agents[lease.engine] -= 1
                self._agents[joined] += 1
                lease.engine, lease.generation = target.boot
                moved += 1
        self.moved += moved
        return moved

    def _movable(self, place: Place, target: Place) -> list[Lease]:
        """Whole groups, those first that prefer the target, as in every process; then small
        contexts: theirs is the cheapest prefill."""
        here = [lease for lease in self._table.values() if lease.engine == place.name]

        def cost(lease: Lease) -> tuple[bool, float, int]:
            return lease.busy > 0, -_preference(lease.group, target, place), lease.context

        return sorted(here, key=cost) if place is not target else []


def affinity(key: str, place: Place) -> float:
    """How much a group likes an engine. Highest wins: each engine is the first choice of a share of
    all groups that follows its weight, and one that joins or leaves changes only its own."""
    digest = hashlib.sha256(f"{key}\0{place.name}".encode()).digest()
    uniform = (int.from_bytes(digest[:8], "big") + 0.5) / HASHED
    return -place.weight / math.log(uniform)


def _preference(group: str, target: Place, place: Place) -> float:
    """Sessions without a group have none: of them the small contexts go."""
    return affinity(group, target) / affinity(group, place) if group else 0.0


def _find(boot: Boot, places: Collection[Place]) -> Place | None:
    """That engine, in that generation."""
    return next((place for place in places if place.boot == boot), None)


@dataclass
class Capacity:
    """Agents that an engine may have: from its KV cache, fewer where they waste it, more where it idles.

    An engine whose agents' contexts do not all fit still gains from each of them while it has time to
    read some again. Once it has not, each prefill throws out what another agent needs next, and it
    does little else: then only as many stay as fit.

    Example:
        capacity = Capacity()
        capacity.observe(Vitals(kv_tokens=4_800_000), agents=40, mean_context=32_000)
        assert capacity.agents == 128
    """

    agents: int = LEAST_AGENTS
    _before: Vitals | None = None
    lowered: bool = False
    """The engine has shown what it cannot bear: whoever is over wait for their next turn."""
    _settling: int = 0
    _short: float = 0.0
    _asked: float = 0.0
    _hit: float = 0.0

    def observe(self, vitals: Vitals, *, agents: int, mean_context: float) -> None:
        """One look at the engine, which has so many agents with contexts of so many tokens."""
        fits = _fitting(vitals, mean_context)
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
            self.agents = min(self.agents + 1, MOST_AGENTS)

    def _is_pressed(self, vitals: Vitals, committed: float) -> bool:
        """It throws KV away that it needs, and has no time for that."""
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


def _fitting(vitals: Vitals, mean_context: float) -> float:
    """Agents whose contexts fit into the KV cache; 0 where that is not known."""
    if not (vitals.kv_tokens and mean_context):
        return 0.0
    return min(KV_SHARE * vitals.kv_tokens / mean_context, float(MOST_AGENTS))
