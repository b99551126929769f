"""Temporal dev servers for tests, in memory: one shared by many tests, or one with its own
settings. They have the dynamic configuration of the server of `perdure up`.

Not the SDK's `WorkflowEnvironment.start_local`: that one gives a server five seconds to answer,
which a busy host may not have.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import IO

from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client import temporal_names
from perdure.client.temporal_client import DATA_CONVERTER
from perdure.stack import temporal_setup
from perdure.stack.stack_plan import DYNAMIC_CONFIG, temporal_binary
from perdure.stack.stack_ports import LOOPBACK
from tests import held_ports
from tests.stack.wait_until import until

DAY = Duration(seconds=86400)
NAMESPACES = 12
"""Of one server. An idle server reports the metrics of each namespace that it had each second: with
40 namespaces, this and its other upkeep take a tenth of a core, with 10 a hundredth."""


@dataclass(frozen=True)
class Server:
    """A running server. Each namespace has its own workflows, queues, schedules and attributes."""

    address: str
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]

    async def client(self, namespace: str = "default", identity: str | None = None) -> Client:
        """Connect, and wait until the server answers."""

        async def connect() -> Client | None:
            if self.process.poll() is not None:
                self.log.seek(0)
                end = self.log.read().decode(errors="replace")[-2000:]
                raise AssertionError(f"the server ended: {end}")
            try:
                return await Client.connect(
                    self.address,
                    namespace=namespace,
                    data_converter=DATA_CONVERTER,
                    identity=identity,
                )
            except (RuntimeError, RPCError):  # nothing listens yet
                return None

        client: Client = await until(connect, "the server answers")
        return client

    async def client_of_new(self, namespace: str) -> Client:
        """Create a namespace with Perdure's search attributes, and connect to it."""
        every = await self.client()
        await every.workflow_service.register_namespace(
            RegisterNamespaceRequest(namespace=namespace, workflow_execution_retention_period=DAY)
        )
        client = await self.client(namespace)
        await temporal_setup.register_search_attributes(client)
        return client


class SharedServer:
    """The server of many tests: after `NAMESPACES` of them, a new one."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._server: Server | None = None
        self._namespaces = 0

    async def client_of_new(self, namespace: str) -> Client:
        """Create a namespace, and connect to it. Connections to earlier ones may break."""
        if self._server is None or self._namespaces == NAMESPACES:
            self.stop()
            self._server = self._running.enter_context(running())
            self._namespaces = 0
        self._namespaces += 1
        return await self._server.client_of_new(namespace)

    def stop(self) -> None:
        self._running.close()


@contextmanager
def running(*arguments: str) -> Iterator[Server]:
    """A server until the end of the context. `arguments`: more command-line arguments."""
    with held_ports.held(1) as (port,), tempfile.TemporaryFile() as log:
        process = spawn(port, log, *arguments)
        try:
            yield Server(f"{LOOPBACK}:{port}", process, log)
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def serving(*arguments: str, identity: str | None = None) -> AsyncIterator[Client]:
    """A client of a server that only one test uses."""
    with running(*arguments) as server:
        yield await server.client(identity=identity)


def spawn(port: int, log: IO[bytes], *arguments: str) -> "subprocess.Popen[bytes]":
    command = [temporal_binary(), "server", "start-dev", "--headless", "--log-level", "error"]
    command += ["--ip", LOOPBACK, "--port", str(port)]
    for value in (*DYNAMIC_CONFIG, "frontend.enableServerVersionCheck=false"):
        command += ["--dynamic-config-value", value]
    for name, kind in temporal_names.SEARCH_ATTRIBUTES.items():
        command += ["--search-attribute", f"{name}={kind}"]
    if setpriv := shutil.which("setpriv"):  # it dies with the test's process
        command = [setpriv, "--pdeathsig", "KILL", *command]
    return subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={k: v for k, v in os.environ.items() if not k.startswith("TEMPORAL_")},
        start_new_session=True,
    )
