"""A Temporal server of one test's own, in memory, for as long as the test lasts.

Not the SDK's `WorkflowEnvironment.start_local`: that one gives a server five seconds to answer,
which a busy host may not have.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from temporalio.client import Client
from temporalio.service import RPCError

from perdure.cli.plan import temporal_binary
from perdure.cli.ports import LOOPBACK
from perdure.client.connection import DATA_CONVERTER
from perdure.client.search_attributes import TYPE_NAMES
from tests import held_ports
from tests.stack import until


@asynccontextmanager
async def serving(*arguments: str, identity: str | None = None) -> AsyncIterator[Client]:
    """A client of it. `arguments`: more of its command line."""
    with held_ports.held(1) as (port,), tempfile.TemporaryFile() as log:
        server = _spawn(port, log, *arguments)
        try:
            yield await _connected(f"{LOOPBACK}:{port}", server, log, identity)
        finally:
            server.kill()
            server.wait()


def _spawn(port: int, log: IO[bytes], *arguments: str) -> "subprocess.Popen[bytes]":
    command = [temporal_binary(), "server", "start-dev", "--headless", "--log-level", "error"]
    command += ["--ip", LOOPBACK, "--port", str(port)]
    command += ["--dynamic-config-value", "frontend.enableServerVersionCheck=false"]
    for name, kind in TYPE_NAMES.items():
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


async def _connected(
    address: str, server: "subprocess.Popen[bytes]", log: IO[bytes], identity: str | None
) -> Client:
    async def connect() -> Client | None:
        if server.poll() is not None:
            log.seek(0)
            raise AssertionError(f"the server ended: {log.read().decode(errors='replace')[-2000:]}")
        try:
            return await Client.connect(address, data_converter=DATA_CONVERTER, identity=identity)
        except (RuntimeError, RPCError):  # nobody listens yet
            return None

    client: Client = await until(connect, "the server answers")
    return client
