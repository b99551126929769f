"""Which engine a session uses.

- A session stays on its engine, because its KV cache is there.
- A new session goes to the engine of its group, because a group shares a prompt.
- A new group goes to its home, the engine that it prefers in every process. If that has over 2 agents
  more than the emptiest engine, the group goes to the emptiest.
- If an engine has over twice the agents of the emptiest engine plus 8, new sessions of its groups
  go to the emptiest, and its own sessions move there at their next turn. So an engine that joins gets
  its share.
- A full engine gets no new session. Requests of other gateways' agents count as agents.

Owns no clock, socket or task. `fair_queue` holds the calls that wait for room, and `engine_capacity` decides how
many agents an engine may have.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

SPILL = 2.0
"""Agents above the emptiest engine, beyond which a new group does not go home."""
FAR, MORE = 2.0, 8.0
"""An engine is overloaded above twice the emptiest engine's agents plus 8."""
IDLE_S = 600.0
"""Seconds without a call after which a session's lease ends."""
RECLAIM_S = 60.0
"""Seconds without a call after which a session loses its lease if others wait for room."""


class EngineStart(NamedTuple):
    """One start of an engine: its name and generation."""

    name: str
    generation: int


@dataclass
class Candidate:
    """An engine that could take a session, with its load and its limit."""

    start: EngineStart
    capacity: int
    weight: float = 1.0
    foreign: float = 0.0
    """Requests of other gateways' agents on it."""
    strict: bool = False
    """If more agents than its capacity hold a lease, they wait at their next turn. If False, only
    new agents wait."""


@dataclass
class Lease:
    """One holder's right to one engine. A session is a separate holder for each model that it
    calls.

    `context`: its last prompt's length in tokens.
    """

    session: str
    group: str
    start: EngineStart
    context: int = 0
    last_used: float = 0.0
    busy: int = 0
    """Its calls in flight."""


@dataclass
class Leases:
    """All leases of one gateway process."""

    clock: Callable[[], float] = time.monotonic
    moved: int = 0
    """Sessions that changed engines: each costs one prefill."""
    _table: dict[str, Lease] = field(default_factory=dict)
    _agents: Counter[str] = field(default_factory=Counter)

    def get(self, session: str) -> Lease | None:
        return self._table.get(session)

    def agents(self, engine: str) -> int:
        return self._agents[engine]

    def mean_context(self, engine: str) -> float:
        contexts = [lease.context for lease in self._table.values() if lease.start.name == engine]
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
        usable = [one for one in candidates if one.start.name not in avoid] or list(candidates)
        if last is not None and (there := _find(last, usable)) is not None:
            self._put(session, group, there)
        lease = self._table.get(session)
        at = None if lease is None else _find(lease.start, usable)
        if lease is not None and at is not None:
            if lease.busy or not (self._over_full(at) or self._overloaded(at, usable)):
                return lease
            if self._over_full(at):
                self.release(session)
                lease = None
        roomy = [one for one in usable if self._held(one) < one.capacity]
        if not roomy and lease is None:
            return None
        # A session that must move never goes back to the queue: its engine is gone, not full.
        chosen = self._choose(group, roomy or usable)
        self.moved += lease is not None and lease.start.name != chosen.start.name
        return self._put(session, group, chosen)

    def _choose(self, group: str, candidates: Collection[Candidate]) -> Candidate:
        emptiest = min(candidates, key=self._load)
        if not group:
            return emptiest
        here = Counter(lease.start.name for lease in self._table.values() if lease.group == group)
        home = max(candidates, key=lambda one: (here[one.start.name], affinity(group, one)))
        if here[home.start.name]:
            return emptiest if self._overloaded(home, candidates) else home
        return home if self._load(home) <= self._load(emptiest) + SPILL else emptiest

    def _overloaded(self, candidate: Candidate, candidates: Collection[Candidate]) -> bool:
        return self._load(candidate) > FAR * min(map(self._load, candidates)) + MORE

    def _over_full(self, candidate: Candidate) -> bool:
        return candidate.strict and self._held(candidate) > candidate.capacity

    def _load(self, candidate: Candidate) -> float:
        """Agents with one more, relative to its weight."""
        return (self._held(candidate) + 1.0) / candidate.weight

    def _held(self, candidate: Candidate) -> float:
        return self._agents[candidate.start.name] + candidate.foreign

    def _put(self, session: str, group: str, candidate: Candidate) -> Lease:
        before = self._table.get(session)
        if before is not None and before.start == candidate.start:
            return before
        self.release(session)
        lease = before or Lease(session, group, candidate.start, last_used=self.clock())
        self._table[session] = lease = replace(lease, start=candidate.start)
        self._agents[candidate.start.name] += 1
        return lease

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
            self._agents[lease.start.name] -= 1

    def release_session(self, session_id: str) -> None:
        """End all leases of a session."""
        held = holder(session_id, "")
        for name in [name for name in self._table if name.startswith(held)]:
            self.release(name)

    def expire(self) -> None:
        """End the leases of idle sessions."""
        for lease in self._idle(IDLE_S):
            self.release(lease.session)

    def reclaim(self, candidates: Iterable[Candidate]) -> bool:
        """End the lease of the session that was idle longest on one of these; False if none was."""
        names = {one.start.name for one in candidates}
        idle = [lease for lease in self._idle(RECLAIM_S) if lease.start.name in names]
        if idle:
            self.release(min(idle, key=lambda lease: lease.last_used).session)
        return bool(idle)

    def _idle(self, seconds: float) -> list[Lease]:
        before = self.clock() - seconds
        return [x for x in self._table.values() if not x.busy and x.last_used < before]


def holder(session_id: str, model: str) -> str:
    """The key of a lease's holder. It is unique, because session ids have no slash."""
    return f"{session_id}/{model}"


def affinity(group: str, candidate: Candidate) -> float:
    """A group's preference for an engine; the highest wins (weighted rendezvous hashing). Each engine
    is the home of a share of all groups in proportion to its weight. An engine that joins or leaves
    changes the home of that share only."""
    digest = hashlib.sha256(f"{group}\0{candidate.start.name}".encode()).digest()
    uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
    return -candidate.weight / math.log(uniform)


def _find(start: EngineStart, candidates: Collection[Candidate]) -> Candidate | None:
    return next((one for one in candidates if one.start == start), None)
