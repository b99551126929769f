"""Starts doubles of sandbox services as separate processes, for benchmarks that call them.

It starts them and cleans up; the doubles themselves are in `tests.doubles`.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness, stack_ports
from tests.doubles.service_double import Guests

SERVICES = ("e2b", "daytona")


@dataclass(frozen=True)
class Service:
    name: str
    url: str

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Point the SDKs of this process at the double instead of the service."""
        before = {name: os.environ.get(name) for name in self.variables()}
        os.environ |= self.variables()
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def variables(self) -> dict[str, str]:
        if self.name == "e2b":
            key = "e2b_" + "0" * 40
            return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": key}
        return {"DAYTONA_API_URL": f"{self.url}/api", "DAYTONA_API_KEY": "dtn_0"}


@asynccontextmanager
async def serving(name: str, state: Path) -> AsyncIterator[Service]:
    """Start the double; stop it and its sandboxes at the end. Raises an error if it does not answer."""
    service = Service(name, f"http://127.0.0.1:{stack_ports.free_port()}")
    argv = [sys.executable, "-m", f"tests.doubles.{name}_server", "--state", str(state)]
    process = subprocess.Popen(
        [*argv, "--port", service.url.rpartition(":")[2]], stdout=subprocess.DEVNULL
    )
    try:
        await part_readiness.wait_for_http(f"{service.url}/__control/rules")
        yield service
    finally:
        process.kill()
        process.wait()
        await _clear_away(Guests(Settings(home=state / "guests")))


async def _clear_away(guests: Guests) -> None:
    for left in await guests.list():
        await guests.kill(left.identity)
