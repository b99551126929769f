"""Doubles of sandbox services, each a process of its own, for benchmarks that call them.

Owns starting, counting and cleaning up; the doubles themselves are in `perdure.testing`. Run as a
program, it is such a double whose sandboxes share this host's network: a call then needs no relay.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perdure.sandboxes.base import Network, SandboxSpec
from perdure.sandboxes.host.box import Box
from perdure.settings.tree import Settings
from perdure.stack import ports, readiness
from perdure.testing.service_double import Double, Guests

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

    def forget_calls(self) -> None:
        self._control("DELETE", "rules")

    def calls(self) -> int:
        """Calls of both planes since `forget_calls`."""
        return len(self._control("GET", "log"))

    def _control(self, method: str, name: str) -> Any:
        request = urllib.request.Request(f"{self.url}/__control/{name}", method=method)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


@asynccontextmanager
async def serving(name: str, state: Path, *, networked: bool = False) -> AsyncIterator[Service]:
    """Start the double; stop it and its sandboxes at the end. Raises an error if it does not answer."""
    service = Service(name, f"http://127.0.0.1:{ports.free_port()}")
    program = ["benchmarks.doubles", name] if networked else [f"perdure.testing.{name}_server"]
    argv = [sys.executable, "-m", *program, "--state", str(state)]
    process = subprocess.Popen(
        [*argv, "--port", service.url.rpartition(":")[2]], stdout=subprocess.DEVNULL
    )
    try:
        await readiness.wait_for_http(f"{service.url}/__control/rules")
        yield service
    finally:
        process.kill()
        process.wait()
        await _clear_away(Guests(Settings(home=state / "guests")))


async def _clear_away(guests: Guests) -> None:
    for left in await guests.list():
        await guests.kill(left.identity)


class NetworkedGuests(Guests):
    """Its sandboxes share this host's network, although their spec may forbid it."""

    def command(self, spec: SandboxSpec, box: Box) -> list[str]:
        return super().command(replace(spec, network=Network.HOST), box)


async def _serve(kind: type[Double], state: Path, port: int) -> None:
    async with kind.serving(state, port) as (server, _):
        server.guests = NetworkedGuests(Settings(home=state / "guests"))
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doubles")
    parser.add_argument("service", choices=SERVICES)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    module = importlib.import_module(f"perdure.testing.{options.service}_server")
    kind = {"e2b": "E2BServer", "daytona": "DaytonaServer"}[options.service]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(getattr(module, kind), options.state, options.port))


if __name__ == "__main__":
    main()
