"""Fills a batch with groups until they have enough trainable tokens.

Owns the window of groups in flight, which of them a batch takes, and when the batch closes. The
groups are durable workflows. A rollout that is open when new weights are published continues: each
token records the version that sampled it.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from temporalio.service import RPCError

from perdure.client import rollout_listing
from perdure.errors import Cancelled
from perdure.types import EpisodeRef, GroupRequest

if TYPE_CHECKING:
    from perdure.client.sdk import GroupHandle, Perdure

logger = logging.getLogger(__name__)

TELL_EVERY_S = 300.0
LOOK_EVERY_S = 10.0
"""Seconds between two checks whether the groups wait for an engine, which the user may have to
start."""
LEAVES_S = 30.0
"""Seconds for which a caller that stops iterating waits for an unavailable server."""


@dataclass(frozen=True)
class FinishedGroup:
    """One group with the episodes of its samples, including failed ones."""

    group_id: str
    episodes: tuple[EpisodeRef, ...]

    @property
    def trainable_tokens(self) -> int:
        """Trained tokens of the episodes that are graded and trainable."""
        return sum(e.trained_tokens for e in self.episodes if e.trainable and e.reward is not None)

    @property
    def has_signal(self) -> bool:
        """Whether the group's rewards differ. Without variance there is no GRPO advantage."""
        return len({e.reward for e in self.episodes} - {None}) > 1


def graded_tokens(group: FinishedGroup) -> int:
    return group.trainable_tokens


def tokens_with_signal(group: FinishedGroup) -> int:
    """Like `graded_tokens`, but 0 for a group with equal rewards (DAPO's dynamic sampling)."""
    return group.trainable_tokens if group.has_signal else 0


Accept = Callable[[FinishedGroup], bool]


def has_signal(group: FinishedGroup) -> bool:
    """A filter that accepts only groups whose rewards differ."""
    return group.has_signal


def fresh(newest: Callable[[], int], max_staleness: int) -> Accept:
    """A filter that accepts a group if, when it finishes, no token is older than `newest() -
    max_staleness`. A group with tokens of unknown version does not pass."""

    def accept(group: FinishedGroup) -> bool:
        oldest = newest() - max_staleness
        versions = [e.policy_version_min for e in group.episodes if e.trainable]
        return all(version is not None and version >= oldest for version in versions)

    return accept


async def collect(
    perdure: "Perdure",
    requests: "Iterable[GroupRequest] | AsyncIterable[GroupRequest]",
    *,
    trainable_tokens: int,
    in_flight: int = 8,
    count: Callable[[FinishedGroup], int] = graded_tokens,
    accept: Accept | None = None,
    leftover: Literal["cancel", "keep"] = "cancel",
    tell_every_s: float = TELL_EVERY_S,
) -> AsyncGenerator[FinishedGroup, None]:
    """Yield groups as they finish, until their `count`s add up to `trainable_tokens` or none are
    left.

    At most `in_flight` groups run at a time; more than the batch needs are oversampling. Groups
    that still run when the batch is full, or when the caller stops iterating, are cancelled. With
    `leftover="keep"` they continue, and the same request joins them later. Groups that `accept`
    refuses are neither yielded nor counted. While no group finishes, a warning every `tell_every_s`
    says what the groups are doing, and one within seconds says if they wait for an engine.

    Raises: ConfigurationError for a bad request; NoResult if a group failed or was terminated;
    ValueError for `trainable_tokens` or `in_flight` below 1.
    """
    _check(trainable_tokens, in_flight)
    collector = Collector(
        perdure, requests, in_flight=in_flight, accept=accept, tell_every_s=tell_every_s
    )
    try:
        async for group in collector.groups(trainable_tokens, count):
            yield group
    finally:
        await collector.aclose(leftover)


class Collector:
    """Groups that continue while the trainer trains. Each batch takes those that have finished.

    Example:
        collector = Collector(perdure, requests(), in_flight=16, accept=fresh(lambda: version, 1))
        for step in range(100):
            batch = [group async for group in collector.groups(trainable_tokens=2_100_000)]
            checkpoint["open"] = [request.model_dump() for request in collector.open_requests]
        await collector.aclose()

    After a restart, pass the requests of the checkpoint before the others: they join their groups.
    """

    def __init__(
        self,
        perdure: "Perdure",
        requests: "Iterable[GroupRequest] | AsyncIterable[GroupRequest]",
        *,
        in_flight: int = 8,
        accept: Accept | None = None,
        tell_every_s: float = TELL_EVERY_S,
    ) -> None:
        _check(1, in_flight)
        self._perdure = perdure
        self._source = _stream(requests)
        self._in_flight = in_flight
        self._accept = accept
        self._tell_every_s = tell_every_s
        self._running: dict[asyncio.Task[FinishedGroup], _Started] = {}
        self._exhausted = False

    @property
    def open_requests(self) -> list[GroupRequest]:
        """Requests of the groups that were started and not yet yielded, in start order."""
        return [started.request for started in self._running.values()]

    async def groups(
        self, trainable_tokens: int, count: Callable[[FinishedGroup], int] = graded_tokens
    ) -> AsyncGenerator[FinishedGroup, None]:
        """Yield one batch, like `collect`. Groups that still run continue."""
        _check(trainable_tokens, self._in_flight)
        missing = trainable_tokens
        while missing > 0:
            await self._fill()
            if not self._running:
                return
            for task in await self._finished():
                group = self._taken(task)
                if self._accept is None or self._accept(group):
                    missing -= count(group)
                    yield group
                else:
                    logger.info("%s was refused by the filter", group.group_id)

    async def aclose(self, leftover: Literal["cancel", "keep"] = "cancel") -> None:
        """Stop waiting for the groups that still run. Cancel them unless `leftover` is "keep"."""
        running = {task: started.handle for task, started in self._running.items()}
        self._running = {}
        await _leave(running, cancel=leftover == "cancel")

    async def _fill(self) -> None:
        while not self._exhausted and len(self._running) < self._in_flight:
            request = await anext(self._source, None)
            if request is None:
                self._exhausted = True
                return
            handle = await self._perdure.start_group(request)
            task = asyncio.create_task(_finished(handle, request))
            self._running[task] = _Started(request, handle)

    async def _finished(self) -> "list[asyncio.Task[FinishedGroup]]":
        """Wait for at least one finished group. The groups count as open until `_taken` removes
        them."""
        now = asyncio.get_running_loop().time
        tell_at, has_told = now() + self._tell_every_s, False
        while True:
            pause = min(tell_at - now(), math.inf if has_told else LOOK_EVERY_S)
            done, _ = await asyncio.wait(
                self._running, timeout=max(0.0, pause), return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                found = [task for task in self._running if task in done]
                for task in found:
                    task.result()  # a failed group ends the batch before any is taken
                return found
            if now() >= tell_at:
                await self._tell()
                tell_at = now() + self._tell_every_s
            elif not has_told:
                has_told = await self._tell_engine_wait()

    def _taken(self, task: "asyncio.Task[FinishedGroup]") -> FinishedGroup:
        del self._running[task]
        return task.result()

    async def _tell(self) -> None:
        for started in list(self._running.values()):
            try:
                why = await started.handle.describe_open_rollouts()
            except RPCError as error:
                why = f"Temporal does not answer: {error.message}"
            logger.warning("%s is still open: %s", started.request.group_id, why)

    async def _tell_engine_wait(self) -> bool:
        """Log why the first group with running agents waits for an engine. False if it does not
        wait."""
        client = self._perdure.client
        with contextlib.suppress(RPCError):  # `_tell` says that Temporal does not answer
            for started in list(self._running.values()):
                rollout = started.request.rollout
                found = await rollout_listing.of_instance(
                    client, rollout.run_id, rollout.instance_id
                )
                if why := await rollout_listing.engine_wait(client, found):
                    logger.warning("%s waits for an engine: %s", started.request.group_id, why)
                    return True
                if any(one.stage == "agent" for one in found):
                    return False
        return False


class _Started(NamedTuple):
    request: GroupRequest
    handle: "GroupHandle"


def _check(trainable_tokens: int, in_flight: int) -> None:
    for name, value in (("trainable_tokens", trainable_tokens), ("in_flight", in_flight)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, is {value}")


async def _stream(
    requests: "Iterable[GroupRequest] | AsyncIterable[GroupRequest]",
) -> AsyncIterator[GroupRequest]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


async def _finished(handle: "GroupHandle", request: GroupRequest) -> FinishedGroup:
    """Wait for a group. A cancelled group counts with the episodes it has. Raises: NoResult."""
    with contextlib.suppress(Cancelled):
        await handle.result()
    return FinishedGroup(request.group_id, tuple([e async for e in handle.episodes()]))


async def _leave(
    running: "dict[asyncio.Task[FinishedGroup], GroupHandle]", *, cancel: bool
) -> None:
    """Stop waiting for groups that still run, and cancel them unless they have just ended."""
    if cancel:
        left = (handle for task, handle in running.items() if not task.done())
        await asyncio.gather(*(_cancel(handle) for handle in left))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _cancel(handle: "GroupHandle") -> None:
    """Cancel a group. If that fails, log it, because the group continues to spend tokens."""
    try:
        async with asyncio.timeout(LEAVES_S):
            await handle.cancel()
    except (RPCError, TimeoutError) as error:
        why = str(error) or f"no answer from Temporal within {LEAVES_S:g} s"
        logger.warning("%s could not be cancelled and continues: %s", handle.handle.id, why)
