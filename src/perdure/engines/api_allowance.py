"""Keeps a hosted API's account within the limits of the settings, for all gateway processes of a home.

One object in the store says how much of each current window the processes have taken. A process takes
an allowance by a conditional write, and serves calls from it without the store. What a killed process
did not use stays taken.
"""

import asyncio
import hashlib
import hmac
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import Field

from perdure.engines.quota_resets import utc_minute
from perdure.errors import NotFound, PreconditionFailed
from perdure.storage.base import Store, Stored
from perdure.types import ApiLimits, Frozen, Price

SHARE = 100
"""A process takes 1/SHARE of a limit at a time, so a window costs at most about SHARE writes."""
WINDOWS_S = {"minute": 60.0, "hour": 3600.0, "day": 86400.0}


class ApiUsage(NamedTuple):
    """What calls use."""

    requests: int = 0
    prompt: int = 0
    """Prompt tokens, including those that the provider read from its cache."""
    cached: int = 0
    sampled: int = 0

    def of(self, quantity: str, price: Price | None) -> float:
        """The amount that counts for the limit of this name in `ApiLimits`."""
        if quantity == "dollars":
            return price.of(self.prompt, self.cached, self.sampled) if price is not None else 0.0
        counts = {
            "requests": self.requests,
            "tokens": self.prompt + self.sampled,
            "input_tokens": self.prompt,
            "output_tokens": self.sampled,
        }
        return counts[quantity]


class Taken(Frozen):
    """The part of one window that processes have taken. `begins`: Unix seconds."""

    begins: float = 0.0
    amount: float = 0.0


class TakenParts(Frozen):
    """The object in the store."""

    windows: dict[str, Taken] = Field(default_factory=dict)
    """By limit, such as `tokens/day`."""


class LimitReached(NamedTuple):
    """No call may start before `opens_at`, Unix seconds. `reason`: a sentence for users."""

    opens_at: float
    reason: str


@dataclass
class WindowAllowance:
    """A process's part of one limit in the current window."""

    quantity: str
    window: str
    limit: float
    begins: float = 0.0
    left: float = 0.0
    """Below 0 if calls used more than was left. The next conditional write adds this debt."""
    is_used_up: bool = False
    """Whether all processes together have taken the whole window."""

    @property
    def name(self) -> str:
        return f"{self.quantity}/{self.window}"

    @property
    def reached(self) -> LimitReached:
        opens_at = self.begins + WINDOWS_S[self.window]
        limit = f"{self.limit:,.2f}".rstrip("0").rstrip(".")
        what = f"{limit} {self.quantity.replace('_', ' ')} per {self.window}"
        return LimitReached(
            opens_at,
            f"the limit of {what} (engine.limits) is reached; calls continue at {utc_minute(opens_at)}",
        )

    def roll(self, begins: float) -> None:
        """Begin a new window, unless the window that begins then is the current one or an earlier one."""
        if begins > self.begins:
            self.begins, self.left, self.is_used_up = begins, 0.0, False

    def share_of(self, stored: Taken) -> Taken:
        """What to store to take a share of the window, and to count the debt."""
        if 0 < stored.begins - self.begins <= WINDOWS_S[self.window]:
            self.roll(stored.begins)  # this host's clock is slow
        taken = stored.amount if stored.begins == self.begins else 0.0
        taken += max(0.0, -self.left)
        share = self.limit / SHARE if self.quantity == "dollars" else math.ceil(self.limit / SHARE)
        return Taken(begins=self.begins, amount=taken + max(0.0, min(share, self.limit - taken)))

    def took(self, taken: Taken, stored: Taken) -> None:
        """Add the share that the store now holds. `taken`: the result of `share_of`."""
        if taken.begins == self.begins:
            before = stored.amount if stored.begins == taken.begins else 0.0
            self.left += taken.amount - before
            self.is_used_up = taken.amount >= self.limit


@dataclass
class ApiAllowance:
    """The allowances of one gateway process for one endpoint.

    Example:
        allowance = ApiAllowance(store, secret, "https://api.openai.com/v1", limits)
        reached = await allowance.take(ApiUsage(requests=1, prompt=900))  # None: the call may start
        allowance.settle(ApiUsage(requests=1, prompt=900), ApiUsage(1, 950, 0, 120))
    """

    store: Store
    secret: bytes
    """The home's, so that homes with other keys of the endpoint do not share its limits."""
    url: str
    limits: ApiLimits
    clock: Callable[[], float] = time.time
    _own: list[WindowAllowance] = field(init=False)
    _taking: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        amounts = self.limits.model_dump(exclude={"price"})
        self._own = [
            WindowAllowance(quantity, window, limit)
            for quantity, windows in amounts.items()
            for window, limit in windows.items()
        ]
        url = self.url.rstrip("/").encode()
        name = hmac.new(self.secret, b"limits " + url, hashlib.sha256).hexdigest()[:16]
        self._key = f"engines/limits/{name}.json"

    async def take(self, expected: ApiUsage) -> LimitReached | None:
        """Deduct a call's expected use from the allowances. If a limit is reached, the call must
        not start: returns the reached limit whose window opens last.

        A call starts while every allowance is above zero, even if the call is expected to use more.
        So calls in flight may exceed a limit. Raises: StoreUnavailable.
        """
        while self._empty():
            async with self._taking:
                if not_taken := [one for one in self._empty() if not one.is_used_up]:
                    await self._take_shares(not_taken)
                if reached := [one.reached for one in self._empty() if one.is_used_up]:
                    return max(reached)
        self._count(expected)
        return None

    def settle(self, expected: ApiUsage, used: ApiUsage) -> None:
        """Replace what a call was expected to use by what it used."""
        self._empty()  # begins new windows first
        self._count(ApiUsage(*(now - then for now, then in zip(used, expected, strict=True))))

    def _count(self, usage: ApiUsage) -> None:
        for one in self._own:
            one.left -= usage.of(one.quantity, self.limits.price)

    def _empty(self) -> list[WindowAllowance]:
        """Begin the windows that are due, and return the allowances that have nothing left."""
        now = self.clock()
        for one in self._own:
            length = WINDOWS_S[one.window]
            one.roll(now // length * length)
        return [one for one in self._own if one.left <= 0]

    async def _take_shares(self, empty: list[WindowAllowance]) -> None:
        """Take a share of each of these windows. Calls that end in the meantime change what is left."""
        while True:
            stored, parts = await self._read()
            known = {one.name: parts.windows.get(one.name, Taken()) for one in empty}
            taken = {one.name: one.share_of(known[one.name]) for one in empty}
            update = {"windows": parts.windows | taken}
            if taken == known or await self._write(parts.model_copy(update=update), stored):
                for one in empty:
                    one.took(taken[one.name], known[one.name])
                return
            await asyncio.sleep(random.uniform(0.005, 0.05))  # another process wrote first

    async def _read(self) -> tuple[Stored | None, TakenParts]:
        try:
            stored = await self.store.get(self._key)
        except NotFound:
            return None, TakenParts()
        try:
            return stored, TakenParts.model_validate_json(stored.data)
        except ValueError:  # emptied by a power failure: the windows begin again
            return stored, TakenParts()

    async def _write(self, parts: TakenParts, stored: Stored | None) -> bool:
        data = parts.model_dump_json().encode()
        if stored is None:
            return await self.store.put_if_absent(self._key, data)
        try:
            await self.store.put(self._key, data, if_match=stored.etag)
        except PreconditionFailed:
            return False
        return True
