"""Reports the activities of a dead worker process to Temporal, so that other workers continue them at
once.

Without a report, Temporal waits for their heartbeats to time out: half a minute, or 85 s for an agent.
Each worker has a folder in `<home>/run/activities`. It holds a lock, which the kernel releases when the
process dies, and the task token of each running activity. The host's heartbeat process looks for
folders without an owner.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from temporalio import activity
from temporalio.api.failure.v1 import Failure
from temporalio.api.workflowservice.v1 import RespondActivityTaskFailedRequest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
)

from perdure.rollouts.activity_messages import WORKER_EVICTED
from perdure.settings.settings_tree import Settings

LOCK = "lock"
ANSWER = timedelta(seconds=5)
"""Limit of one request to the server."""
OVER = (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT)
"""With these statuses the activity has ended, or belongs to another server."""


@contextlib.contextmanager
def kept_tokens(settings: Settings) -> Iterator[Interceptor]:
    """An interceptor that keeps the tokens of this process's activities in the home."""
    parent = _parent(settings)
    parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    with (new / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = new.rename(parent / f"{os.getpid()}-{uuid4().hex[:8]}")  # now others see it
        try:
            yield TokenKeeping(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class TokenKeeping(Interceptor):
    folder: Path

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _TokenKept(next, self.folder)


class _TokenKept(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, folder: Path) -> None:
        super().__init__(next)
        self._folder = folder

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        file = self._folder / uuid4().hex
        with contextlib.suppress(OSError):  # a full disk: the heartbeat timeout tells of a death
            file.write_bytes(activity.info().task_token)
        try:
            return await super().execute_activity(input)
        finally:
            file.unlink(missing_ok=True)


async def report_deaths(client: Client, settings: Settings) -> int:
    """Fail the activities of this home's dead workers, so that Temporal retries them. Returns how many.

    Raises: RPCError if the server is unavailable; the next call reports what remains.
    """
    reported = 0
    for folder in _parent(settings).glob("[0-9]*"):
        with _owned(folder) as is_dead:
            if is_dead:
                for file in [one for one in folder.iterdir() if one.name != LOCK]:
                    await _report(client, file.read_bytes())
                    file.unlink()
                    reported += 1
                shutil.rmtree(folder)
    return reported


def _parent(settings: Settings) -> Path:
    return settings.home.absolute() / "run" / "activities"


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[bool]:
    """Own the folder, if its worker is dead."""
    with contextlib.ExitStack() as opened:
        try:
            lock = opened.enter_context((folder / LOCK).open("rb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):  # it ended properly just now, or it lives
            yield False
            return
        yield True


async def _report(client: Client, token: bytes) -> None:
    failure = Failure()
    died = ApplicationError(
        "the worker process died; another worker continues",
        type=WORKER_EVICTED,
        category=ApplicationErrorCategory.BENIGN,
    )
    await client.data_converter.encode_failure(died, failure)
    request = RespondActivityTaskFailedRequest(
        namespace=client.namespace, task_token=token, failure=failure
    )
    try:
        await client.workflow_service.respond_activity_task_failed(request, timeout=ANSWER)
    except RPCError as error:
        if error.status not in OVER:
            raise
