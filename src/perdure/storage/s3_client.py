"""Makes S3 calls in threads, with a time limit and with the current credentials.

boto3 reads the environment and the shared files only once. After a refusal, this module reads them
again and repeats the call if they have changed.

A stage makes about ten calls. If each failed call failed the stage, a store that fails a fifth of
its calls would stop all work. So a call is retried here for about a second; Temporal handles longer
outages.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import boto3
import botocore.exceptions as sdk
from botocore.config import Config

from perdure.errors import ConfigurationError, StoreUnavailable
from perdure.storage.s3_errors import SDK_ERRORS, Place, refuses_keys

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")

CONNECTIONS = 64
CONNECT_S = 5.0
SILENT_S = 20.0
"""Seconds without a byte after which a connection is closed."""
CALL_S = 40.0
"""Seconds for a whole call, so that a write and its read-back fit into one try of an activity."""
SLOWEST = 1 << 20
"""Bytes per second by which the size of an object extends its time limit."""
LOOK_EVERY_S = 1.0
"""Seconds between two reads of the credentials, because many calls are refused at the same time."""


PAUSES_S = (0.1, 0.3, 0.9)
"""Pauses before each retry of a call, plus up to half of that at random."""


async def tries(limit: "Limit") -> AsyncIterator[bool]:
    """Yield once per try, with a pause before each retry. Yields True for the last try."""
    for pause in PAUSES_S:
        if limit.is_too_late_to_retry():
            break
        yield False
        await asyncio.sleep(pause * random.uniform(1.0, 1.5))
    yield True


class Limit:
    """When a call counts as stalled. A read learns its object's size from the answer's headers."""

    def __init__(self, size: int = 0) -> None:
        self._end = time.monotonic() + CALL_S
        self._half = self._end - CALL_S / 2
        self.allow(size)

    def allow(self, size: int) -> None:
        self._end += size / SLOWEST

    def left(self) -> float:
        return self._end - time.monotonic()

    def is_too_late_to_retry(self) -> bool:
        """Whether it is too late for another try."""
        return time.monotonic() > self._half


class _Connection(NamedTuple):
    client: "S3Client"
    keys: Any
    """The credentials of the client; None if there are none."""


class S3Calls:
    """`worked` becomes true when the server has carried out a call."""

    def __init__(self, place: Place) -> None:
        """Makes no call. Raises: ConfigurationError if the endpoint is not a URL."""
        self.worked = False
        self._place = place
        self._lock = threading.Lock()
        self._looked = 0.0
        self._stuck: set[Future[Any]] = set()
        self._threads = _threads()
        try:
            self._connection: _Connection | None = self._connect()
        except sdk.BotoCoreError:  # AWS files may be being replaced; the first call reports it
            self._connection = None
        except ValueError as error:
            raise ConfigurationError(
                f"store {place.url!r}: {error}; correct PERDURE_S3_ENDPOINT_URL"
            ) from error

    async def repeat(
        self, doing: str, ask: Callable[["S3Client"], T], limit: Limit | None = None
    ) -> T:
        """Make a call that the server may carry out twice. Raises: like `once`."""
        limit = limit or Limit()
        async for is_last in tries(limit):
            try:
                return await self.once(doing, ask, limit)
            except StoreUnavailable:
                if is_last:
                    raise
        raise AssertionError("the last try returns or raises")

    async def once(self, doing: str, ask: Callable[["S3Client"], T], limit: Limit) -> T:
        """Raises: NotFound, PreconditionFailed, StoreUnavailable, ConfigurationError."""
        try:
            answer = await self._in_time(partial(self._ask, ask), limit)
        except SDK_ERRORS as error:
            failure = self._place.failure(doing, error)
            self.worked |= not isinstance(failure, StoreUnavailable | ConfigurationError)
            raise failure from error
        except _Stalled:
            raise StoreUnavailable(
                f"{self._place.url}: cannot {doing}: no complete answer in time",
                fix=self._place.unreachable(),
            ) from None
        self.worked = True
        return answer

    def _ask(self, ask: Callable[["S3Client"], T]) -> T:
        used = self._connection or self._renewed(None)
        try:
            return ask(used.client)
        except SDK_ERRORS as error:
            if not refuses_keys(error):
                raise
            renewed = self._renewed(used)
            if renewed is used:
                raise
            return ask(renewed.client)

    def _renewed(self, used: _Connection | None) -> _Connection:
        """A connection with credentials other than those of `used`, or `used` if there are none."""
        with self._lock:
            if self._connection is not None and self._connection is not used:
                return self._connection
            if used is not None and time.monotonic() - self._looked < LOOK_EVERY_S:
                return used
            self._looked = time.monotonic()
            try:
                found = self._connect()
            except sdk.BotoCoreError:
                if used is None:
                    raise
                return used
            if used is not None and found.keys == used.keys:
                return used
            self._connection = found
            return found

    def _connect(self) -> _Connection:
        session = boto3.session.Session()  # the default session would keep its first credentials
        endpoint = self._place.endpoint
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=CONNECTIONS,
            connect_timeout=CONNECT_S,
            read_timeout=SILENT_S,
            s3={"addressing_style": "path" if endpoint else "auto"},
        )
        client = session.client("s3", endpoint_url=endpoint, config=config)
        keys = session.get_credentials()
        return _Connection(client, keys.get_frozen_credentials() if keys is not None else None)

    async def _in_time(self, call: Callable[[], T], limit: Limit) -> T:
        future = self._threads.submit(call)
        answer = asyncio.wrap_future(future)
        try:
            while not answer.done():
                left = limit.left()
                if left <= 0:
                    self._give_up(future)
                    raise _Stalled
                await asyncio.wait({answer}, timeout=left)
            return answer.result()
        finally:
            answer.cancel()

    def _give_up(self, future: "Future[Any]") -> None:
        """Abandon a call. A thread cannot be interrupted, so replace all threads once all are
        stuck."""
        if future.cancel():
            return
        self._stuck.add(future)
        future.add_done_callback(self._stuck.discard)
        if len(self._stuck) >= CONNECTIONS:
            self._stuck = set()
            self._threads = _threads()


class _Stalled(Exception):
    """No complete answer in time."""


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="s3")
