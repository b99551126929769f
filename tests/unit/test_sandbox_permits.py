"""The rules by which permits of a provider account are given out, on a clock of the test."""

import heapq
from collections import Counter
from collections.abc import Callable

import pytest

from perdure.sandboxes.permits import MOST_GRANTS, PROBE_S, Account, AccountState
from perdure.types import AccountCaps

CAPS = AccountCaps(live=20, creates_per_s=5)


def account(now: float = 0.0) -> Account:
    return Account(AccountState(), now)


def ask(account: Account, holder: str, *, run: str = "r", caps: AccountCaps = CAPS) -> bool:
    return account.ask(holder, run, "1-agent", caps)


def names(account: Account, now: float) -> list[str]:
    return [wish.holder for wish in account.grants(now)]


class Service:
    """An account with caps of its own, used by holders that boot and work for fixed times."""

    def __init__(self, account: Account, live: int, rate: int) -> None:
        self.account, self.live, self.rate = account, live, rate
        self.created: list[float] = []
        self.most = self.up = self.refused = 0
        self.now = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._later, (when, self._number, call))

    def create(self, holder: str) -> None:
        if self.up >= self.live:
            return self._refuse(holder, "concurrency")
        if sum(self.now - at < 1 for at in self.created) >= self.rate:
            return self._refuse(holder, "rate")
        self.created.append(self.now)
        self.up += 1
        self.most = max(self.most, self.up)
        self.at(self.now + 1, lambda: self.account.started(holder))
        self.at(self.now + 9, lambda: self._end(holder))

    def _refuse(self, holder: str, limit: str) -> None:
        self.refused += 1
        after = 10.0 if limit == "concurrency" else 1.0
        self.account.refused(holder, limit, after, self.now)  # type: ignore[arg-type]

    def _end(self, holder: str) -> None:
        self.up -= 1
        self.account.release(holder)

    def run(self) -> None:
        """Until nobody waits or holds."""
        while not self.account.empty:
            for holder in names(self.account, self.now):
                self.create(holder)
            wake = self.account.wake_in(self.now)
            nexts = [when for when, _, _ in self._later[:1]]
            nexts += [self.now + max(wake, 0.001)] if wake is not None else []
            self.now = min(nexts)
            while self._later and self._later[0][0] <= self.now:
                heapq.heappop(self._later)[2]()


def test_a_herd_of_500_never_meets_caps_that_are_known() -> None:
    """500 at once, 20 live and 5 creates a second: all served, no refusal, the slots kept full."""
    herd = account()
    for number in range(500):
        ask(herd, f"h{number}")
    service = Service(herd, live=20, rate=5)
    service.run()

    assert (len(service.created), service.refused, service.most) == (500, 0, 20)


def test_a_herd_finds_out_caps_that_nobody_named() -> None:
    """Nothing is known at first: all are served, and few of the creates are refused."""
    herd = account()
    for number in range(500):
        ask(herd, f"h{number}", caps=AccountCaps(starting=16))
    service = Service(herd, live=20, rate=5)
    service.run()

    assert len(service.created) == 500
    assert service.refused < 100, service.refused


def test_runs_share_an_account_and_each_is_served_in_order() -> None:
    """A small run that comes late gets every other slot; within a run the first is served first."""
    shared = account()
    for number in range(6):
        ask(shared, f"big{number}", run="big", caps=AccountCaps(live=4))
    for number in range(2):
        ask(shared, f"small{number}", run="small", caps=AccountCaps(live=4))

    assert names(shared, 0.0) == ["big0", "small0", "big1", "small1"]


def test_a_herd_without_caps_is_granted_in_portions() -> None:
    """More than may be told at a time: the rest is granted at once afterwards, not forgotten."""
    herd = account()
    for number in range(MOST_GRANTS + 1):
        ask(herd, f"h{number}", caps=AccountCaps())
    first, pause, rest = names(herd, 0.0), herd.wake_in(0.0), names(herd, 0.0)

    assert (len(first), pause, rest) == (MOST_GRANTS, 0.0, [f"h{MOST_GRANTS}"])


def test_an_account_of_one_sandbox_serves_rollouts_that_need_two() -> None:
    """Agent, then grader, on one slot: each rollout gets both before the next one gets any."""
    one, served = account(), []
    for holder in ("a", "b", "c"):
        ask(one, holder, caps=AccountCaps(live=1))
    for _ in range(3):
        (holder,) = names(one, 0.0)
        one.started(holder)
        one.ask(holder, "r", "1-grade", AccountCaps(live=1))
        served += [holder, *names(one, 0.0)]
        one.started(holder)
        one.release(holder)

    assert served == ["a", "a", "b", "b", "c", "c"]
    assert one.empty


def test_a_slot_is_kept_for_the_grading_of_its_rollout() -> None:
    """Who has a slot is granted its next sandbox at once, though the account is full and others wait."""
    full = account()
    ask(full, "first", caps=AccountCaps(live=1))
    names(full, 0.0)
    full.started("first")
    ask(full, "second", caps=AccountCaps(live=1))
    full.ask("first", "r", "1-grade", AccountCaps(live=1))

    assert names(full, 0.0) == ["first"]


def test_asking_again_takes_no_second_slot() -> None:
    """An ask that is repeated because its answer was lost is granted again, on the same slot."""
    one = account()
    ask(one, "a", caps=AccountCaps(live=2))
    names(one, 0.0)

    assert ask(one, "a", caps=AccountCaps(live=2))
    assert (len(one.permits), names(one, 0.0)) == (1, [])


def test_a_refusal_puts_the_wish_back_at_the_front() -> None:
    """Refused for concurrency: the slot is given back, and nobody is tried before one is released."""
    learned = account()
    for name in ("a", "b", "c"):
        ask(learned, name, caps=AccountCaps(starting=2))
    names(learned, 0.0)
    learned.started("a")
    learned.refused("b", "concurrency", PROBE_S, 0.0)

    assert names(learned, 1.0) == []
    learned.release("a")
    assert names(learned, 1.0) == ["b"]


def test_more_is_tried_a_while_after_a_refusal() -> None:
    """What others used of the account comes back: one sandbox more is tried after a pause."""
    learned = account()
    for name in ("a", "b"):
        ask(learned, name, caps=AccountCaps())
    names(learned, 0.0)
    learned.refused("b", "concurrency", None, 0.0)
    learned.started("a")

    assert (names(learned, PROBE_S - 1), names(learned, PROBE_S)) == ([], ["b"])


def test_retry_after_is_waited_for() -> None:
    """After a refusal for its rate, nobody starts a sandbox before the named time, and then slower."""
    slowed = account()
    for number in range(4):
        ask(slowed, f"h{number}", caps=AccountCaps(creates_per_s=10))
    names(slowed, 0.0)
    slowed.refused("h0", "rate", 30.0, 0.5)

    assert names(slowed, 30.0) == []
    assert slowed.wake_in(30.0) == pytest.approx(0.5)
    assert names(slowed, 30.5) == ["h0"]


def test_a_restart_forgets_nothing() -> None:
    """Who waits, who holds, and what was learned outlive the keeper."""
    before = account()
    for number in range(5):
        ask(before, f"h{number}", caps=AccountCaps(starting=3))
    names(before, 0.0)
    before.started("h0")
    before.refused("h1", "concurrency", None, 0.0)
    state = AccountState.model_validate_json(before.state().model_dump_json())

    assert Account(state, 5.0).state() == before.state()
    assert Counter(p.starting for p in state.permits.values()) == {False: 1, True: 1}
