"""Samples the run while it is open and after it has ended."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.client import Client

from benchmarks.perdure_stack import PERDURE, ROOT, Stack
from perdure.client import search_attribute_keys
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.storage import store_keys

LIMIT_S = 120.0
FETCHED = 40
"""How many rollouts' histories are read completely, for their largest payload."""
PAGE = 1024


@dataclass(frozen=True)
class Sample:
    """One sample of the running run."""

    at_s: float
    done: int
    """Ended rollouts; -1 while the server is away."""
    rss: dict[str, float]
    """Memory of each process of the stack in MB; `client` is the client's."""
    server_mb: float
    """Size of Temporal's database on disk."""
    sandboxes: int
    """Running sandboxes."""
    status_s: float
    """Seconds that `perdure status RUN` took."""


@dataclass(frozen=True)
class History:
    kind: str
    events: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Ended:
    """Measurements after the end of the run."""

    histories: dict[str, tuple[int, int, int]]
    """By workflow type: count, most events and most bytes of one history."""
    largest_payload: int
    objects: int
    stored: int
    """Bytes of the run in the store."""
    server_mb: float
    sandboxes: int


@dataclass
class Watch:
    stack: Stack
    run_id: str
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)

    def look(self, client: "subprocess.Popen[bytes]") -> Sample:
        state = self.stack.state()
        pids = {name: child.pid for name, child in state.children.items()}
        pids |= {"supervisor": state.pid, "client": client.pid}
        began = time.monotonic()
        shown = self._status(self.run_id)
        took = time.monotonic() - began
        sample = Sample(
            at_s=began - self.began,
            done=self._done() if shown is not None else -1,
            rss={name: mb for name, pid in pids.items() if (mb := rss_mb(pid))},
            server_mb=self._server_mb(),
            sandboxes=self._sandboxes(),
            status_s=took,
        )
        self.samples.append(sample)
        return sample

    def ended(self) -> Ended:
        found = asyncio.run(self._histories())
        store = self.stack.home.folder / "store" / store_keys.rollouts(self.run_id)
        sizes = [path.stat().st_size for path in store.rglob("*") if path.is_file()]
        kinds: dict[str, tuple[int, int, int]] = {}
        for one in found[0]:
            number, events, size = kinds.get(one.kind, (0, 0, 0))
            kinds[one.kind] = (number + 1, max(events, one.events), max(size, one.size))
        return Ended(kinds, found[1], len(sizes), sum(sizes), self._server_mb(), self._sandboxes())

    def _done(self) -> int:
        document = json.loads(self._status("--json") or "{}")
        for run in document.get("runs", ()):
            if run["run_id"] == self.run_id:
                return int(run["done"])
        return -1

    def _status(self, *words: str) -> str | None:
        """What `perdure status` prints; None if it fails."""
        try:
            answer = subprocess.run(
                [*PERDURE, "status", *words],
                env=self.stack.home.environment(),
                cwd=ROOT,
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return answer.stdout.decode() if answer.returncode == 0 else None

    def _server_mb(self) -> float:
        return (
            sum(path.stat().st_size for path in self.stack.home.folder.glob("temporal.db*")) / 1e6
        )

    def _sandboxes(self) -> int:
        return sum(
            SandboxFolder(path).alive for path in self.stack.home.folder.glob("sandboxes/*/p-*")
        )

    async def _histories(self) -> tuple[list[History], int]:
        """All histories of the run, and the largest payload among some of them."""
        state = self.stack.state()
        client = await Client.connect(state.temporal_address, namespace=state.namespace)
        query = f"{search_attribute_keys.RUN.name} = '{self.run_id}'"
        found, largest, fetched = [], 0, 0
        async for one in client.list_workflows(query, page_size=PAGE):
            info = one.raw_info
            found.append(History(one.workflow_type, info.history_length, info.history_size_bytes))
            is_rollout = one.id.startswith("rollout/")
            fetched += is_rollout
            if is_rollout and fetched > FETCHED:
                continue
            history = await client.get_workflow_handle(one.id, run_id=one.run_id).fetch_history()
            sizes = [p.ByteSize() for event in history.events for p in payloads(event)]
            largest = max([largest, *sizes])
        return found, largest


def payloads(message: Any) -> Iterator[Payload]:
    """All payloads in a protobuf message, at any depth."""
    if isinstance(message, Payload):
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        repeated = not hasattr(value, "ListFields")
        values = value.values() if hasattr(value, "values") else value if repeated else [value]
        for each in values:
            if hasattr(each, "ListFields"):
                yield from payloads(each)


def rss_mb(pid: int) -> float:
    """Resident memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    kilobytes = next((line.split()[1] for line in lines if line.startswith("VmRSS")), "0")
    return int(kilobytes) / 1000
