"""The rules that grant permits of a provider account, on the test's clock."""

import heapq
from collections import Counter
from collections.abc import Callable

import pytest

from perdure.rollouts.admission.permit_rules import (
    MOST_GRANTS,
    OVERSHOOT,
    PROBE_S,
    Account,
    AskPermit,
    CreateRefused,
)
from perdure.types import AccountCaps

CAPS = AccountCaps(live=20, creates_per_s=5)


def account() -> Account:
    return Account.new(now=0.0)


def restarted(account: Account) -> Account:
    """The account as the next run of the workflow gets it: without fields that were never set."""
    return Account.model_validate_json(account.model_dump_json(exclude_unset=True))


def ask(
    account: Account,
    holder: str,
    *,
    run: str = "r",
    step: str = "1-agent",
    caps: AccountCaps = CAPS,
) -> bool:
    return account.ask(AskPermit(holder=holder, run=run, step=step, caps=caps))


def refuse(
    account: Account, holder: str, limit: str, retry_after: float | None, now: float
) -> None:
    account.refused(
        CreateRefused.model_validate(
            {"holder": holder, "limit": limit, "retry_after": retry_after}
        ),
        now,
    )


def names(account: Account, now: float) -> list[str]:
    return [wish.holder for wish in account.grants(now)]


class Service:
    """An account with its own caps, and holders that boot and work for fixed times."""

    def __init__(
        self,
        account: Account,
        live: int,
        rate: int,
        *,
        work_s: float = 8.0,
        others: Callable[[float], int] = lambda now: 0,
    ) -> None:
        self.account, self.live, self.rate = account, live, rate
        self.work_s = work_s
        self.others = others
        """The number of sandboxes of other users, by time."""
        self.after: float | None = 10.0 if work_s < 10 else None
        self.created: list[float] = []
        self.refusals: list[float] = []
        self.full_at = 0.0
        """The time when it first held as many sandboxes as the account allows."""
        self.most = self.up = 0
        self.now = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._later, (when, self._number, call))

    def create(self, holder: str) -> None:
        if self.up + self.others(self.now) >= self.live:
            return self._refuse(holder, "concurrency")
        if sum(self.now - at < 1 for at in self.created) >= self.rate:
            return self._refuse(holder, "rate")
        self.created.append(self.now)
        self.up += 1
        if self.up > self.most:
            self.most, self.full_at = self.up, self.now
        self.at(self.now + 1, lambda: self.account.started(holder))
        self.at(self.now + 1 + self.work_s, lambda: self._end(holder))

    def _refuse(self, holder: str, limit: str) -> None:
        self.refusals.append(self.now)
        after = self.after if limit == "concurrency" else 1.0
        refuse(self.account, holder, limit, after, self.now)

    def _end(self, holder: str) -> None:
        self.up -= 1
        self.account.release(holder)

    def run(self) -> None:
        """Run until no request waits and no permit is held."""
        while not self.account.empty:
            for holder in names(self.account, self.now):
                self.create(holder)
            wake = self.account.wake_in(self.now)
            nexts = [when for when, _, _ in self._later[:1]]
            nexts += [self.now + max(wake, 0.001)] if wake is not None else []
            self.now = min(nexts)
            while self._later and self._later[0][0] <= self.now:
                heapq.heappop(self._later)[2]()


def test_a_burst_of_500_never_meets_caps_that_are_known() -> None:
    """500 requests at once, 20 live sandboxes and 5 creates per second: all are served, and none is
    refused."""
    burst = account()
    for number in range(500):
        ask(burst, f"h{number}")
    service = Service(burst, live=20, rate=5)
    service.run()

    assert (len(service.created), service.refusals, service.most) == (500, [], 20)


def test_a_burst_finds_out_caps_that_are_not_configured() -> None:
    """Without configured caps, all requests are served, and few creates are refused."""
    burst = account()
    for number in range(500):
        ask(burst, f"h{number}", caps=AccountCaps(starting=16))
    service = Service(burst, live=20, rate=5)
    service.run()

    assert len(service.created) == 500
    assert len(service.refusals) < 100, service.refusals


def test_permits_that_others_return_are_used_within_seconds() -> None:
    """Others held 18 of 20 slots for ten minutes. After they leave, the account is full again after
    the next probe and a few boots, not one boot per minute."""
    crowded = account()
    for number in range(60):
        ask(crowded, f"h{number}")
    service = Service(
        crowded, live=20, rate=5, work_s=1200, others=lambda now: 18 if now < 600 else 0
    )
    service.run()

    assert service.most == 20
    assert service.full_at - 600 < PROBE_S + 15, service.full_at


def test_an_account_that_stays_crowded_is_asked_once_a_minute() -> None:
    """While others keep their slots, one create per minute is refused, and never several at
    once."""
    crowded = account()
    for number in range(12):
        ask(crowded, f"h{number}", caps=AccountCaps(starting=16))
    service = Service(crowded, live=20, rate=50, work_s=1200, others=lambda now: 14)
    service.run()
    minutes = Counter(now // PROBE_S for now in service.refusals)

    assert len(service.created) == 12
    assert max(minutes[minute] for minute in minutes if minute) == 1, minutes


def test_a_recovery_that_goes_too_far_is_refused_a_few_times() -> None:
    """If others free only some slots, a few more sandboxes are tried at once, not all that wait."""
    crowded = account()
    for number in range(60):
        ask(crowded, f"h{number}", caps=AccountCaps())
    service = Service(
        crowded, live=20, rate=500, work_s=1200, others=lambda now: 18 if now < 600 else 9
    )
    service.run()
    late = Counter(now // PROBE_S for now in service.refusals if now > 600)

    assert max(late.values()) <= OVERSHOOT[0], late


def test_runs_share_an_account_and_each_is_served_in_order() -> None:
    """A small run that starts late gets every other slot, and within a run the oldest request is
    first."""
    shared = account()
    for number in range(6):
        ask(shared, f"big{number}", run="big", caps=AccountCaps(live=4))
    for number in range(2):
        ask(shared, f"small{number}", run="small", caps=AccountCaps(live=4))

    assert names(shared, 0.0) == ["big0", "small0", "big1", "small1"]


def test_a_burst_without_caps_is_granted_in_portions() -> None:
    """Grants above the limit per call follow in the next call, and none is lost."""
    burst = account()
    for number in range(MOST_GRANTS + 1):
        ask(burst, f"h{number}", caps=AccountCaps())
    first, pause, rest = names(burst, 0.0), burst.wake_in(0.0), names(burst, 0.0)

    assert (len(first), pause, rest) == (MOST_GRANTS, 0.0, [f"h{MOST_GRANTS}"])


def test_an_account_of_one_sandbox_serves_rollouts_that_need_two() -> None:
    """With one slot, each rollout gets its agent's and its grading sandbox before the next rollout
    gets any."""
    one, served = account(), []
    for holder in ("a", "b", "c"):
        ask(one, holder, caps=AccountCaps(live=1))
    for _ in range(3):
        (holder,) = names(one, 0.0)
        one.started(holder)
        ask(one, holder, step="1-grade", caps=AccountCaps(live=1))
        served += [holder, *names(one, 0.0)]
        one.started(holder)
        one.release(holder)

    assert served == ["a", "a", "b", "b", "c", "c"]
    assert one.empty


def test_a_permit_is_kept_for_the_grading_of_its_rollout() -> None:
    """A holder gets its next sandbox at once, even if the account is full and others wait."""
    full = account()
    ask(full, "first", caps=AccountCaps(live=1))
    names(full, 0.0)
    full.started("first")
    ask(full, "second", caps=AccountCaps(live=1))
    ask(full, "first", step="1-grade", caps=AccountCaps(live=1))

    assert names(full, 0.0) == ["first"]


def test_asking_again_takes_no_second_permit() -> None:
    """A request repeated after a lost answer is granted again, on the same slot."""
    one = account()
    ask(one, "a", caps=AccountCaps(live=2))
    names(one, 0.0)

    assert ask(one, "a", caps=AccountCaps(live=2))
    assert (len(one.permits), names(one, 0.0)) == (1, [])


def test_a_refused_request_goes_back_to_the_front_of_the_queue() -> None:
    """After a concurrency refusal the slot is free, and no create follows until a slot is
    released."""
    learned = account()
    for name in ("a", "b", "c"):
        ask(learned, name, caps=AccountCaps(starting=2))
    names(learned, 0.0)
    learned.started("a")
    refuse(learned, "b", "concurrency", PROBE_S, 0.0)

    assert names(learned, 1.0) == []
    learned.release("a")
    assert names(learned, 1.0) == ["b"]


def test_a_refused_replacement_keeps_its_slot_and_slows_the_others() -> None:
    """A grading with twins replaces its sandbox. If the create is refused, no other create follows
    at once, and the grading keeps its slot."""
    one = account()
    for name in ("a", "b"):
        ask(one, name, caps=AccountCaps(live=2, starting=1))
    names(one, 0.0)
    one.started("a")
    refuse(one, "a", "rate", 30.0, 0.0)

    assert (names(one, 29.0), names(one, 31.0)) == ([], ["b"])
    assert sorted(one.permits) == ["a", "b"]


def test_more_is_tried_a_while_after_a_refusal() -> None:
    """Some time after a refusal, one more sandbox is tried, because others may have freed a
    slot."""
    learned = account()
    for name in ("a", "b"):
        ask(learned, name, caps=AccountCaps())
    names(learned, 0.0)
    refuse(learned, "b", "concurrency", None, 0.0)
    learned.started("a")

    assert (names(learned, PROBE_S - 1), names(learned, PROBE_S)) == ([], ["b"])


def test_retry_after_is_waited_for() -> None:
    """After a rate refusal, no sandbox starts before the named time, and then the rate is lower."""
    slowed = account()
    for number in range(4):
        ask(slowed, f"h{number}", caps=AccountCaps(creates_per_s=10))
    names(slowed, 0.0)
    refuse(slowed, "h0", "rate", 30.0, 0.5)

    assert names(slowed, 30.0) == []
    assert slowed.wake_in(30.0) == pytest.approx(0.5)
    assert names(slowed, 30.5) == ["h0"]


def test_a_restart_forgets_nothing() -> None:
    """Requests, permits and learned limits survive a restart of the workflow."""
    before = account()
    for number in range(5):
        ask(before, f"h{number}", caps=AccountCaps(starting=3))
    names(before, 0.0)
    before.started("h0")
    refuse(before, "h1", "concurrency", None, 0.0)
    after = restarted(before)

    assert (after, after.live) == (before, 1)
    assert Counter(p.starting for p in after.permits.values()) == {False: 1, True: 1}


def test_a_sandbox_without_a_permit_counts() -> None:
    """The worker died after a refusal, and the next one created the sandbox: the rollout holds a
    slot and does not wait."""
    one = account()
    for name in ("a", "b"):
        ask(one, name, caps=AccountCaps(live=1))
    names(one, 0.0)
    refuse(one, "a", "rate", None, 0.0)
    one.started("a")
    later = names(one, 60.0)
    one.release("a")

    assert (later, names(one, 60.0)) == ([], ["b"])


def test_a_sandbox_that_came_up_in_spite_of_a_refusal_needs_no_second_permit() -> None:
    """A grading that retries by itself is not granted a second permit for a sandbox that it has."""
    one, caps = account(), AccountCaps(starting=1)
    ask(one, "a", caps=caps)
    one.grants(0.0)
    one.started("a")
    ask(one, "a", step="1-grade", caps=caps)
    one.grants(1.0)
    refuse(one, "a", "rate", 1.0, 1.0)
    one.started("a")
    ask(one, "b", caps=caps)

    assert names(one, 60.0) == ["b"]


def test_a_restart_keeps_the_pause_after_a_refusal() -> None:
    """A Retry-After still applies after a restart of the workflow."""
    before = account()
    for number in range(2):
        ask(before, f"h{number}", caps=AccountCaps(creates_per_s=10))
    names(before, 0.0)
    refuse(before, "h0", "rate", 30.0, 0.5)

    assert names(restarted(before), 29.0) == []
