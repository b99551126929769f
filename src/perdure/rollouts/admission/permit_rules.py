"""Which rollout may start a sandbox of a provider account next: the rules, without clock or
network.

A stage asks for a permit before it creates a sandbox, and holds it until that sandbox is killed.
The SandboxAccountWorkflow keeps this state for all workers and passes in the time
(docs/decisions/0010-permits-of-an-account.md).
"""

from typing import Literal

from pydantic import BaseModel

from perdure.types import AccountCaps, Frozen

PACE = 0.8
"""Fraction of the configured creates per second that is granted evenly. The rest may accumulate as
a burst, so that grants stay below the cap even when answers arrive late and together."""
PAUSE_S = 1.0
"""Seconds without a create after a refusal that names no Retry-After."""
RECOVERY = 0.05
"""Fraction of the configured rate that each sandbox adds to a lowered rate when it starts."""
PROBE_S = 60.0
"""Seconds after a concurrency refusal until one more sandbox is tried."""
GROWTH = 2
"""Sandboxes by which the limit rises for each one that has started since then, so that it
doubles."""
OVERSHOOT = 4, 0.25
"""How many sandboxes may boot in addition to the running ones: this number, or this fraction of the
running ones if that is more. It limits how many creates are refused at once."""
MOST_GRANTS = 200
"""Grants at a time. Temporal allows a workflow at most 2000 pending messages."""
SLOWEST = 0.05
"""Lowest rate, in creates per second, to which refusals lower it."""


class AskPermit(Frozen):
    """A workflow asks for a sandbox of the account. The request is idempotent."""

    holder: str
    """The workflow that will hold the permit and is signaled `granted`."""
    run: str
    step: str
    """Distinguishes one sandbox of the holder from the next."""
    caps: AccountCaps


class CreateRefused(Frozen):
    """The provider answered 429 to a create that the account had granted."""

    holder: str
    limit: Literal["rate", "concurrency"]
    retry_after: float | None = None


class PermitRequest(Frozen):
    """A workflow that waits for a permit."""

    holder: str
    run: str
    step: str
    order: int
    """Within a run, the request with the lowest order is served first."""


class Permit(Frozen):
    """A slot of the account. `starting`: the provider has not answered the create yet."""

    run: str
    step: str
    starting: bool = True
    first: bool = True
    """The holder has no earlier sandbox, so a refusal frees the slot."""


class Account(BaseModel):
    """Slots and start tokens of one provider account. Its fields are the state that a restart
    keeps.

    Times are seconds on the caller's clock. Fields that are mutated in place have no default,
    because the payload to Temporal contains only the fields that were set.
    """

    caps: AccountCaps = AccountCaps()
    waiting: dict[str, PermitRequest]
    """By holder, like `permits`."""
    permits: dict[str, Permit]
    asked: int = 0
    rate: float | None = None
    """Observed limit of creates per second, if it is below the cap; None: the cap."""
    live: int | None = None
    """Observed limit of live sandboxes, if it is below the cap; None: the cap."""
    growing: bool = False
    """A probe beyond `live` has begun, and no create has been refused since."""
    probe_at: float = 0.0
    """When to try one sandbox more than `live`."""
    paused_until: float = 0.0
    slowed_at: float = -PAUSE_S
    tokens: float = 1.0
    filled_at: float
    checked_at: float
    """When the caller last checked whether the holders still exist."""

    @classmethod
    def new(cls, now: float) -> "Account":
        return cls(waiting={}, permits={}, filled_at=now, checked_at=now)

    # -- events from holders ----------------------------------------------------------------------

    def ask(self, asked: AskPermit) -> bool:
        """Queue a request for one sandbox. Returns True if it was granted before: grant it
        again."""
        self.caps = asked.caps
        holder, step = asked.holder, asked.step
        permit = self.permits.get(holder)
        if permit is not None and permit.step == step and permit.starting:
            return True
        if holder not in self.waiting or self.waiting[holder].step != step:
            self.asked += 1
            self.waiting[holder] = PermitRequest(
                holder=holder, run=asked.run, step=step, order=self.asked
            )
        return False

    def started(self, holder: str) -> None:
        """The granted sandbox is up."""
        permit, request = self.permits.get(holder), self.waiting.pop(holder, None)
        if permit is None and request is not None:
            # The worker died between a refusal and its wait. The next worker did not know of the
            # refusal and created the sandbox.
            permit = Permit(run=request.run, step=request.step)
        if permit is None or not permit.starting:
            return
        self.permits[holder] = permit.model_copy(update={"starting": False})
        self._grow()
        if self.rate is not None:
            fastest = self.caps.creates_per_s
            rate = self.rate + max(SLOWEST, RECOVERY * (fastest or self.rate))
            self.rate = rate if fastest is None or rate < fastest else None

    def refused(self, refused: CreateRefused, now: float) -> None:
        """Queue the request again, ahead of all later ones.

        A holder whose sandbox had started keeps its slot and retries by itself: it replaces that
        sandbox by another, as a grading with twins does."""
        permit = self.permits.get(refused.holder)
        if permit is None:
            return
        if permit.starting:
            self._queue_again(refused.holder, permit)
        if refused.limit == "concurrency":
            self.live, self.growing = self._up(), False
            self.probe_at = now + (refused.retry_after or PROBE_S)
        else:
            self.paused_until = max(self.paused_until, now + (refused.retry_after or PAUSE_S))
            self._slow_down(now)

    def _queue_again(self, holder: str, permit: Permit) -> None:
        if permit.first:
            del self.permits[holder]
        else:
            self.permits[holder] = permit.model_copy(update={"starting": False})
        self.waiting[holder] = PermitRequest(
            holder=holder, run=permit.run, step=permit.step, order=0
        )

    def release(self, holder: str) -> None:
        """The holder's sandbox is gone, or the holder no longer needs one."""
        self.waiting.pop(holder, None)
        self.permits.pop(holder, None)

    # -- calls of the workflow ---------------------------------------------------------------------

    def grants(self, now: float) -> list[PermitRequest]:
        """Requests whose holders may start a sandbox now, at most MOST_GRANTS."""
        self._refill(now)
        self._probe(now)
        granted: list[PermitRequest] = []
        while len(granted) < MOST_GRANTS and (request := self._next(now)) is not None:
            del self.waiting[request.holder]
            held = self.permits.get(request.holder)
            self.permits[request.holder] = Permit(
                run=request.run, step=request.step, first=held is None
            )
            if self._speed() is not None:
                self.tokens -= 1
            granted.append(request)
        return granted

    def wake_in(self, now: float) -> float | None:
        """Seconds until `grants` may grant more without an event; None if only an event can
        help."""
        if not self.waiting:
            return None
        moments = [self.paused_until]
        if (speed := self._speed()) is not None:
            moments.append(self.filled_at + max(0.0, 1 - self.tokens) / speed)
        if self._candidate() is None:
            if self.live is None or self._starting_is_full():
                return None
            moments.append(self.probe_at)
        return max(0.0, max(moments) - now)

    def longest_unchecked(self, most: int) -> list[str]:
        """Up to `most` holders, the least recently checked ones first."""
        chosen = list(self.permits)[:most]
        for holder in chosen:
            self.permits[holder] = self.permits.pop(holder)
        return chosen

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.permits

    def _probe(self, now: float) -> None:
        """Raise the limit by one if a request waits and `probe_at` has passed."""
        if self.live is None or now < self.probe_at or not self._is_wanted():
            return
        self.growing, self.probe_at = True, now + PROBE_S
        self._learn(self.live + 1)

    def _grow(self) -> None:
        """A sandbox came up, so the account accepts at least as many as are up now."""
        if self.live is None:
            return
        up = self._up()
        few, part = OVERSHOOT
        most = min(self.live + GROWTH, up + max(few, int(part * up))) if self.growing else up
        self._learn(max(self.live, most))

    def _learn(self, live: int) -> None:
        known = self.caps.live is not None and live >= self.caps.live
        self.live = None if known else live

    def _is_wanted(self) -> bool:
        """Whether a request waits only because the account is full."""
        return self._is_full() and any(holder not in self.permits for holder in self.waiting)

    def _next(self, now: float) -> PermitRequest | None:
        if now < self.paused_until or (self._speed() is not None and self.tokens < 1):
            return None
        return self._candidate()

    def _candidate(self) -> PermitRequest | None:
        """The next request to grant: first of a holder with a slot, then of the run with the fewest
        slots, then the oldest."""
        if self._starting_is_full():
            return None
        full = self._is_full()
        held: dict[str, int] = {}
        for permit in self.permits.values():
            held[permit.run] = held.get(permit.run, 0) + 1
        able = [
            request
            for request in self.waiting.values()
            if request.holder in self.permits or not full
        ]
        return min(able, key=lambda w: self._rank(w, held), default=None)

    def _rank(self, request: PermitRequest, held: dict[str, int]) -> tuple[bool, int, int]:
        return request.holder not in self.permits, held.get(request.run, 0), request.order

    def _starting_is_full(self) -> bool:
        most = self.caps.starting
        starting = sum(permit.starting for permit in self.permits.values())
        return most is not None and starting >= most

    def _is_full(self) -> bool:
        caps = [cap for cap in (self.caps.live, self.live) if cap is not None]
        return bool(caps) and len(self.permits) >= min(caps)

    def _up(self) -> int:
        return sum(not permit.starting for permit in self.permits.values())

    def _speed(self) -> float | None:
        """Creates per second to grant; None if no limit is set or known."""
        if self.caps.creates_per_s is None:
            return self.rate
        pace = PACE * self.caps.creates_per_s
        return pace if self.rate is None else min(pace, self.rate)

    def _refill(self, now: float) -> None:
        if (speed := self._speed()) is not None:
            most = max(1.0, speed * (1 - PACE) / PACE)
            self.tokens = min(most, self.tokens + (now - self.filled_at) * speed)
        self.filled_at = now

    def _slow_down(self, now: float) -> None:
        """Halve the rate, once for all refusals of a burst."""
        if now - self.slowed_at < PAUSE_S:
            return
        self.slowed_at, self.tokens = now, 0.0
        starting = sum(permit.starting for permit in self.permits.values()) + 1
        self.rate = max(SLOWEST, (self._speed() or float(starting)) / 2)
