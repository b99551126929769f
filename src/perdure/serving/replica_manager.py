"""Keeps the planned number of replicas running: places, watches, registers, drains and replaces them.

Each model of a home has one detached actor. It may die at any moment, and so may every node: its plan and status
are in the store, and it finds its replicas again by name.
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

from perdure.engines.engine_roster import DRAIN_S, Roster, StoredRoster
from perdure.engines.engine_state import STABLE_S, EngineRecord, EngineState, backoff_s, name_of
from perdure.engines.weights.weight_publishing import Published, published_key, read_published
from perdure.engines.weights.weight_update import NOTICE_S
from perdure.errors import PerdureError
from perdure.serving import ray_placement
from perdure.serving.engine_commands import NAMESPACE
from perdure.serving.engine_replica import ReplicaReport, ReplicaState
from perdure.serving.ray_placement import Placed
from perdure.serving.replica_plan import EnginePlan, ReplicaPool, read_plan, write_plan
from perdure.serving.replica_registration import ReplicaRegistration, lacks
from perdure.serving.replica_status import PoolStatus, ReplicaStatus, read_status, write_status
from perdure.settings.settings_tree import Settings
from perdure.storage.store_url import open_store

POLL_S = 0.5
BEAT_S = 15.0
"""Seconds after which the manager writes its status again even if nothing has changed."""
STOP_S = 30.0
"""Seconds that a replica has to end its server before the manager kills its actor."""
MARGIN_S = 5.0
"""Sessions leave a node this many seconds before its deadline."""
MOST_FAILED_STARTS = 5
"""The manager gives up on a replica after this many consecutive starts without a token."""

log = structlog.get_logger()


@dataclass(eq=False)
class ReplicaStart:
    """One start of one slot's replica."""

    index: int
    generation: int
    placed: Placed
    target: str = ""
    """The node that we asked Ray for; `node` is the one it runs on."""
    node: str = ""
    lacks: str = ""
    """The resources that no node had when it was placed."""
    report: ReplicaReport | None = None
    lost: str = ""
    """Ray's reason if its actor is gone."""
    joined: str = ""
    """Its name in the pool."""
    ready_since: float = 0.0
    leave_by: float = 0.0
    following: "asyncio.Task[None] | None" = None
    catching_up: "asyncio.Task[None] | None" = None

    def status(self, state: str = "", reason: str = "") -> ReplicaStatus:
        report = self.report
        known = "waiting" if not self.node else report.state.value if report else "starting"
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
    """One of the planned replicas."""

    index: int
    current: ReplicaStart | None = None
    deaths: int = 0
    not_before: float = 0.0
    reason: str = ""
    """Why its last start ended."""
    given_up: bool = False
    tail: bytes = b""
    """The end of the log of its last start."""

    def ended(self, why: str, *, final: bool, served_s: float) -> None:
        """The current start has ended; the next one waits longer. `final`: it would end the same way."""
        self.current, self.reason = None, why
        self.deaths = 1 if served_s > STABLE_S else self.deaths + 1
        self.given_up = final or (not served_s and self.deaths >= MOST_FAILED_STARTS)
        self.not_before = time.monotonic() + backoff_s(self.deaths)

    def status(self) -> ReplicaStatus:
        if self.current is not None:
            return self.current.status(reason=self.reason)
        state = "given up" if self.given_up else "backing off" if self.deaths else "waiting"
        return ReplicaStatus(index=self.index, state=state, reason=self.reason)


@dataclass
class Snapshot:
    """The state of the cluster and the pool during one tick of the loop."""

    roster: Roster
    draining: Mapping[str, int] = field(default_factory=dict)
    published: Published | None = None
    """The policy version that a trainer published."""


class EngineManager:
    """The manager's actor. Its methods answer at once; its own loop does the work."""

    async def __init__(self, settings: str, pool: ReplicaPool, dashboard: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._settings = Settings.model_validate_json(settings)
        self._store = open_store(self._settings)
        self._pool = pool
        self._registration = ReplicaRegistration(StoredRoster(self._store, pool.roster_key))
        self._prefix = f"engine-{pool.name}"
        self._dashboard = dashboard
        self._plan: EnginePlan | None = None
        self._slots: dict[int, Slot] = {}
        self._leaving: list[ReplicaStart] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._status, self._told_at = PoolStatus(), 0.0
        self._loop = asyncio.create_task(self._run())

    # --- remote calls ----------------------------------------------------------------------------

    async def apply(self, plan: str) -> None:
        """Follow this plan from now on. If more than `replicas` has changed, replace all replicas."""
        wanted = EnginePlan.model_validate_json(plan)
        earlier = await read_plan(self._store, self._pool)
        if earlier is not None and earlier.model != wanted.model:
            # The weights of another model.
            await self._store.delete(self._published_key())
        await write_plan(self._store, self._pool, wanted)
        before, self._plan = self._plan, wanted
        same = before is not None and before.model_copy(update={"replicas": 0}) == (
            wanted.model_copy(update={"replicas": 0})
        )
        for slot in self._slots.values():
            slot.given_up, slot.deaths, slot.not_before, slot.reason = False, 0, 0.0, ""
            if not same and slot.current is not None:
                await self._drain(slot, slot.current, time.time() + DRAIN_S)

    async def pid(self) -> int:
        return os.getpid()

    async def status(self) -> str:
        return self._picture().model_dump_json()

    async def tail(self, index: int) -> bytes:
        """The end of a replica's log; if the replica is not running, the log of its last start."""
        slot = self._slots.get(index)
        if slot is None:
            return b""
        if slot.current is None or not slot.current.node:
            return slot.tail
        try:
            async with asyncio.timeout(10.0):
                return await slot.current.placed.tail()
        except (ray.exceptions.RayError, TimeoutError):
            return slot.tail

    async def stop(self) -> None:
        """End all replicas and the loop."""
        self._loop.cancel()
        starts = [slot.current for slot in self._slots.values() if slot.current] + self._leaving
        await asyncio.gather(*(self._end(start) for start in starts))
        await asyncio.gather(*self._ending)
        self._slots, self._leaving = {}, []
        await write_status(self._store, self._pool, PoolStatus())

    # --- its loop --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                if self._plan is None:
                    await self._resume()
                if self._plan is not None:
                    await self._tick(self._plan)
            except (PerdureError, ray.exceptions.RayError) as error:
                log.warning("cannot manage the engines now", error=str(error))
            except Exception:
                log.exception("one round of the engine manager failed; it continues")
            await asyncio.sleep(POLL_S)

    async def _resume(self) -> None:
        """Take over the plan and the live replicas of an earlier manager."""
        plan = await read_plan(self._store, self._pool)
        if plan is None:
            return
        earlier = await read_status(self._store, self._pool)
        for name in await asyncio.to_thread(ray_placement.names):
            self._adopt(name)
        await self._forget(earlier)
        self._plan = plan

    def _adopt(self, name: str) -> None:
        prefix, _, rest = name.rpartition(f"{self._prefix}-")
        index, _, generation = rest.partition("-g")
        if prefix or not (index.isdigit() and generation.isdigit()):
            return
        placed = ray_placement.find(name)
        if placed is None:
            return
        slot = self._slots.setdefault(int(index), Slot(int(index)))
        start = ReplicaStart(int(index), int(generation), placed)
        start.following = asyncio.create_task(self._follow(start))
        if (
            slot.current is not None
        ):  # the earlier manager died after it placed the new start and before it ended the old one
            older, slot.current = sorted((slot.current, start), key=lambda one: one.generation)
            self._retire(older)
        else:
            slot.current = start

    async def _forget(self, earlier: PoolStatus) -> None:
        """Remove engines from the pool whose replicas were lost with the Ray head."""
        kept = {slot.current.generation for slot in self._slots.values() if slot.current}
        for one in (*earlier.replicas, *earlier.leaving):
            if one.engine and one.generation not in kept:
                await self._registration.leave(one.engine, one.generation)

    async def _tick(self, plan: EnginePlan) -> None:
        draining = await asyncio.to_thread(ray_placement.draining_nodes)
        published = await read_published(self._store, self._published_key())
        seen = Snapshot(await self._registration.read(), draining, published)
        for index in range(plan.replicas):
            self._slots.setdefault(index, Slot(index))
        for slot in list(self._slots.values()):
            await self._advance(slot, plan, seen)
        for start in list(self._leaving):
            if self._has_left(start, seen.roster):
                self._leaving.remove(start)
                self._retire(start)
        await self._tell()

    async def _advance(self, slot: Slot, plan: EnginePlan, seen: Snapshot) -> None:
        if slot.index >= plan.replicas:
            if slot.current is not None:
                await self._drain(slot, slot.current, time.time() + DRAIN_S)
            del self._slots[slot.index]
            return
        if slot.current is not None:
            await self._judge(slot, slot.current, plan, seen)
        if slot.current is None and not slot.given_up and time.monotonic() >= slot.not_before:
            await self._place(slot, plan, seen)

    async def _judge(
        self, slot: Slot, start: ReplicaStart, plan: EnginePlan, seen: Snapshot
    ) -> None:
        report = start.report
        if start.lost or (report is not None and report.state is ReplicaState.ENDED):
            why = start.lost or (report.cause if report else "")
            await self._over(slot, start, why, final=bool(report and report.final))
        elif start.node in seen.draining:
            deadline = seen.draining[start.node] / 1000 or time.time() + DRAIN_S
            slot.reason = "its node is leaving"
            await self._drain(slot, start, max(time.time(), deadline - MARGIN_S))
        elif start.joined:
            await self._judge_joined(slot, start, seen)
        elif report is not None and report.state is ReplicaState.READY:
            await self._join(slot, start, plan, report, seen)

    async def _join(
        self,
        slot: Slot,
        start: ReplicaStart,
        plan: EnginePlan,
        report: ReplicaReport,
        seen: Snapshot,
    ) -> None:
        start.ready_since = time.monotonic()
        known = seen.roster.get(name_of(report.url))
        if (
            known is None or known.generation != start.generation
        ):  # otherwise an earlier manager registered it
            await self._registration.join(plan, report.url, start.generation, seen.published)
        start.joined = name_of(report.url)
        slot.reason = ""

    async def _judge_joined(self, slot: Slot, start: ReplicaStart, seen: Snapshot) -> None:
        """React to the roster's record, which gateways and users change too."""
        record = seen.roster.get(start.joined)
        if record is None or record.removed or record.generation != start.generation:
            slot.current, slot.reason = None, "it was removed"
            self._retire(start)
        elif record.state is EngineState.DEAD:
            await self._over(slot, start, f"no longer usable: {record.reason}", final=False)
        elif record.state is EngineState.DRAINING:
            start.leave_by = (record.drain_by or time.time()) + MARGIN_S
            slot.current, slot.reason = None, "it was told to drain"
            self._leaving.append(start)
        else:
            self._bring(start, record, seen.published)

    def _bring(
        self, start: ReplicaStart, record: EngineRecord, published: Published | None
    ) -> None:
        """Start loading the published version unless a load is already running."""
        busy = start.catching_up is not None and not start.catching_up.done()
        if published is None or busy or not lacks(record, published):
            return
        notice_s = NOTICE_S if record.serves else 0.0
        start.catching_up = asyncio.create_task(self._catch_up(start, published, notice_s))

    async def _catch_up(self, start: ReplicaStart, published: Published, notice_s: float) -> None:
        """Load the published weights into a replica, which has its initial weights, before it serves.

        If they cannot be fetched or proven, the replica is marked failed and the next start tries
        again. If this manager dies, its successor continues.
        """
        try:
            held = await self._registration.hold(start.joined, start.generation, published.version)
            if held is not None:
                await asyncio.sleep(notice_s)
                problem = await start.placed.take(published, self._settings)
                await self._registration.finish_catch_up(held, problem)
        except (PerdureError, ray.exceptions.RayError) as error:
            log.warning(
                "cannot load the published weights into a replica",
                generation=start.generation,
                error=str(error),
            )

    async def _over(self, slot: Slot, start: ReplicaStart, why: str, *, final: bool) -> None:
        served_s = time.monotonic() - start.ready_since if start.ready_since else 0.0
        log.warning("a replica ended", replica=slot.index, generation=start.generation, why=why)
        if not start.lost:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(5.0):
                    slot.tail = await start.placed.tail()
        slot.ended(why, final=final, served_s=served_s)
        self._retire(start)

    async def _drain(self, slot: Slot, start: ReplicaStart, by: float) -> None:
        """Move its sessions away by the deadline. The slot can take another replica at once."""
        slot.current = None
        start.leave_by = by + MARGIN_S / 2
        if start.joined:
            # This comes first: the replica must end even if the roster cannot be changed.
            self._leaving.append(start)
            await self._registration.drain(start.joined, start.generation, by)
        else:
            self._retire(start)

    def _has_left(self, start: ReplicaStart, roster: Roster) -> bool:
        record = roster.get(start.joined)
        gone = record is None or record.removed or record.generation != start.generation
        return gone or bool(start.lost) or time.time() > start.leave_by

    async def _place(self, slot: Slot, plan: EnginePlan, seen: Snapshot) -> None:
        generation = await self._registration.reserve_generation()
        taken = [
            one.current.node or one.current.target for one in self._slots.values() if one.current
        ]
        target = await asyncio.to_thread(ray_placement.emptiest, plan, taken, seen.draining)
        name = f"{self._prefix}-{slot.index}-g{generation}"
        placed = await asyncio.to_thread(ray_placement.place, plan, name, generation, target)
        lacks = "" if target else f"no node has {ray_placement.room(plan)} for one replica"
        slot.current = ReplicaStart(slot.index, generation, placed, target or "", lacks=lacks)
        slot.current.following = asyncio.create_task(self._follow(slot.current))

    async def _follow(self, start: ReplicaStart) -> None:
        """Poll one replica's report until the replica has ended."""
        try:
            start.node = await start.placed.start()
            while start.report is None or start.report.state is not ReplicaState.ENDED:
                start.report = await start.placed.report()
                await asyncio.sleep(POLL_S)
        except ray.exceptions.RayError as error:
            start.lost = f"its actor is gone: {str(error).strip().splitlines()[0][:200]}"

    def _retire(self, start: ReplicaStart) -> None:
        task = asyncio.create_task(self._end(start))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, start: ReplicaStart) -> None:
        """End a start. It leaves the pool first, so that no call goes to a server that is ending."""
        for task in (start.following, start.catching_up):
            if task is not None:
                task.cancel()
        if start.report is not None and start.report.url:  # it may have been joining just now
            with contextlib.suppress(PerdureError):
                await self._registration.leave(name_of(start.report.url), start.generation)
        if not start.lost:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(STOP_S if start.node else POLL_S):
                    await start.placed.stop()
        await asyncio.to_thread(start.placed.release)

    def _published_key(self) -> str:
        return published_key(self._pool.roster_key, self._pool.served_model)

    def _picture(self) -> PoolStatus:
        slots = [self._slots[index] for index in sorted(self._slots)]
        return PoolStatus(
            address=ray.get_runtime_context().gcs_address,
            dashboard=self._dashboard,
            model=self._plan.model if self._plan else "",
            served_model=self._pool.served_model,
            replicas=tuple(slot.status() for slot in slots),
            leaving=tuple(start.status("leaving") for start in self._leaving),
        )

    async def _tell(self) -> None:
        """Write the status if it has changed, and every `BEAT_S`: an old date means no manager runs."""
        status, now = self._picture(), time.monotonic()
        if status != self._status or now - self._told_at >= BEAT_S:
            dated = status.model_copy(update={"at": time.time()})
            await write_status(self._store, self._pool, dated)
            self._status, self._told_at = status, now


def manager_name(pool: ReplicaPool) -> str:
    return f"manager-{pool.name}"


def get_or_start(settings: Settings, pool: ReplicaPool, dashboard: str) -> Any:
    """Find or start the pool's manager on the connected cluster. It uses the store of these settings."""
    here = settings.model_copy(
        update={"home": settings.home.absolute(), "store": settings.store_url}
    )
    return (
        ray.remote(EngineManager)
        .options(
            name=manager_name(pool),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # The head node is never preempted, and it has the store's credentials.
            resources={"node:__internal_head__": 0.001},
            max_concurrency=32,
        )
        .remote(here.model_dump_json(), pool, dashboard)
    )


def find(pool: ReplicaPool) -> Any | None:
    try:
        return ray.get_actor(manager_name(pool), namespace=NAMESPACE)
    except ValueError:
        return None
