"""Fills a batch with groups until they have enough trainable tokens.

Owns the window of groups in flight, which of them a batch takes, and when the batch closes. The
groups are durable workflows. A rollout that is open when new weights are published continues: each
token records the version that sampled it. `Perdure.batches` makes arrays of them.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from temporalio.service import RPCError

from perdure.client import rollout_listing
from perdure.errors import Cancelled, ConfigurationError
from perdure.types import EpisodeRef, GroupRequest, RolloutStatus

if TYPE_CHECKING:
    from perdure.client.gateway_episodes import GatewayEpisodes
    from perdure.client.sdk import GroupHandle, Perdure
    from perdure.episodes.episode import EpisodeSegments
    from perdure.storage.base import Store

logger = logging.getLogger(__name__)

TELL_EVERY_S = 300.0
LOOK_EVERY_S = 10.0
"""Seconds between two checks whether the groups wait for an engine, which the user may have to
start."""
LEAVES_S = 30.0
"""Seconds to wait for an unavailable server when the caller stops iterating."""


@dataclass(frozen=True)
class FinishedGroup:
    """One group with the episodes of its samples, including failed ones."""

    request: GroupRequest
    refs: tuple[EpisodeRef, ...]
    """What the group's workflow returned: a reference for each sample, with reward and counts."""
    episodes: "tuple[EpisodeSegments, ...]" = field(default=(), repr=False)
    """The episodes with their tokens. They are read once `accept` has seen the group. Stragglers
    that run on have none."""

    @property
    def group_id(self) -> str:
        return self.request.group_id

    @property
    def trainable_tokens(self) -> int:
        """Trained tokens of the episodes that are graded and trainable."""
        return sum(e.trained_tokens for e in self.refs if e.trainable and e.reward is not None)

    @property
    def has_signal(self) -> bool:
        """Whether the group's rewards differ. Without variance there is no GRPO advantage."""
        return len({e.reward for e in self.refs} - {None}) > 1


def graded_tokens(group: FinishedGroup) -> int:
    return group.trainable_tokens


def tokens_with_signal(group: FinishedGroup) -> int:
    """Like `graded_tokens`, but 0 for a group with equal rewards (DAPO's dynamic sampling)."""
    return group.trainable_tokens if group.has_signal else 0


Accept = Callable[[FinishedGroup], bool]
Leftover = Literal["cancel", "keep"]


def has_signal(group: FinishedGroup) -> bool:
    """A filter that accepts only groups whose rewards differ."""
    return group.has_signal


def complete(group: FinishedGroup) -> bool:
    """A filter that drops a group in which a member has no verdict."""
    graded = sum(one.status is RolloutStatus.GRADED for one in group.refs)
    return graded == group.request.n_samples


def fresh(newest: Callable[[], int], max_staleness: int) -> Accept:
    """A filter that accepts a group if, when it finishes, no token is older than `newest() -
    max_staleness`. A group with tokens of unknown version does not pass."""

    def accept(group: FinishedGroup) -> bool:
        oldest = newest() - max_staleness
        versions = [e.policy_version_min for e in group.refs if e.trainable]
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
    leftover: Leftover = "cancel",
    store: "Store | GatewayEpisodes | None" = None,
    tell_every_s: float = TELL_EVERY_S,
) -> AsyncGenerator[FinishedGroup, None]:
    """Yield groups as they finish, until their `count`s add up to `trainable_tokens` or none are
    left.

    At most `in_flight` groups run at a time; more than the batch needs are oversampling. Groups
    that still run when the batch is full, or when the caller stops iterating, are cancelled. With
    `leftover="keep"` they continue, and the same request joins them later. A group that was started
    before keeps its policy version. Groups that `accept` refuses are neither yielded nor counted.
    `store`: as for `read_episodes`. While no group finishes, a warning every `tell_every_s` says
    what the groups are doing. If they wait for an engine, another warning says so within seconds.

    Raises: ConfigurationError for a bad or repeated request; NoResult if a group failed or was
    terminated; ValueError for `trainable_tokens` or `in_flight` below 1; the errors of `read_episodes`.
    """
    check_positive(trainable_tokens=trainable_tokens)
    collector = Collector(
        perdure,
        requests,
        in_flight=in_flight,
        accept=accept,
        store=store,
        tell_every_s=tell_every_s,
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
        in_flight: int | None = 8,
        accept: Accept | None = None,
        store: "Store | GatewayEpisodes | None" = None,
        tell_every_s: float = TELL_EVERY_S,
    ) -> None:
        """`in_flight=None`: as many groups as the batch still needs, if it counts groups, not
        tokens."""
        check_positive(in_flight=in_flight)
        self._perdure = perdure
        self._source = _distinct(requests)
        self._in_flight = in_flight
        self._accept = accept
        self._store = store
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
        check_positive(trainable_tokens=trainable_tokens)
        missing = trainable_tokens
        while missing > 0:
            await self._fill(self._in_flight or missing)
            if not self._running:
                return
            for task in await self._finished():
                if missing > 0 and (group := await self._taken(task)) is not None:
                    missing -= count(group)
                    yield group

    async def aclose(self, leftover: Leftover = "cancel") -> None:
        """Stop waiting for the groups that still run. Cancel them unless `leftover` is "keep"."""
        running, self._running = self._running, {}
        await _leave(running, cancel=leftover == "cancel")

    async def _fill(self, in_flight: int) -> None:
        while not self._exhausted and len(self._running) < in_flight:
            request = await anext(self._source, None)
            if request is None:
                self._exhausted = True
                return
            await self._start(request)

    async def _start(self, request: GroupRequest) -> None:
        """Start a group, or join it. If the caller is cancelled meanwhile, the group counts as open,
        because the server may have started it."""
        request = await self._perdure.with_first_version(request)
        starting = asyncio.create_task(self._perdure.start_group(request))
        try:
            await asyncio.shield(starting)
        finally:
            if not starting.done() or starting.exception() is None:
                task = asyncio.create_task(_finished(starting, request))
                self._running[task] = _Started(request, starting)

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

    async def _taken(self, task: "asyncio.Task[FinishedGroup]") -> FinishedGroup | None:
        """The group with its episodes; None if the filter refuses it. It counts as open until its
        episodes have been read."""
        from perdure.client.episode_reader import read_episodes  # imports pyarrow

        group, accepted = task.result(), True
        if self._accept is not None and not (accepted := self._accept(group)):
            logger.info("%s was refused by the filter", group.group_id)
        if accepted and group.refs:
            group = replace(group, episodes=tuple(await read_episodes(group.refs, self._store)))
        del self._running[task]
        return group if accepted else None

    async def _tell(self) -> None:
        for started in list(self._running.values()):
            try:
                why = await (await started.starting).describe_open_rollouts()
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
    starting: "asyncio.Task[GroupHandle]"


def check_positive(**values: int | None) -> None:
    """Raises: ValueError, which names the argument."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: must be at least 1, is {value}")


async def _distinct(
    requests: "Iterable[GroupRequest] | AsyncIterable[GroupRequest]",
) -> AsyncIterator[GroupRequest]:
    """Raises: ConfigurationError for a second request for the same group."""
    seen: set[str] = set()
    async for request in _stream(requests):
        if request.workflow_id in seen:
            raise ConfigurationError(
                f"{request.workflow_id} is requested twice, which would train its episodes twice: "
                "give each epoch its own run_id"
            )
        seen.add(request.workflow_id)
        yield request


async def _stream(
    requests: "Iterable[GroupRequest] | AsyncIterable[GroupRequest]",
) -> AsyncIterator[GroupRequest]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


async def _finished(starting: "asyncio.Task[GroupHandle]", request: GroupRequest) -> FinishedGroup:
    """Wait for a group. A cancelled group counts with the episodes it has. Raises: NoResult."""
    handle = await asyncio.shield(starting)
    with contextlib.suppress(Cancelled):
        await handle.result()
    return FinishedGroup(request, tuple([ref async for ref in handle.refs()]))


async def _leave(running: "dict[asyncio.Task[FinishedGroup], _Started]", *, cancel: bool) -> None:
    """Stop waiting for groups that still run, and cancel them unless they have just ended."""
    if cancel:
        left = (started for task, started in running.items() if not task.done())
        await asyncio.gather(*(_cancel(started) for started in left))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _cancel(started: _Started) -> None:
    """Cancel a group. If that fails, log it, because the group continues to spend tokens."""
    try:
        async with asyncio.timeout(LEAVES_S):
            await (await started.starting).cancel()
    except ConfigurationError:
        return  # its start was refused
    except (RPCError, TimeoutError) as error:
        why = str(error) or f"no answer from Temporal within {LEAVES_S:g} s"
        what = started.request.workflow_id
        logger.warning("%s could not be cancelled and continues: %s", what, why)
