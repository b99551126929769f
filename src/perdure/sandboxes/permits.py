"""Who may start a sandbox of a provider account next: the rules, without clock or network.

A worker asks for a permit before it makes a sandbox, and holds it until that sandbox is killed. The
caller keeps this state for all workers and passes the time
(docs/decisions/0010-permits-of-an-account.md).
"""

from typing import Literal

from pydantic import Field

from perdure.types import AccountCaps, Frozen

Limit = Literal["rate", "concurrency"]

PACE = 0.8
"""Fraction of the configured creates per second that is granted evenly. The rest is the size of the
burst that may be saved up: answers that arrive late and together still keep below the cap."""
PAUSE_S = 1.0
"""Seconds without a create after a refusal that names no Retry-After."""
RECOVERY = 0.05
"""Fraction of the configured rate that each sandbox adds to a lowered rate when it starts."""
PROBE_S = 60.0
"""Seconds after a refusal for concurrency until one more sandbox is tried."""
GROWTH = 2
"""More sandboxes to try for each one that has started since then: the number doubles each time."""
OVERSHOOT = 4, 0.25
"""How many sandboxes may boot beyond those that run: this number, or this fraction of the running
ones if that is more. It bounds how many are refused at once."""
MOST_GRANTS = 200
"""Grants at a time: Temporal allows a workflow at most 2000 pending messages."""
SLOWEST = 0.05
"""Creates per second below which refusals do not lower the rate."""


class PermitRequest(Frozen):
    """A workflow that waits for a permit. `step` tells one sandbox of it from the next."""

    holder: str
    run: str
    step: str
    order: int
    """Within a run, the lowest is served first."""


class Permit(Frozen):
    """A slot of the account. `starting`: the create of its sandbox has not been answered."""

    run: str
    step: str
    starting: bool = True
    first: bool = True
    """The holder has no other sandbox, so a refusal frees the slot."""


class AccountState(Frozen):
    """What the process that keeps the account saves, so that a restart loses nothing."""

    caps: AccountCaps = AccountCaps()
    waiting: tuple[PermitRequest, ...] = ()
    permits: dict[str, Permit] = Field(default_factory=dict)
    asked: int = 0
    rate: float | None = None
    live: int | None = None
    growing: bool = False
    probe_at: float | None = None
    paused_until: float | None = None
    slowed_at: float | None = None
    tokens: float = 1.0
    filled: float | None = None
    checked_at: float | None = None


class Account:
    """Slots and start tokens of one provider account. Times are seconds on the caller's clock."""

    def __init__(self, state: AccountState, now: float) -> None:
        self.caps = state.caps
        self.waiting = {request.holder: request for request in state.waiting}
        self.permits = dict(state.permits)
        self.asked = state.asked
        self.rate = state.rate
        """Creates per second that the account was seen to accept, when below its cap; None: the cap."""
        self.live = state.live
        """Live sandboxes that the account was seen to accept, when below its cap; None: the cap."""
        self.growing = state.growing
        """More than `live` were tried, and none was refused since."""
        self._tokens, self._filled = state.tokens, _known(state.filled, now)
        self._paused_until = _known(state.paused_until, now)
        self._probe_at = _known(state.probe_at, now + PROBE_S)
        self.checked_at = _known(state.checked_at, now)
        """When the caller last checked whether the holders still exist."""
        self._slowed_at = _known(state.slowed_at, now - PAUSE_S)

    def state(self) -> AccountState:
        return AccountState(
            caps=self.caps,
            waiting=tuple(self.waiting.values()),
            permits=self.permits,
            asked=self.asked,
            rate=self.rate,
            live=self.live,
            growing=self.growing,
            probe_at=self._probe_at,
            paused_until=self._paused_until,
            slowed_at=self._slowed_at,
            tokens=self._tokens,
            filled=self._filled,
            checked_at=self.checked_at,
        )

    # -- events from holders ----------------------------------------------------------------------

    def ask(self, holder: str, run: str, step: str, caps: AccountCaps) -> bool:
        """Queue a request for one sandbox. True: it was already granted, so it is granted again."""
        self.caps = caps
        permit = self.permits.get(holder)
        if permit is not None and permit.step == step and permit.starting:
            return True
        if holder not in self.waiting or self.waiting[holder].step != step:
            self.asked += 1
            self.waiting[holder] = PermitRequest(
                holder=holder, run=run, step=step, order=self.asked
            )
        return False

    def started(self, holder: str) -> None:
        """The sandbox that was granted is up."""
        permit, request = self.permits.get(holder), self.waiting.pop(holder, None)
        if permit is None and request is not None:
            # Its worker died after a refusal, before it waited. The next worker did not know of the
            # refusal and made the sandbox.
            permit = Permit(run=request.run, step=request.step)
        if permit is None or not permit.starting:
            return
        self.permits[holder] = permit.model_copy(update={"starting": False})
        self._grow()
        if self.rate is not None:
            fastest = self.caps.creates_per_s
            rate = self.rate + max(SLOWEST, RECOVERY * (fastest or self.rate))
            self.rate = rate if fastest is None or rate < fastest else None

    def refused(self, holder: str, limit: Limit, retry_after: float | None, now: float) -> None:
        """The provider answered 429: queue the request again, ahead of all later ones.

        A holder whose sandbox had started replaces it by another, as a grading with twins does: it
        keeps its slot and tries again by itself."""
        permit = self.permits.get(holder)
        if permit is None:
            return
        if permit.starting:
            self._queue_again(holder, permit)
        if limit == "concurrency":
            self.live, self.growing = self._up(), False
            self._probe_at = now + (retry_after or PROBE_S)
        else:
            self._paused_until = max(self._paused_until, now + (retry_after or PAUSE_S))
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
                self._tokens -= 1
            granted.append(request)
        return granted

    def wake_in(self, now: float) -> float | None:
        """Seconds until `grants` may grant more even if no event arrives; None: only an event helps."""
        if not self.waiting:
            return None
        moments = [self._paused_until]
        if (speed := self._speed()) is not None:
            moments.append(self._filled + max(0.0, 1 - self._tokens) / speed)
        if self._candidate() is None:
            if self.live is None or self._starting_is_full():
                return None
            moments.append(self._probe_at)
        return max(0.0, max(moments) - now)

    def longest_unchecked(self, most: int) -> list[str]:
        """Up to `most` holders, those first whose last check is longest ago."""
        chosen = list(self.permits)[:most]
        for holder in chosen:
            self.permits[holder] = self.permits.pop(holder)
        return chosen

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.permits

    def _probe(self, now: float) -> None:
        """Raise the limit by one if a request waits and the last refusal is long enough ago."""
        if self.live is None or now < self._probe_at or not self._is_wanted():
            return
        self.growing, self._probe_at = True, now + PROBE_S
        self._learn(self.live + 1)

    def _grow(self) -> None:
        """A sandbox came up: the account accepts as many as are up now, and perhaps more."""
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
        if now < self._paused_until or (self._speed() is not None and self._tokens < 1):
            return None
        return self._candidate()

    def _candidate(self) -> PermitRequest | None:
        """The next request to grant: of a holder with a slot, then of the run with the fewest slots, then
        the oldest."""
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
        """Creates per second to grant; None: no limit is set or known."""
        if self.caps.creates_per_s is None:
            return self.rate
        pace = PACE * self.caps.creates_per_s
        return pace if self.rate is None else min(pace, self.rate)

    def _refill(self, now: float) -> None:
        if (speed := self._speed()) is not None:
            most = max(1.0, speed * (1 - PACE) / PACE)
            self._tokens = min(most, self._tokens + (now - self._filled) * speed)
        self._filled = now

    def _slow_down(self, now: float) -> None:
        """Halve the rate, once for all refusals of a burst."""
        if now - self._slowed_at < PAUSE_S:
            return
        self._slowed_at, self._tokens = now, 0.0
        starting = sum(permit.starting for permit in self.permits.values()) + 1
        self.rate = max(SLOWEST, (self._speed() or float(starting)) / 2)


def _known(moment: float | None, otherwise: float) -> float:
    return otherwise if moment is None else moment
