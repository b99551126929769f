"""The sync version of the client, for trainers without an event loop.

A background thread runs an event loop with the connection. Every call forwards to
`perdure.client.sdk` and raises the same errors.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from perdure.client import sdk
from perdure.client.batch_collection import FinishedGroup, collect
from perdure.client.rollout_listing import RolloutInfo
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.types import (
    EpisodeRef,
    GroupRequest,
    GroupResult,
    RolloutRequest,
    RunRequest,
    RunStatus,
    RunSummary,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perdure.episodes.episode import EpisodeSegments
    from perdure.episodes.training_batch import Batch

Result = TypeVar("Result")


class LoopThread:
    """A running event loop in a daemon thread, for callers without one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="perdure-client", daemon=True).start()

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def iterate(self, stream: AsyncGenerator[Result, None]) -> Iterator[Result]:
        """Yield what `stream` yields, and close it when the caller leaves."""
        try:
            while (one := self.do(_next(stream))) is not None:
                yield one
        finally:
            self.do(stream.aclose())


class Perdure:
    """See `perdure.client.sdk.Perdure`."""

    def __init__(self, loop: LoopThread, api: sdk.Perdure) -> None:
        self._loop, self._api = loop, api

    @classmethod
    def connect(cls, address: str | None = None, *, settings: Settings | None = None) -> "Perdure":
        loop = LoopThread()
        return cls(loop, loop.do(sdk.Perdure.connect(address, settings=settings)))

    def start_run(self, request: RunRequest) -> "RunHandle":
        return RunHandle(self._loop, self._loop.do(self._api.start_run(request)))

    def start_group(self, request: GroupRequest) -> "GroupHandle":
        return GroupHandle(self._loop, self._loop.do(self._api.start_group(request)))

    def start_rollout(self, request: RolloutRequest) -> "RolloutHandle":
        return RolloutHandle(self._loop, self._loop.do(self._api.start_rollout(request)))

    def run(self, run_id: str) -> "RunHandle":
        return RunHandle(self._loop, self._loop.do(self._api.run(run_id)))

    def rollout(self, workflow_id: str) -> "RolloutHandle":
        return RolloutHandle(self._loop, self._api.rollout(workflow_id))

    def collect(
        self, requests: Iterable[GroupRequest], *, trainable_tokens: int, **options: Any
    ) -> Iterator[FinishedGroup]:
        """See `perdure.client.batch_collection.collect`."""
        return self._loop.iterate(
            collect(self._api, requests, trainable_tokens=trainable_tokens, **options)
        )

    def batches(
        self, requests: Iterable[GroupRequest], *, groups_per_batch: int, **options: Any
    ) -> "Iterator[Batch[NDArray[Any]]]":
        """See `perdure.client.sdk.Perdure.batches`."""
        return self._loop.iterate(
            self._api.batches(requests, groups_per_batch=groups_per_batch, **options)
        )


class RunHandle:
    """See `perdure.client.sdk.RunHandle`."""

    def __init__(self, loop: LoopThread, handle: sdk.RunHandle) -> None:
        self._loop, self._handle = loop, handle

    def progress(self) -> RunStatus:
        return self._loop.do(self._handle.progress())

    def result(self) -> RunSummary:
        return self._loop.do(self._handle.result())

    def rollouts(self) -> list[RolloutInfo]:
        return self._loop.do(self._handle.rollouts())

    def pause(self) -> RunStatus:
        return self._loop.do(self._handle.pause())

    def resume(self) -> RunStatus:
        return self._loop.do(self._handle.resume())

    def resize(self, concurrency: int) -> RunStatus:
        return self._loop.do(self._handle.resize(concurrency))

    def cancel(self) -> list[str]:
        return self._loop.do(self._handle.cancel())


class GroupHandle:
    """See `perdure.client.sdk.GroupHandle`."""

    def __init__(self, loop: LoopThread, handle: sdk.GroupHandle) -> None:
        self._loop, self._handle = loop, handle

    def episodes(self, store: Store | None = None) -> "Iterator[EpisodeSegments]":
        """Yield episodes as they finish, with their tokens."""
        return self._loop.iterate(self._handle.episodes(store))

    def refs(self) -> Iterator[EpisodeRef]:
        """Yield references to episodes as they finish."""
        return self._loop.iterate(self._handle.refs())

    def result(self) -> GroupResult:
        return self._loop.do(self._handle.result())

    def describe_open_rollouts(self) -> str:
        return self._loop.do(self._handle.describe_open_rollouts())

    def cancel(self) -> None:
        self._loop.do(self._handle.cancel())


class RolloutHandle:
    """See `perdure.client.sdk.RolloutHandle`."""

    def __init__(self, loop: LoopThread, handle: sdk.RolloutHandle) -> None:
        self._loop, self._handle = loop, handle

    def result(self) -> EpisodeRef:
        return self._loop.do(self._handle.result())

    def state(self) -> dict[str, Any]:
        return self._loop.do(self._handle.state())

    def cancel(self) -> None:
        self._loop.do(self._handle.cancel())


async def _next(stream: AsyncIterator[Result]) -> Result | None:
    return await anext(stream, None)
