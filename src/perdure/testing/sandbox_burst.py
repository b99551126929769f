"""A burst of sandboxes on one account, admitted by the rules that admit the sandboxes of a run.

The rules run in this process: a stack that uses the same account at the same time does not know of
the burst, and competes with it.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any
from uuid import uuid4

from perdure.errors import AccountExhausted, RateLimited
from perdure.reports.report_statistics import quantile
from perdure.rollouts.admission.permit_rules import Account, AskPermit, CreateRefused
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.types import AccountCaps, Frozen

HOLD_S = 10.0
"""Seconds that a sandbox lives after its boot if the account has no room for all at once."""
WAITED_S = 1.0
"""A sandbox that waited this long for its permit counts as one that waited."""


class BurstResult(Frozen):
    """Times are in seconds. Boot figures are null if no sandbox booted."""

    wanted: int
    created: int
    """Sandboxes that booted and answered a command."""
    refused: int
    """Creates that the account refused (429). Each was repeated, as a run does."""
    waited: int
    """Sandboxes that waited for a permit for at least a second."""
    longest_wait_s: float
    boot_p50_s: float | None
    """From the create until the first command has ended."""
    boot_p95_s: float | None
    boots_per_minute: float | None
    """From the first request until the last boot."""
    most_at_once: int
    sandbox_seconds: float
    """Of all its sandboxes together, from their creates to their kills."""
    live_cap: int | None
    """`most_at_once` if the account refused more live sandboxes; otherwise null."""
    failures: dict[str, int]
    """Message -> sandboxes that did not boot or could not be killed."""


async def run_burst(
    provider: SandboxProvider, spec: SandboxSpec, count: int, caps: AccountCaps
) -> BurstResult:
    """Create `count` sandboxes at once, run a command in each, and kill them.

    `provider` must raise RateLimited at once (`waits_at_caps = False`). Raises: AccountExhausted.
    """
    burst = _Burst(provider, spec, count, caps)
    granting = asyncio.create_task(burst.grant())
    try:
        await all_of(burst.use(number) for number in range(count))
    finally:
        granting.cancel()
    return burst.result()


async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


class _Burst:
    def __init__(
        self, provider: SandboxProvider, spec: SandboxSpec, count: int, caps: AccountCaps
    ) -> None:
        self.provider, self.spec, self.count, self.caps = provider, spec, count, caps
        self.name = uuid4().hex[:8]
        self.began = self.last_boot = time.monotonic()
        self.account = Account.new(self.began)
        self.has_news = asyncio.Event()
        self.granted = [asyncio.Event() for _ in range(count)]
        self.undecided = count
        """Sandboxes that have neither booted nor failed."""
        self.all_decided = asyncio.Event()
        self.waits: list[float] = []
        self.boots: list[float] = []
        self.created: dict[int, float] = {}
        self.seconds = 0.0
        self.refused = self.live = self.most_live = 0
        self.is_capped = False
        self.failures: Counter[str] = Counter()

    async def grant(self) -> None:
        """Grant permits until it is cancelled."""
        while True:
            self.has_news.clear()
            for request in self.account.grants(time.monotonic()):
                self.granted[int(request.holder)].set()
            pause = self.account.wake_in(time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.has_news.wait()

    async def use(self, number: int) -> None:
        """One sandbox, from its request to its kill."""
        identity = f"burst-{self.name}-{number}"
        asked = AskPermit(holder=str(number), run=self.name, step="burst", caps=self.caps)
        self.account.ask(asked)
        self.has_news.set()
        try:
            await self._boot(number, identity)
            await self._hold()
        except AccountExhausted:
            raise
        except Exception as error:  # a provider of the user's may raise anything
            self._fail(error)
        finally:
            try:
                await self.provider.kill(identity)
            except Exception as error:  # the check lists remaining sandboxes later
                self._fail(error)
            if number in self.created:
                self.seconds += time.monotonic() - self.created[number]
            self.account.release(str(number))
            self.has_news.set()

    async def _boot(self, number: int, identity: str) -> None:
        """Raises: PerdureError; RuntimeError if the command fails."""
        try:
            while True:
                await self.granted[number].wait()
                self.granted[number].clear()
                created = time.monotonic()
                try:
                    box = await self.provider.create(self.spec, identity)
                    self.created[number] = created
                    break
                except AccountExhausted:
                    raise
                except RateLimited as error:
                    self._refuse(number, error)
            await box.exec(["true"], check=True)
        finally:
            self.undecided -= 1
            if not self.undecided:
                self.all_decided.set()
        self.last_boot = time.monotonic()
        self.waits.append(created - self.began)
        self.boots.append(self.last_boot - created)
        self.account.started(str(number))
        self.has_news.set()

    def _refuse(self, number: int, error: RateLimited) -> None:
        self.refused += 1
        self.is_capped |= error.limit == "concurrency"
        refused = CreateRefused(
            holder=str(number), limit=error.limit, retry_after=error.retry_after
        )
        self.account.refused(refused, time.monotonic())
        self.has_news.set()

    async def _hold(self) -> None:
        """Keep it until all are up, or for HOLD_S if others need its place."""
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            while not self.all_decided.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HOLD_S):
                        await self.all_decided.wait()
                if self._has_too_few_places():
                    return
        finally:
            self.live -= 1

    def _has_too_few_places(self) -> bool:
        caps = (self.caps.live, self.account.live)
        return any(cap is not None and cap < self.count for cap in caps)

    def _fail(self, error: Exception) -> None:
        self.failures[f"{type(error).__name__}: {error}"] += 1

    def result(self) -> BurstResult:
        boots = sorted(self.boots)
        minutes = (self.last_boot - self.began) / 60
        return BurstResult(
            wanted=self.count,
            created=len(boots),
            refused=self.refused,
            waited=sum(wait >= WAITED_S for wait in self.waits),
            longest_wait_s=max(self.waits, default=0.0),
            boot_p50_s=quantile(boots, 0.5) if boots else None,
            boot_p95_s=quantile(boots, 0.95) if boots else None,
            boots_per_minute=len(boots) / minutes if boots else None,
            most_at_once=self.most_live,
            sandbox_seconds=self.seconds,
            live_cap=self.most_live if self.is_capped else None,
            failures=dict(self.failures),
        )
