"""A host whose Temporal server was restored from a backup, with the real heartbeat process."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from activities.activity_decorator import GRACE
from activities.lost_host_activities import LostHost, StandIn
from perdure.client import temporal_names
from perdure.home_folder import host_of
from perdure.rollouts.activity_messages import HostState, SweepRequest, Term
from perdure.rollouts.sandbox.host_term import HostTerm
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.sandbox_reaper import SweepReport
from perdure.settings.settings_tree import Settings
from perdure.stack import host_life
from tests import held_ports
from tests.checkout_paths import ROOT
from tests.stack.wait_until import until
from tests.workflows import dev_server
from workers.workflow_worker import checking_runner, workflow_worker

SILENT_S = 6.0
KEEP_ALIVE = """
import asyncio
from perdure.settings.settings_loader import load_settings
from perdure.stack.host_life import keep_alive
asyncio.run(keep_alive(load_settings()))
"""
"""What a worker does for its host's heartbeats."""


@dataclass
class Host:
    """A home, and the database of a server that a test replaces while it is down."""

    settings: Settings
    database: Path
    port: int

    @property
    def name(self) -> str:
        return host_of(self.settings)

    @property
    def term(self) -> HostTerm:
        return HostTerm(self.settings.home / "run" / "term", SILENT_S)

    @property
    def backup(self) -> Path:
        return self.database.with_suffix(".backup")

    def back_up(self) -> None:
        with (
            closing(sqlite3.connect(self.database)) as database,
            closing(sqlite3.connect(self.backup)) as backup,
        ):
            database.backup(backup)

    def restore(self) -> None:
        for suffix in ("-wal", "-shm"):
            Path(f"{self.database}{suffix}").unlink(missing_ok=True)
        shutil.copy(self.backup, self.database)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Client]:
        """A server on the database, with a worker of the real workflows and one that stands in."""
        with tempfile.TemporaryFile() as log:
            process = dev_server.spawn(self.port, log, "--db-filename", str(self.database))
            try:
                server = dev_server.Server(f"127.0.0.1:{self.port}", process, log)
                client = await server.client()
                stand_in = StandIn(Services(self.settings)).stand_in
                async with AsyncExitStack() as workers:
                    for worker in (
                        workflow_worker(client, checking_runner()),
                        Worker(
                            client,
                            task_queue=temporal_names.LOST_HOSTS_QUEUE,
                            activities=[stand_in],
                            graceful_shutdown_timeout=GRACE,
                        ),
                    ):
                        await workers.enter_async_context(worker)
                    yield client
            finally:
                process.kill()
                process.wait()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """The host's real process. At the end it is killed, without leaving first."""
        with (self.settings.home / "logs" / "life.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "workers.host.host_heartbeat"],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
            try:
                yield
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()

    async def serves(self, client: Client, number: int | None = None) -> None:
        """Wait until both sides agree on the term, with a new heartbeat. `number`: if None, any
        term."""
        began = monotonic()

        async def agreed() -> bool:
            path = self.settings.home / "run" / "term"
            if not path.exists() or path.stat().st_mtime < began:
                return False
            state = await self.state(client)
            return (
                not state.lost
                and state.number == self.term.number
                and number in (None, state.number)
            )

        await until(agreed, "the host serves")

    async def state(self, client: Client) -> HostState:
        handle = client.get_workflow_handle(temporal_names.host_id(self.name))
        state: HostState = await handle.query("state", result_type=HostState)
        return state

    async def is_asked_again(self, client: Client, times: int) -> None:
        """Wait until the server has noticed the silence this many times."""
        handle = client.get_workflow_handle(temporal_names.host_id(self.name))

        async def offered() -> bool:
            events = (await handle.fetch_history()).events
            silences = [e for e in events if e.HasField("activity_task_timed_out_event_attributes")]
            return len(silences) >= times

        await until(offered, "the silence is noticed")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with held_ports.held(1) as (port,):
        home = tmp_path / "home"
        (home / "logs").mkdir(parents=True)
        for name, value in {
            "PERDURE_HOME": str(home),
            "PERDURE_STORE": str(tmp_path / "store"),
            "PERDURE_HOST__SILENT_S": str(SILENT_S),
            "TEMPORAL_ADDRESS": f"127.0.0.1:{port}",
            "PERDURE_CONFIG": os.devnull,
        }.items():
            monkeypatch.setenv(name, value)
        settings = Settings(home=home, store=str(tmp_path / "store"))
        with host_life.hold_worker_lock(settings):
            yield Host(settings, tmp_path / "temporal.db", port)


@pytest.mark.longer
async def test_a_host_serves_after_a_restore_that_forgot_its_renewals(host: Host) -> None:
    """The server refuses the heartbeat token, which is newer than the backup."""
    async with host.served() as client:
        with host.alive():
            await host.serves(client)
            host.back_up()
        for times in (1, 2, 3):
            await host.is_asked_again(client, times)
            with host.alive():
                await host.serves(client)
    host.restore()
    async with host.served() as client:
        with host.alive():
            await host.serves(client)


@pytest.mark.longer
async def test_a_restored_server_learns_the_hosts_later_term(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was lost once after the backup: it continues in its own term, and kills no
    sandbox."""
    monkeypatch.setenv("PERDURE_HOST__SILENT_S", "30")
    async with host.served() as client:
        with host.alive():
            await host.serves(client)
            host.back_up()
        await until(lambda: _is_lost(host, client), "the host is lost")
        with host.alive():
            await host.serves(client)
            later, ended = host.term.number, _ended(host)
    host.restore()
    async with host.served() as client:
        with host.alive():
            await host.serves(client, later)

    assert (later > 0, _ended(host)) == (True, ended)


@pytest.mark.longer
async def test_a_process_of_the_old_address_is_replaced(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack was killed and started on other ports: the host serves its term there with its
    sandboxes."""
    monkeypatch.setenv("PERDURE_HOST__SILENT_S", "24")
    with host.alive(), held_ports.held(1) as (port,):
        async with host.served() as client:
            await host.serves(client)
        host.port = port
        monkeypatch.setenv("TEMPORAL_ADDRESS", f"127.0.0.1:{port}")
        worker = subprocess.Popen([sys.executable, "-c", KEEP_ALIVE], cwd=ROOT)
        try:
            async with host.served() as client:
                await host.serves(client, 0)
        finally:
            worker.kill()
            worker.wait()
            host_life.end(host.settings)

    assert _ended(host) == 0


async def _is_lost(host: Host, client: Client) -> bool:
    return (await host.state(client)).lost


def _ended(host: Host) -> int:
    """How often the host killed its sandboxes."""
    return (host.settings.home / "logs" / "life.log").read_text().count("killed the sandboxes")


@pytest.mark.longer
async def test_a_worker_of_the_lost_host_answers_for_it(host: Host) -> None:
    """On a single machine, the same worker answers for the lost host."""
    async with host.served() as client:
        lost = LostHost(client, Term(host=host.name, silent_s=SILENT_S))
        with host.alive():
            await host.serves(client)
        async with Worker(
            client, task_queue=temporal_names.host_queue(host.name), activities=[lost.run_agent]
        ):
            await until(lambda: _is_lost(host, client), "the host is lost")
            answered = await client.execute_activity(
                "sweep_sandboxes",
                SweepRequest(),
                id="sweep",
                task_queue=temporal_names.upkeep_queue(host.name),
                result_type=SweepReport,
                start_to_close_timeout=timedelta(minutes=1),
            )

    assert answered == SweepReport()
