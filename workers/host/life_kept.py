"""Keeps the process that shows the host's signs of life running, from a worker."""

import asyncio
import subprocess
import sys

import structlog

from perdure.settings.tree import Settings
from perdure.stack import host_life

LOOK_S = 2.0

log = structlog.get_logger("perdure.life")


async def keep_alive(settings: Settings) -> None:
    """For a worker: start the process whenever this home has none.

    One that was started counts before it shows itself: on a busy host that takes a while.
    """
    started: subprocess.Popen[bytes] | None = None
    if host_life.end_of_another_server(settings):
        log.warning("ended the process that showed signs of life to another Temporal address")
    while True:
        try:
            if (started is None or started.poll() is not None) and not host_life.has_life(settings):
                started = await asyncio.to_thread(_start, settings)
                log.info("started the process that shows the host's signs of life", pid=started.pid)
        except OSError as error:  # a full disk, or no more processes allowed
            log.warning("nothing shows this host's signs of life", reason=str(error))
        await asyncio.sleep(LOOK_S)


def _start(settings: Settings) -> "subprocess.Popen[bytes]":
    logs = settings.home.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "life.log").open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.host.life"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
