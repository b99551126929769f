"""Keeps as many replicas as are wanted: places, watches, registers, drains and replaces them.

One detached actor per home. Its plan and status lie in the store, its replicas are found again by
name: it may die at any moment, and so may every node.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import structlog

from perdure.engines.plan import EnginePlan
from perdure.engines.registration import (
    PoolStatus,
    Registration,
    ReplicaStatus,
    lacks,
    read_plan,
    read_status,
    write_plan,
    write_status,
)
from perdure.engines.roster import Roster, StoredRoster
from perdure.engines.state import STABLE_S, EngineRecord, EngineState, backoff_s, name_of
from perdure.engines.weights.publishing import Published, published_key, read_published
from perdure.engines.weights.update import NOTICE_S
from perdure.errors import PerdureError
from perdure.serving import placement
from perdure.serving.commands import NAMESPACE
from perdure.serving.placement import Placed
from perdure.serving.replica import Phase, ReplicaReport
from perdure.settings.tree import Settings
from perdure.storage.base import open_store

POLL_S = 0.5
BEAT_S = 15.0
"""How often at least it tells what it sees."""
STOP_S = 30.0
DRAIN_S = 300.0
MARGIN_S = 5.0
"""Sessions leave a node so long before it does."""
MOST_FAILED_STARTS = 5

log = structlog.get_logger()


@dataclass(eq=False)
class Boot:
    """One generation of one place."""

    index: int
    generation: int
    placed: Placed
    target: str = ""
    """Node it was asked to go to; `node` is where it runs."""
    node: str = ""
    lacks: str = ""
    """What no node had when it was asked for."""
    report: ReplicaReport | None = None
    lost: str = ""
    """What Ray says when its actor is gone."""
    joined: str = ""
    """Its name in the pool."""
    ready_since: float = 0.0
    leave_by: float = 0.0
    following: "asyncio.Task[None] | None" = None
    catching_up: "asyncio.Task[None] | None" = None

    def status(self, state: str = "", reason: str = "") -> ReplicaStatus:
        report = self.report
        known = "waiting" if not self.node else report.phase.value if report else "starting"
        return ReplicaStatus(
            index=self.index,
            state=state or known,
            generation=self.generation,
            engine=self.joined,
            node=self.node,
            log=report.log if report else "",
            reason=reason if self.node else self.lacks or reason,
        )


@dataclass(eq=False)
class Slot:
    """One of the wanted replicas."""

    index: int
    boot: Boot | None = None
    deaths: int = 0
    not_before: float = 0.0
    reason: str = ""
    """Why its last boot ended."""
    given_up: bool = False
    tail: bytes = b""

    def ended(self, why: str, *, final: bool, served_s: float) -> None:
        """Count a death: later starts wait longer, and pointless ones are not made."""
        self.boot, self.reason = None, why
        self.deaths = 1 if served_s > STABLE_S else self.deaths + 1
        self.given_up = final or (not served_s and self.deaths >= MOST_FAILED_STARTS)
        self.not_before = time.monotonic() + backoff_s(self.deaths)

    def status(self) -> ReplicaStatus:
        if self.boot is not None:
            return self.boot.status(reason=self.reason)
        state = "given up" if self.given_up else "backing off" if self.deaths else "waiting"
        return ReplicaStatus(index=self.index, state=state, reason=self.reason)


@dataclass
class Cluster:
    """What one look at the cluster and the pool showed."""

    roster: Roster
    draining: Mapping[str, int] = field(default_factory=dict)
    published: Published | None = None
    """The policy version that a trainer gave the pool."""


class EngineManager:
    """The actor. Its methods answer at once; the work is done by its own loop."""

    async def __init__(self, settings: str, roster_key: str, dashboard: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._settings = Settings.model_validate_json(settings)
        self._store = open_store(self._settings)
        self._key, self._published_key = roster_key, published_key(roster_key)
        self._pool = Registration(StoredRoster(self._store, roster_key))
        self._prefix = f"engine-{roster_key.rsplit('/', 1)[-1].removesuffix('.json')}"
        self._dashboard = dashboard
        self._plan: EnginePlan | None = None
        self._slots: dict[int, Slot] = {}
        self._leaving: list[Boot] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._status, self._told_at = PoolStatus(), 0.0
        self._loop = asyncio.create_task(self._run())

    # --- what is asked of it ---------------------------------------------------------------------

    async def apply(self, plan: str) -> None:
        """Want this from now on. Replicas of another command line are replaced."""
        wanted = EnginePlan.model_validate_json(plan)
        earlier = await read_plan(self._store, self._key)
        if earlier is not None and earlier.model != wanted.model:
            await self._store.delete(self._published_key)  # weights of another model
        await write_plan(self._store, self._key, wanted)
        before, self._plan = self._plan, wanted
        same = before is not None and before.model_copy(update={"replicas": 0}) == (
            wanted.model_copy(update={"replicas": 0})
        )
        for slot in self._slots.values():
            slot.given_up, slot.deaths, slot.not_before, slot.reason = False, 0, 0.0, ""
            if not same and slot.boot is not None:
                await self._drain(slot, time.time() + DRAIN_S)

    async def pid(self) -> int:
        return os.getpid()

    async def status(self) -> str:
        return self._picture().model_dump_json()

    async def tail(self, index: int) -> bytes:
        """The end of a replica's log; of its last boot where none runs."""
        slot = self._slots.get(index)
        if slot is None:
            return b""
        if slot.boot is None or not slot.boot.node:
            return slot.tail
        try:
            return await asyncio.wait_for(slot.boot.placed.tail(), 10.0)
        except (ray.exceptions.RayError, TimeoutError):
            return slot.tail

    async def stop(self) -> None:
        """End all replicas, and the loop."""
        self._loop.cancel()
        boots = [slot.boot for slot in self._slots.values() if slot.boot] + self._leaving
        await asyncio.gather(*(self._end(boot) for boot in boots))
        await asyncio.gather(*self._ending)
        self._slots, self._leaving = {}, []
        await write_status(self._store, self._key, PoolStatus())

    # --- its loop --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                if self._plan is None:
                    await self._resume()
                if self._plan is not None:
                    await self._tick(self._plan)
            except (PerdureError, ray.exceptions.RayError) as error:
                log.warning("engines cannot be managed this moment", error=str(error))
            except Exception:
                log.exception("the engine manager stumbled")
            await asyncio.sleep(POLL_S)

    async def _resume(self) -> None:
        """Take up what an earlier manager left: its plan, and the replicas that are alive."""
        plan = await read_plan(self._store, self._key)
        if plan is None:
            return
        earlier = await read_status(self._store, self._key)
        for name in await asyncio.to_thread(placement.names):
            self._adopt(name)
        await self._forget(earlier)
        self._plan = plan

    def _adopt(self, name: str) -> None:
        prefix, _, rest = name.rpartition(f"{self._prefix}-")
        index, _, generation = rest.partition("-g")
        if prefix or not (index.isdigit() and generation.isdigit()):
            return
        placed = placement.find(name)
        if placed is None:
            return
        slot = self._slots.setdefault(int(index), Slot(int(index)))
        boot = Boot(int(index), int(generation), placed)
        boot.following = asyncio.create_task(self._follow(boot))
        if slot.boot is not None:  # it died between placing the new and ending the old
            older, slot.boot = sorted((slot.boot, boot), key=lambda one: one.generation)
            self._retire(older)
        else:
            slot.boot = boot

    async def _forget(self, earlier: PoolStatus) -> None:
        """Engines of replicas that are gone, with the head that knew them, leave the pool."""
        kept = {slot.boot.generation for slot in self._slots.values() if slot.boot}
        for one in (*earlier.replicas, *earlier.leaving):
            if one.engine and one.generation not in kept:
                await self._pool.leave(one.engine, one.generation)

    async def _tick(self, plan: EnginePlan) -> None:
        draining = await asyncio.to_thread(placement.draining_nodes)
        published = await read_published(self._store, self._published_key)
        seen = Cluster(await self._pool.read(), draining, published)
        for index in range(plan.replicas):
            self._slots.setdefault(index, Slot(index))
        for slot in list(self._slots.values()):
            await self._advance(slot, plan, seen)
        for boot in list(self._leaving):
            if self._has_left(boot, seen.roster):
                self._leaving.remove(boot)
                self._retire(boot)
        await self._tell()

    async def _advance(self, slot: Slot, plan: EnginePlan, seen: Cluster) -> None:
        if slot.index >= plan.replicas:
            if slot.boot is not None:
                await self._drain(slot, time.time() + DRAIN_S)
            del self._slots[slot.index]
            return
        if slot.boot is not None:
            await self._judge(slot, slot.boot, plan, seen)
        if slot.boot is None and not slot.given_up and time.monotonic() >= slot.not_before:
            await self._place(slot, plan, seen)

    async def _judge(self, slot: Slot, boot: Boot, plan: EnginePlan, seen: Cluster) -> None:
        report = boot.report
        if boot.lost or (report is not None and report.phase is Phase.ENDED):
            why = boot.lost or (report.verdict if report else "")
            await self._over(slot, boot, why, final=bool(report and report.final))
        elif boot.node in seen.draining:
            deadline = seen.draining[boot.node] / 1000 or time.time() + DRAIN_S
            slot.reason = "its node is leaving"
            await self._drain(slot, max(time.time(), deadline - MARGIN_S))
        elif boot.joined:
            await self._judge_joined(slot, boot, seen)
        elif report is not None and report.phase is Phase.READY:
            await self._join(slot, boot, plan, report, seen)

    async def _join(
        self, slot: Slot, boot: Boot, plan: EnginePlan, report: ReplicaReport, seen: Cluster
    ) -> None:
        boot.ready_since = time.monotonic()
        known = seen.roster.get(name_of(report.url))
        if known is None or known.generation != boot.generation:  # else an earlier manager did
            await self._pool.join(plan, report.url, boot.generation, seen.published)
        boot.joined = name_of(report.url)
        slot.reason = ""

    async def _judge_joined(self, slot: Slot, boot: Boot, seen: Cluster) -> None:
        """What gateways and people say of it counts as much as what its node says."""
        record = seen.roster.get(boot.joined)
        if record is None or record.removed or record.generation != boot.generation:
            slot.boot, slot.reason = None, "it was removed"
            self._retire(boot)
        elif record.state is EngineState.DEAD:
            await self._over(slot, boot, f"no longer usable: {record.reason}", final=False)
        elif record.state is EngineState.DRAINING:
            boot.leave_by = (record.drain_by or time.time()) + MARGIN_S
            slot.boot, slot.reason = None, "it was told to drain"
            self._leaving.append(boot)
        else:
            self._bring(boot, record, seen.published)

    def _bring(self, boot: Boot, record: EngineRecord, published: Published | None) -> None:
        """See that it gets the published version, once at a time."""
        busy = boot.catching_up is not None and not boot.catching_up.done()
        if published is None or busy or not lacks(record, published):
            return
        notice_s = NOTICE_S if record.serves else 0.0
        boot.catching_up = asyncio.create_task(self._catch_up(boot, published, notice_s))

    async def _catch_up(self, boot: Boot, published: Published, notice_s: float) -> None:
        """It has the weights that it was started with: it gets the published ones before it serves.

        When they cannot be had or proven, the next boot tries; a dead manager's successor goes on.
        """
        try:
            held = await self._pool.hold(boot.joined, boot.generation, published.version)
            if held is not None:
                await asyncio.sleep(notice_s)
                problem = await boot.placed.take(published, self._settings)
                await self._pool.caught_up(held, problem)
        except (PerdureError, ray.exceptions.RayError) as error:
            log.warning("a replica does not catch up", generation=boot.generation, error=str(error))

    async def _over(self, slot: Slot, boot: Boot, why: str, *, final: bool) -> None:
        served_s = time.monotonic() - boot.ready_since if boot.ready_since else 0.0
        log.warning("a replica ended", replica=slot.index, generation=boot.generation, why=why)
        if not boot.lost:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                slot.tail = await asyncio.wait_for(boot.placed.tail(), 5.0)
        slot.ended(why, final=final, served_s=served_s)
        self._retire(boot)

    async def _drain(self, slot: Slot, by: float) -> None:
        """Its sessions move within the deadline; its place is filled elsewhere at once."""
        boot, slot.boot = slot.boot, None
        assert boot is not None
        boot.leave_by = by + MARGIN_S / 2
        if boot.joined:
            self._leaving.append(boot)  # first: it is there, and ends, also if the roster fails us
            await self._pool.drain(boot.joined, boot.generation, by)
        else:
            self._retire(boot)

    def _has_left(self, boot: Boot, roster: Roster) -> bool:
        record = roster.get(boot.joined)
        gone = record is None or record.removed or record.generation != boot.generation
        return gone or bool(boot.lost) or time.time() > boot.leave_by

    async def _place(self, slot: Slot, plan: EnginePlan, seen: Cluster) -> None:
        generation = await self._pool.reserve_generation()
        taken = [one.boot.node or one.boot.target for one in self._slots.values() if one.boot]
        target = await asyncio.to_thread(placement.emptiest, plan, taken, seen.draining)
        name = f"{self._prefix}-{slot.index}-g{generation}"
        placed = await asyncio.to_thread(placement.place, plan, name, generation, target)
        lacks = "" if target else f"no node has {placement.room(plan)} for one replica"
        slot.boot = Boot(slot.index, generation, placed, target or "", lacks=lacks)
        slot.boot.following = asyncio.create_task(self._follow(slot.boot))

    async def _follow(self, boot: Boot) -> None:
        """Ask one replica how it is, until it is over."""
        try:
            boot.node = await boot.placed.start()
            while boot.report is None or boot.report.phase is not Phase.ENDED:
                boot.report = await boot.placed.report()
                await asyncio.sleep(POLL_S)
        except ray.exceptions.RayError as error:
            boot.lost = f"its actor is gone: {str(error).strip().splitlines()[0][:200]}"

    def _retire(self, boot: Boot) -> None:
        task = asyncio.create_task(self._end(boot))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, boot: Boot) -> None:
        """Out of the pool first, so that no call goes to a server that is ending."""
        for task in (boot.following, boot.catching_up):
            if task is not None:
                task.cancel()
        if boot.report is not None and boot.report.url:  # it may have been joining this moment
            with contextlib.suppress(PerdureError):
                await self._pool.leave(name_of(boot.report.url), boot.generation)
        if not boot.lost:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                await asyncio.wait_for(boot.placed.stop(), STOP_S if boot.node else POLL_S)
        await asyncio.to_thread(boot.placed.release)

    def _picture(self) -> PoolStatus:
        slots = [self._slots[index] for index in sorted(self._slots)]
        return PoolStatus(
            address=ray.get_runtime_context().gcs_address,
            dashboard=self._dashboard,
            model=self._plan.model if self._plan else "",
            replicas=tuple(slot.status() for slot in slots),
            leaving=tuple(boot.status("leaving") for boot in self._leaving),
        )

    async def _tell(self) -> None:
        """Also that nothing is new: a picture without a manager is of the past."""
        status, now = self._picture(), time.monotonic()
        if status != self._status or now - self._told_at >= BEAT_S:
            dated = status.model_copy(update={"at": time.time()})
            await write_status(self._store, self._key, dated)
            self._status, self._told_at = status, now


def manager_name(roster_key: str) -> str:
    return f"manager-{roster_key.rsplit('/', 1)[-1].removesuffix('.json')}"


def get_or_start(settings: Settings, roster_key: str, dashboard: str) -> Any:
    """The manager of a home, on the connected cluster. It has the store of these settings."""
    here = settings.model_copy(
        update={"home": settings.home.absolute(), "store": settings.store_url}
    )
    return (
        ray.remote(EngineManager)
        .options(
            name=manager_name(roster_key),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # Never on a node that may be preempted, and where the store's credentials are.
            resources={"node:__internal_head__": 0.001},
            max_concurrency=32,
        )
        .remote(here.model_dump_json(), roster_key, dashboard)
    )


def find(roster_key: str) -> Any | None:
    try:
        return ray.get_actor(manager_name(roster_key), namespace=NAMESPACE)
    except ValueError:
        return None
