"""`python -m workers.host.host_heartbeat`: sends the host's heartbeats to Temporal, independently of its
workers.

There is one process per home. Any worker that boots or watches agents starts it, and it exits by
itself. Its heartbeats keep the host's term. If the term is lost, it kills the host's sandboxes
before the next term begins. README.md draws the sequence.
"""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic

import structlog
from temporalio.api.common.v1 import Payloads
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    PollActivityTaskQueueRequest,
    PollActivityTaskQueueResponse,
    RecordActivityTaskHeartbeatRequest,
    RespondActivityTaskCompletedRequest,
)
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from perdure import retry
from perdure.client import temporal_names
from perdure.client.temporal_client import connect
from perdure.errors import ConfigurationError, PerdureError
from perdure.gateway.gateway_addresses import Gateways
from perdure.home_folder import host_of, load_secrets
from perdure.rollouts.activity_messages import Term
from perdure.rollouts.sandbox.host_term import HostTerm, first_term
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers, host_life
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.telemetry import configure_logging
from workers.host import gateway_socket_proxy, worker_deaths

BEATS = 16
"""Heartbeats per `host.silent_s`, after which a silent host is lost."""
POLL_S = 21.0
"""Seconds of a poll. The server logs a warning for polls shorter than 20 s."""
ANSWER_S = 5.0
"""Seconds to wait for an answer of the server before a reconnect."""
LOOK_S = 2.0
"""Seconds between two checks for workers and sandboxes."""
PAUSE_S = 1.0
AWAY = (
    *(RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED),
    *(RPCStatusCode.CANCELLED, RPCStatusCode.RESOURCE_EXHAUSTED),
)
"""With these statuses the server is unavailable, and the heartbeat is sent again. Any other status
is retried once, because the connection may have broken. The second time it is a refusal."""
ABSENT_S = 600.0
"""Seconds without a worker, while the server answers, after which the host leaves and its rollouts
move."""

log = structlog.get_logger("perdure.life")


@dataclass
class HostHeartbeat:
    """The heartbeats and terms of one host."""

    settings: Settings
    client: Client
    store: Store
    host: str
    term: HostTerm
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    answered_at: float = field(default_factory=monotonic)
    """When the server answered last."""
    reached_at: float = field(default_factory=monotonic)
    """When the server or the store answered last."""

    async def run(self) -> None:
        """Runs until the host leaves."""
        minding = asyncio.create_task(self._mind())
        leaving = asyncio.create_task(self.leaving.wait())
        serving = asyncio.create_task(self._serve_for_ever())
        try:
            await asyncio.wait({leaving, serving, minding}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (minding, leaving):
                task.cancel()
        if serving.done() or minding.done():
            (serving if serving.done() else minding).result()
        with contextlib.suppress(TimeoutError, RPCError):
            async with asyncio.timeout(ANSWER_S):
                await serving  # completes serve_term
        serving.cancel()

    async def _serve_for_ever(self) -> None:
        await self._go_on()
        while not self.leaving.is_set():
            try:
                task = await self._next_task()
            except (RPCError, PerdureError, TimeoutError):
                await self._cut_off()
                continue
            if not task.task_token:
                continue
            [term] = await self.client.data_converter.decode(list(task.input.payloads), [Term])
            if term.number < self.term.number:
                with contextlib.suppress(RPCError):  # if this fails, the workflow asks again
                    await self._complete(task.task_token, self.term.number)
            elif task.activity_type.name == "begin_anew":
                await self._begin(term.number)
                with contextlib.suppress(RPCError):
                    await self._complete(task.task_token)
            else:
                await self._serve(term, task.task_token)

    async def _next_task(self) -> PollActivityTaskQueueResponse:
        """The next activity of the host's workflow; empty if the poll got none."""
        over = await first_term(self.store, self.host)
        if over > self.term.number:
            await self._begin(over)
        await self.client.start_workflow(
            temporal_names.HOST,
            Term(
                host=self.host,
                number=self.term.number,
                silent_s=self.settings.host.silent_s,
            ),
            id=temporal_names.host_id(self.host),
            task_queue=temporal_names.WORKFLOWS_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary=f"whether {self.host} lives",
            rpc_timeout=timedelta(seconds=ANSWER_S),
        )
        self.answered_at = self.reached_at = monotonic()
        request = PollActivityTaskQueueRequest(
            namespace=self.client.namespace,
            task_queue=TaskQueue(name=temporal_names.life_queue(self.host)),
            identity=f"{os.getpid()}@{self.host}",
        )
        try:
            return await self.client.workflow_service.poll_activity_task_queue(
                request, timeout=timedelta(seconds=POLL_S)
            )
        except RPCError as error:
            if error.status in (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED):
                return PollActivityTaskQueueResponse()
            raise

    async def _go_on(self) -> None:
        """Continue the heartbeats of the previous process.

        Otherwise the server would wait until that process has been silent for too long."""
        with contextlib.suppress(OSError, ValueError):
            host, number, token = self._kept.read_text().split()
            if host == self.host and int(number) == self.term.number:
                term = Term(
                    host=self.host, number=int(number), silent_s=self.settings.host.silent_s
                )
                await self._serve(term, bytes.fromhex(token))

    @property
    def _kept(self) -> Path:
        """File with the host, the number of its term, and the task token of its heartbeats."""
        return self.settings.home.absolute() / "run" / "term.token"

    async def _serve(self, term: Term, token: bytes) -> None:
        """Send heartbeats until the server refuses them or the host leaves."""
        if term.number != self.term.number:
            await self._begin(term.number)
        with contextlib.suppress(OSError):  # a full disk
            self._kept.write_text(f"{self.host} {term.number} {token.hex()}\n")
        log.info("the term of this host is open", term=term.number)
        refused = False
        while not self.leaving.is_set():
            try:
                await self._beat(token)
                self.term.confirm()
                self.answered_at = self.reached_at = monotonic()
                refused = False
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return  # too late: the workflow asks again, or the term is lost
                if error.status not in AWAY:
                    if refused:
                        return  # the server does not know this token, as after a restored backup
                    refused = True  # perhaps the connection broke: try again on a new one
                await self._cut_off()
                if self.term.number != term.number:
                    return
            with contextlib.suppress(TimeoutError):
                pause = self.settings.host.silent_s / BEATS
                async with asyncio.timeout(pause):
                    await self.leaving.wait()
        self.term.lapse()
        await self._complete(token)
        self._kept.unlink(missing_ok=True)

    async def _beat(self, token: bytes) -> None:
        request = RecordActivityTaskHeartbeatRequest(
            namespace=self.client.namespace, task_token=token
        )
        await self.client.workflow_service.record_activity_task_heartbeat(
            request, timeout=timedelta(seconds=ANSWER_S)
        )

    async def _complete(self, token: bytes, number: int | None = None) -> None:
        """`number`: this host's term number, if the server asked for an older term."""
        result = await self.client.data_converter.encode([number])
        request = RespondActivityTaskCompletedRequest(
            namespace=self.client.namespace, task_token=token, result=Payloads(payloads=result)
        )
        await self.client.workflow_service.respond_activity_task_completed(
            request, timeout=timedelta(seconds=ANSWER_S)
        )

    async def _begin(self, number: int) -> None:
        """Kill the sandboxes of the previous term, then begin the new one."""
        await self._end_sandboxes(f"term {number} begins")
        self.term.begin(number)

    async def _end_sandboxes(self, why: str) -> None:
        killed = await home_providers.kill_all(self.settings, log.warning)
        log.warning("killed the sandboxes of this host", killed=killed, why=why)

    async def _cut_off(self) -> None:
        """If the server does not answer, connect again and ask the store whether the term is over.

        An unavailable server ends no term, so its silence alone kills no sandbox. A host that has
        reached neither server nor store for `sandbox.ttl_s` kills its sandboxes.
        """
        with contextlib.suppress(PerdureError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                self.client = await connect(settings=self.settings)
                return
        with contextlib.suppress(PerdureError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                over = await first_term(self.store, self.host)
            self.reached_at = monotonic()
            if over > self.term.number:
                await self._begin(over)
        if monotonic() - self.reached_at > self.settings.sandbox.ttl_s:
            await self._end_sandboxes("neither the server nor the store answers")
        await asyncio.sleep(PAUSE_S)

    async def _report_deaths(self) -> None:
        with contextlib.suppress(RPCError):  # the server is unavailable: the next look reports them
            if reported := await worker_deaths.report_deaths(self.client, self.settings):
                log.info("reported the activities of a dead worker", activities=reported)

    async def _mind(self) -> None:
        """Return when the host should leave, and set `leaving`."""
        seen = monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            await self._report_deaths()
            if not self.settings.home.is_dir():
                self.leaving.set()
                return
            if host_life.has_worker(self.settings):
                seen = monotonic()
                continue
            absent = monotonic() - seen
            if absent > 2 * LOOK_S and not await home_providers.has_live_sandboxes(self.settings):
                self.leaving.set()
                return
            heard = monotonic() - self.answered_at < self.settings.host.silent_s
            if absent > ABSENT_S and heard:
                await self._end_sandboxes("no worker has come back")
                self.leaving.set()
                return


async def run_host_heartbeat(settings: Settings) -> None:
    """Raises: ConfigurationError if no Temporal server answers at the configured address."""
    with host_life.hold_heartbeat_lock(settings) as alone:
        if not alone:
            return
        term = HostTerm(settings.home.absolute() / "run" / "term", settings.host.silent_s)
        client, store = await _connected(settings), open_store(settings)
        life = HostHeartbeat(settings, client, store, host_of(settings), term)
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, life.leaving.set)
        async with gateway_socket_proxy.opened(
            settings, Gateways(settings, store, load_secrets(settings))
        ):
            await life.run()


async def _connected(settings: Settings) -> Client:
    return await retry.retry_call(
        lambda: connect(settings=settings),
        ConfigurationError,
        pauses=(PAUSE_S, PAUSE_S),
        passes=lambda _: host_life.has_worker(settings),
    )


def main() -> int:
    settings = load_settings()
    configure_logging("life")
    with contextlib.suppress(OSError):  # only root may raise its priority
        os.nice(-5)
    try:
        asyncio.run(run_host_heartbeat(settings))
    except PerdureError as error:
        log.error("cannot send heartbeats for this host", reason=str(error))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
