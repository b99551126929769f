"""Limits of a hosted API's account, shared by gateway processes through the store."""

import asyncio
from pathlib import Path

import pytest

from perdure.engines.api_allowance import SHARE, ApiAllowance, ApiUsage
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.storage.store_url import open_store
from perdure.types import ApiLimits

MIDNIGHT = 1795824000.0
"""2026-11-28 00:00 UTC"""
CALL = ApiUsage(requests=1)


class Clock:
    """The time of one host, which a test sets."""

    def __init__(self, at: float = MIDNIGHT) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def process(home: Path, clock: Clock, **limits: object) -> ApiAllowance:
    """One gateway process of the home."""
    store = open_store(Settings(home=home))
    made = ApiLimits.model_validate(limits)
    return ApiAllowance(store, b"secret", "https://api.example/v1", made, clock)


async def calls(allowance: ApiAllowance, most: int, usage: ApiUsage = CALL) -> int:
    """How many of these calls may start."""
    for number in range(most):
        if await allowance.take(usage):
            return number
    return most


async def test_without_limits_nothing_is_counted(tmp_path: Path) -> None:
    """The store is not asked either."""
    allowance = process(tmp_path, Clock())

    assert await calls(allowance, 5) == 5
    assert [key async for key in allowance.store.list("engines/")] == []


@pytest.mark.parametrize(("window", "length"), [("minute", 60), ("hour", 3600), ("day", 86400)])
async def test_a_window_has_its_limit_and_the_next_one_too(
    tmp_path: Path, window: str, length: int
) -> None:
    """Windows begin with the minute, the hour and the day in UTC, whenever the first call comes."""
    clock = Clock(MIDNIGHT + 0.7 * length)
    allowance = process(tmp_path, clock, requests={window: 7})
    first = await calls(allowance, 20)
    reached = await allowance.take(CALL)
    clock.at = MIDNIGHT + length - 0.001
    last = await calls(allowance, 20)
    clock.at = MIDNIGHT + length
    following = await calls(allowance, 20)

    assert (first, last, following) == (7, 0, 7)
    assert reached is not None
    assert reached.opens_at == MIDNIGHT + length
    assert reached.reason.startswith(f"the limit of 7 requests per {window} (engine.limits)")


async def test_processes_share_one_limit_exactly(tmp_path: Path) -> None:
    """Four processes that call at the same time start as many calls as the limit, and no more."""
    clock = Clock()
    processes = [process(tmp_path, clock, requests={"hour": 250}) for _ in range(4)]
    started = await asyncio.gather(
        *(calls(one, 50) for one in processes for _ in range(5)),  # five callers in each
    )

    assert sum(started) == 250


async def test_a_killed_process_costs_its_share_and_no_call_more(tmp_path: Path) -> None:
    """What it took and did not use stays taken: the limit is never exceeded."""
    clock, limit = Clock(), 10 * SHARE
    killed = process(tmp_path, clock, requests={"day": limit})
    used = await calls(killed, 25)
    left = await calls(process(tmp_path, clock, requests={"day": limit}), limit)

    assert used == 25
    assert left == limit - 30  # it had taken three shares of ten


async def test_tokens_count_when_a_call_has_ended(tmp_path: Path) -> None:
    """Only calls in flight may exceed a limit, and the next writes count what they used."""
    clock = Clock()
    one, other = (process(tmp_path, clock, tokens={"day": 1000}) for _ in range(2))
    expected, used = ApiUsage(1, 5), ApiUsage(1, 400, 0, 300)
    assert await one.take(expected) is None
    one.settle(expected, used)
    assert await one.take(expected) is None
    one.settle(expected, used)

    assert await one.take(expected) is not None
    assert await other.take(expected) is not None


async def test_a_long_answer_costs_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call counts all of it at once, however many shares it was."""
    allowance = process(tmp_path, Clock(), tokens={"day": 10 * SHARE})
    put, written = allowance.store.put, []

    async def counted(key: str, data: bytes, *, if_match: str | None = None) -> str:
        written.append(key)
        return await put(key, data, if_match=if_match)

    monkeypatch.setattr(allowance.store, "put", counted)
    assert await allowance.take(CALL) is None
    allowance.settle(CALL, ApiUsage(1, 400, 0, 100))
    assert await allowance.take(CALL) is None

    assert len(written) == 1


async def test_a_refund_lets_another_call_start(tmp_path: Path) -> None:
    """A refused call used no tokens."""
    allowance = process(tmp_path, Clock(), input_tokens={"minute": 100})
    big = ApiUsage(1, 100)
    assert await allowance.take(big) is None
    assert await allowance.take(big) is not None
    allowance.settle(big, ApiUsage(1))

    assert await allowance.take(big) is None


async def test_dollars_follow_the_price(tmp_path: Path) -> None:
    """A million prompt tokens at $1 and as many sampled ones at $9 reach a limit of $10."""
    price = {"input": 1, "cached": 0.5, "output": 9}
    allowance = process(tmp_path, Clock(), dollars={"hour": 10}, price=price)
    used = ApiUsage(1, 1_000_000, 0, 1_000_000)
    assert await allowance.take(CALL) is None
    allowance.settle(CALL, used)
    reached = await allowance.take(CALL)

    assert reached is not None
    assert reached.reason.startswith("the limit of 10 dollars per hour")


async def test_the_limit_that_opens_last_is_told(tmp_path: Path) -> None:
    """A call waits for all of its limits."""
    limits = {"requests": {"minute": 1, "day": 1}, "tokens": {"hour": 1}}
    allowance = process(tmp_path, Clock(), **limits)
    assert await allowance.take(ApiUsage(1, 1)) is None
    reached = await allowance.take(CALL)

    assert reached is not None
    assert reached.opens_at == MIDNIGHT + 86400


async def test_a_slow_clock_gives_no_second_window(tmp_path: Path) -> None:
    """A host whose clock is behind counts in the window that the others are in."""
    ahead = process(tmp_path, Clock(MIDNIGHT + 60), requests={"minute": 5})
    behind = process(tmp_path, Clock(MIDNIGHT + 59), requests={"minute": 5})

    assert await calls(ahead, 9) == 5
    assert await calls(behind, 9) == 0


async def test_a_higher_limit_holds_after_a_restart(tmp_path: Path) -> None:
    """The store keeps the amount taken, not the remainder."""
    clock = Clock()
    assert await calls(process(tmp_path, clock, requests={"day": 5}), 9) == 5

    assert await calls(process(tmp_path, clock, requests={"day": 8}), 9) == 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"dollars": {"day": 40}}, "needs the model's price"),
        ({"requests": {"week": 40}}, "minute"),
        ({"requests": {"day": 0}}, "greater than 0"),
        ({"calls": {"day": 40}}, "calls"),
    ],
)
def test_a_wrong_limit_is_refused_with_its_field(
    limits: dict[str, dict[str, float]], message: str
) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigurationError, match=message):
        ApiLimits(**limits)
