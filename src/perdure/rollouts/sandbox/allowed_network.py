"""The proxy of a sandbox whose phase lists hosts, and the record of what it refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from perdure.errors import NotFound, PerdureError
from perdure.rollouts.attempt_job import Job
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import Network, Sandbox
from perdure.sandboxes.host.allow_list import AllowList
from perdure.sandboxes.host.forward_proxy import UnreachedHosts, forward_proxy
from perdure.sandboxes.host.host_addresses import Place
from perdure.storage import stored_json
from perdure.types import NetworkRecord, PhaseName, RefusedHost

RECORD_S = 1.0
"""Seconds between two looks for new refusals. A killed worker loses those since its last look."""


@asynccontextmanager
async def allowed_network(
    job: Job, phase: PhaseName, sandbox: Sandbox
) -> AsyncIterator[UnreachedHosts]:
    """Serve the sandbox's proxy while the context is open, and store what it refused."""
    placement = job.placement(phase)
    if placement.network is not Network.LISTED or sandbox.proxy_socket is None:
        yield UnreachedHosts()
        return
    hosts = AllowList.of(placement.allowed_hosts, f"phases.{phase}.network")
    key = job.key(record_name(sandbox.identity))
    record = _Record(job, key, await _earlier(job, key))
    async with forward_proxy(sandbox.proxy_socket, hosts, record.asked) as asked:
        writing = asyncio.create_task(record.keep())
        try:
            yield asked
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            with contextlib.suppress(PerdureError):  # evidence is optional
                await asyncio.shield(record.write())


def record_name(identity: str) -> str:
    """Example: `p-3f1c...-grade-1-2` -> `network-grade-1-2.json`."""
    return f"network-{identity.split('-', 2)[2]}.json"


def check_row_hosts(job: Job, phase: PhaseName) -> None:
    """Raises: ConfigurationError if the row lists hosts that this worker's settings do not permit."""
    permitted = job.services.settings.sandbox.row_hosts
    phase_specs.check_row_hosts(job.placement(phase), phase, job.request.instance, permitted)


class _Record:
    """Writes the counts to the store when they have changed."""

    def __init__(self, job: Job, key: str, asked: UnreachedHosts) -> None:
        self.asked = asked
        self._job, self._key = job, key
        self._written = self._now()

    def _now(self) -> NetworkRecord:
        refused = tuple(
            RefusedHost(host=place.host, port=place.port, reason=reason, count=count)
            for (place, reason), count in self.asked.counts.items()
        )
        return NetworkRecord(refused=refused, more=self.asked.more)

    async def keep(self) -> None:
        """Write whenever there is a new place or reason. Their number is bounded."""
        while True:
            await asyncio.sleep(RECORD_S)
            if len(self.asked.counts) > len(self._written.refused):
                with contextlib.suppress(PerdureError):
                    await self.write()

    async def write(self) -> None:
        if (now := self._now()) != self._written:
            await self._job.services.store.put(self._key, stored_json.encode(now))
            self._written = now


async def _earlier(job: Job, key: str) -> UnreachedHosts:
    """What an earlier try of the stage recorded."""
    try:
        found = stored_json.decode(key, (await job.services.store.get(key)).data, NetworkRecord)
    except (NotFound, stored_json.Damaged):
        return UnreachedHosts()
    counts = {(Place(one.host, one.port), one.reason): one.count for one in found.refused}
    return UnreachedHosts(counts, found.more)
