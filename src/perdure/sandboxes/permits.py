"""Who may start a sandbox of a provider account next: the rules, without clock or network.

A permit is asked for before a sandbox is made and lasts until that sandbox is killed. Who keeps
this state for all workers, and what the time is, is left to the caller
(docs/decisions/0010-permits-of-an-account.md).
"""

from typing import Literal, NamedTuple

from pydantic import Field

from perdure.types import AccountCaps, Frozen

Limit = Literal["rate", "concurrency"]

PACE = 0.8
"""Part of the configured creates per second that is given out evenly; the rest, saved up at most,
is for answers that come late and close together, so that no second sees more than the cap."""
PAUSE_S = 1.0
"""After a refusal that names no Retry-After."""
RECOVERY = 0.05
"""Part of the configured rate that each sandbox started without a refusal gives back."""
PROBE_S = 60.0
"""So long after a refusal for concurrency one sandbox more is tried."""
GROWTH = 2
"""Sandboxes more that are tried for each that came up since then: twice as many at each turn."""
OVERSHOOT = 4, 0.25
"""Sandboxes tried at a time beyond those that are up: this many, or this part of them, if more. No
more than these are ever refused at once."""
AHEAD_S = 1200.0
"""A sandbox booted ahead is gone by then, whatever became of its worker."""
SLOW_S = 120.0
"""One that boots for longer is nobody's any more, as far as those who wait are concerned."""
MOST_GRANTS = 200
"""At a time: Temporal lets a workflow have no more than 2000 messages under way."""
SLOWEST = 0.05
"""Creates per second that are tried whatever was refused."""


class Wish(Frozen):
    """Somebody who waits. `step` tells one sandbox of a holder from the next."""

    holder: str
    run: str
    step: str
    order: int
    """Who asked first is served first, within its run."""


class Permit(Frozen):
    """A slot of the account. `starting`: its sandbox is being made and has not answered."""

    run: str
    step: str
    starting: bool = True
    first: bool = True
    """It has no sandbox besides the one being made: a refusal gives the slot back."""
    ahead: str = ""
    """Provider of a sandbox that is booted ahead, for nobody yet: it gives way to whoever waits."""
    since: float = 0.0
    """When that was begun."""


class Ahead(NamedTuple):
    """A permit that is to give way."""

    holder: str
    provider: str


class AccountState(Frozen):
    """What outlives a restart of whoever keeps it."""

    caps: AccountCaps = AccountCaps()
    waiting: tuple[Wish, ...] = ()
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
        self.waiting = {wish.holder: wish for wish in state.waiting}
        self.permits = dict(state.permits)
        self.asked = state.asked
        self.rate = state.rate
        """Creates per second that the account is known to take, below its cap; None: the cap."""
        self.live = state.live
        """Sandboxes that the account is known to take, below its cap; None: the cap."""
        self.growing = state.growing
        """`live` was tried beyond, and nothing was refused since."""
        self._tokens, self._filled = state.tokens, _known(state.filled, now)
        self._paused_until = _known(state.paused_until, now)
        self._probe_at = _known(state.probe_at, now + PROBE_S)
        self.checked_at = _known(state.checked_at, now)
        """When holders were looked up last."""
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

    # -- what holders say -------------------------------------------------------------------------

    def ask(self, holder: str, run: str, step: str, caps: AccountCaps) -> bool:
        """Queue a wish for one sandbox. True: it was granted before, and is again."""
        self.caps = caps
        permit = self.permits.get(holder)
        if permit is not None and permit.step == step and permit.starting:
            return True
        if holder not in self.waiting or self.waiting[holder].step != step:
            self.asked += 1
            self.waiting[holder] = Wish(holder=holder, run=run, step=step, order=self.asked)
        return False

    def started(self, holder: str) -> None:
        """The sandbox that was granted is up."""
        permit, wish = self.permits.get(holder), self.waiting.pop(holder, None)
        if permit is None and wish is not None:
            # refused, and its worker died before it could wait: the next one did not know
            permit = Permit(run=wish.run, step=wish.step)
        if permit is None or not permit.starting:
            return
        self.permits[holder] = permit.model_copy(update={"starting": False})
        self._grow()
        if self.rate is not None:
            fastest = self.caps.creates_per_s
            rate = self.rate + max(SLOWEST, RECOVERY * (fastest or self.rate))
            self.rate = rate if fastest is None or rate < fastest else None

    def refused(self, holder: str, limit: Limit, retry_after: float | None, now: float) -> None:
        """The provider answered 429: the wish stands again, before all that came later."""
        permit = self.permits.get(holder)
        if permit is None or not permit.starting:
            return
        if permit.first:
            del self.permits[holder]
        else:
            self.permits[holder] = permit.model_copy(update={"starting": False})
        if not permit.ahead:
            self.waiting[holder] = Wish(holder=holder, run=permit.run, step=permit.step, order=0)
        if limit == "concurrency":
            self.live, self.growing = self._up(), False
            self._probe_at = now + (retry_after or PROBE_S)
        else:
            self._paused_until = max(self._paused_until, now + (retry_after or PAUSE_S))
            self._slow_down(now)

    def release(self, holder: str) -> None:
        """Its sandbox is gone, or it does not want one any more."""
        self.waiting.pop(holder, None)
        self.permits.pop(holder, None)

    # -- sandboxes that are booted ahead ------------------------------------------------------------

    def has_room(self, now: float) -> bool:
        """One may be booted ahead: nobody waits, and nothing stands against it. Changes nothing."""
        if self.waiting or self._starting_is_full() or self._is_full() or now < self._paused_until:
            return False
        return self._speed() is None or self._tokens_at(now) >= 1

    def reserve(self, holder: str, provider: str, now: float) -> None:
        """A sandbox is being booted ahead, on a slot of its own."""
        self._refill(now)
        if self._speed() is not None:
            self._tokens -= 1
        self.permits[holder] = Permit(run="", step="", ahead=provider, since=now)

    def stands(self, holder: str, provider: str, now: float) -> None:
        """It is up; known again where it was thought to be gone."""
        if holder in self.permits:
            self.started(holder)
        else:
            self.permits[holder] = Permit(
                run="", step="", starting=False, ahead=provider, since=now
            )

    def taken(self, holder: str, by: str, run: str, step: str) -> None:
        """It is a rollout's now, and so is its slot; what that one held or wished is settled."""
        self.permits.pop(holder, None)
        self.waiting.pop(by, None)
        self.permits[by] = Permit(run=run, step=step, starting=False)

    def giving_way(self, now: float) -> list[Ahead]:
        """Those to be ended for others who wait: who ended one says `release`."""
        if not self._is_wanted():
            return []
        most = sum(holder not in self.permits for holder in self.waiting)
        found = [
            Ahead(holder, permit.ahead)
            for holder, permit in self.permits.items()
            if permit.ahead and (not permit.starting or now - permit.since > SLOW_S)
        ]
        return found[:most]

    # -- what the keeper does ---------------------------------------------------------------------

    def grants(self, now: float) -> list[Wish]:
        """Those who may start a sandbox now, up to MOST_GRANTS of them."""
        self._forget_old(now)
        self._refill(now)
        self._probe(now)
        granted: list[Wish] = []
        while len(granted) < MOST_GRANTS and (wish := self._next(now)) is not None:
            del self.waiting[wish.holder]
            held = self.permits.get(wish.holder)
            self.permits[wish.holder] = Permit(run=wish.run, step=wish.step, first=held is None)
            if self._speed() is not None:
                self._tokens -= 1
            granted.append(wish)
        return granted

    def wake_in(self, now: float) -> float | None:
        """Seconds until `grants` may have more to give without anybody saying anything."""
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
        """Up to `most` holders; the next call names others first."""
        chosen = [holder for holder, permit in self.permits.items() if not permit.ahead][:most]
        for holder in chosen:
            self.permits[holder] = self.permits.pop(holder)
        return chosen

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.permits

    def _forget_old(self, now: float) -> None:
        """Booted ahead by a worker that died: by now their provider has ended them."""
        for holder, permit in list(self.permits.items()):
            if permit.ahead and now - permit.since > AHEAD_S:
                del self.permits[holder]

    def _probe(self, now: float) -> None:
        """One sandbox more, some time after a refusal, where it is wanted."""
        if self.live is None or now < self._probe_at or not self._is_wanted():
            return
        self.growing, self._probe_at = True, now + PROBE_S
        self._learn(self.live + 1)

    def _grow(self) -> None:
        """A sandbox came up: the account takes what is up, and perhaps more."""
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
        """Somebody waits for a slot that the account does not have."""
        return self._is_full() and any(holder not in self.permits for holder in self.waiting)

    def _next(self, now: float) -> Wish | None:
        if now < self._paused_until or (self._speed() is not None and self._tokens < 1):
            return None
        return self._candidate()

    def _candidate(self) -> Wish | None:
        """Who holds a slot already goes first; else the run with the fewest slots, then the oldest."""
        if self._starting_is_full():
            return None
        full = self._is_full()
        held: dict[str, int] = {}
        for permit in self.permits.values():
            held[permit.run] = held.get(permit.run, 0) + 1
        able = [wish for wish in self.waiting.values() if wish.holder in self.permits or not full]
        return min(able, key=lambda w: self._rank(w, held), default=None)

    def _rank(self, wish: Wish, held: dict[str, int]) -> tuple[bool, int, int]:
        return wish.holder not in self.permits, held.get(wish.run, 0), wish.order

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
        """Creates per second to give out; None: no limit is set or known."""
        if self.caps.creates_per_s is None:
            return self.rate
        pace = PACE * self.caps.creates_per_s
        return pace if self.rate is None else min(pace, self.rate)

    def _refill(self, now: float) -> None:
        self._tokens, self._filled = self._tokens_at(now), now

    def _tokens_at(self, now: float) -> float:
        if (speed := self._speed()) is None:
            return self._tokens
        most = max(1.0, speed * (1 - PACE) / PACE)
        return min(most, self._tokens + (now - self._filled) * speed)

    def _slow_down(self, now: float) -> None:
        """Halved once for the refusals of one burst."""
        if now - self._slowed_at < PAUSE_S:
            return
        self._slowed_at, self._tokens = now, 0.0
        starting = sum(permit.starting for permit in self.permits.values()) + 1
        self.rate = max(SLOWEST, (self._speed() or float(starting)) / 2)


def _known(moment: float | None, otherwise: float) -> float:
    return otherwise if moment is None else moment
