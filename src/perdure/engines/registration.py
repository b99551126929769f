"""How what Ray started enters and leaves the pool of a home, and what is kept of it beside that.

Writes the shared roster only by its own rules; gateways follow within a second.
"""

import time
from typing import Literal

from pydantic import Field

from perdure.engines.plan import EnginePlan, boot_name
from perdure.engines.roster import Roster, SharedRoster
from perdure.engines.state import EngineRecord, EngineState, name_of, root_of
from perdure.engines.weights.publishing import Published
from perdure.engines.weights.update import UPDATE
from perdure.errors import NotFound
from perdure.storage.base import Store
from perdure.types import Frozen

CATCHING_UP = "catching up with "
"""How a hold of the manager begins: a replica that lacks the published version gets it."""


def who_brings(published: Published) -> str:
    """What a trainer sent by a transfer of its own, only its next update brings."""
    return CATCHING_UP if published.source else UPDATE


def lacks(record: EngineRecord, published: Published) -> bool:
    """Whether the manager must bring it the published version, now."""
    if not published.source:
        return False
    if record.held_by:
        return record.held_by.startswith(CATCHING_UP)
    return record.serves and (record.version is None or record.version < published.version)


class ReplicaStatus(Frozen):
    """One place of the plan, as the manager sees it."""

    index: int
    state: str
    """`waiting` (for room on a node), `starting`, `ready`, `backing off`, `given up`."""
    generation: int = 0
    engine: str = ""
    """`host:port`, where it is known."""
    node: str = ""
    log: str = ""
    reason: str = ""


class PoolStatus(Frozen):
    """What `perdure engines list` shows of the replicas that Ray holds."""

    address: str = ""
    """Of the Ray cluster."""
    dashboard: str = ""
    model: str = ""
    replicas: tuple[ReplicaStatus, ...] = ()
    leaving: tuple[ReplicaStatus, ...] = ()
    at: float = Field(0.0)
    """Unix seconds."""

    @property
    def managed(self) -> frozenset[str]:
        return frozenset(one.engine for one in (*self.replicas, *self.leaving) if one.engine)


class Registration:
    """The part of the roster's life that a manager of replicas needs."""

    def __init__(self, roster: SharedRoster) -> None:
        self._roster = roster

    async def read(self) -> Roster:
        return await self._roster.read()

    async def reserve_generation(self) -> int:
        """A fencing number that nobody else ever gets."""

        def reserved(roster: Roster) -> Roster:
            return roster.model_copy(update={"next_generation": roster.next_generation + 1})

        return (await self._roster.change(reserved)).next_generation - 1

    async def join(
        self, plan: EnginePlan, url: str, generation: int, published: Published | None = None
    ) -> str:
        """Let a proven replica take sessions; its name in the pool. The gateways prove it again.

        With `published` it joins held, and takes none before it has that version: whoever brings it
        is named, the manager by `CATCHING_UP`, a trainer by its own word.
        """
        held = "" if published is None else f"{who_brings(published)}{published.version}"
        record = EngineRecord(
            name=name_of(url),
            url=url,
            weight=plan.weight,
            model=plan.served_model,
            generation=generation,
            boot=boot_name(plan, generation),
            state=EngineState.PAUSED if held else EngineState.STARTING,
            kind="sglang" if plan.server == "sglang" else "vllm",
            guarded=plan.guard is not None,
            reason=held or "started by Ray",
            held_by=held,
            coming=None if published is None else published.version,
            since=time.time(),
        )
        await self._roster.change(lambda roster: roster.having(record))
        return record.name

    async def hold(self, name: str, generation: int, version: int) -> EngineRecord | None:
        """Announce that this boot gets the published version; None when it is not ours to hold.

        What somebody else holds is theirs, as is what they made newer since we looked; no trainer
        takes over what is held so.
        """
        why = f"{CATCHING_UP}{version}"

        def held(roster: Roster) -> Roster:
            record = roster.get(name)
            if record is None or record.generation != generation:
                return roster
            lacking = record.version is None or record.version < version
            if not ((record.serves and lacking) or record.held_by.startswith(CATCHING_UP)):
                return roster
            changes = {"held_by": why, "coming": version, "since": time.time()}
            return roster.having(record.to(EngineState.PAUSED, why, **changes))

        record = (await self._roster.change(held)).get(name)
        ours = record is not None and (record.generation, record.held_by) == (generation, why)
        return record if ours else None

    async def caught_up(self, held: EngineRecord, problem: str = "") -> None:
        """The boot has what it was held for and is ready; with a problem, it may never serve."""

        def over(roster: Roster) -> Roster:
            now = roster.get(held.name)
            if now is None or (now.generation, now.held_by) != (held.generation, held.held_by):
                return roster
            if problem:
                changes = {"condemned": now.boot, "held_by": "", "coming": None, "version": None}
                return roster.having(now.to(EngineState.DEAD, problem, **changes))
            ready = {"held_by": "", "coming": None, "version": held.coming}
            return roster.having(now.to(EngineState.READY, "", **ready))

        await self._roster.change(over)

    async def drain(self, name: str, generation: int, by: float) -> None:
        """Nothing new from now on; what it still has at `by` (Unix seconds) goes on elsewhere."""

        def drained(roster: Roster) -> Roster:
            record = roster.get(name)
            live = record is not None and record.generation == generation
            if record is None or not live or record.state is EngineState.DEAD:
                return roster
            to = record.to(EngineState.DRAINING, "its node is leaving", drain_by=by, held_by="")
            return roster.having(to)

        await self._roster.change(drained)

    async def leave(self, name: str, generation: int) -> None:
        """It is gone. A later boot at the same address is not touched."""

        def left(roster: Roster) -> Roster:
            record = roster.get(name)
            ours = record is not None and record.generation == generation
            return roster.without(name) if ours else roster

        await self._roster.change(left)


# --- what people ask of the pool, with or without a gateway that runs ---------------------------


async def add_engine(
    roster: SharedRoster,
    url: str,
    model: str,
    weight: float,
    kind: Literal["vllm", "sglang"] = "vllm",
) -> EngineRecord:
    """An engine that somebody else started; adding it again gives it another weight.

    One that was removed, is drained or dead starts anew. Raises: ValueError naming the URL,
    StoreUnavailable.
    """
    name = name_of(url)

    def added(now: Roster) -> Roster:
        known = now.get(name)
        leaving = (EngineState.DRAINING, EngineState.DEAD)
        if known is not None and not known.removed and known.state not in leaving:
            changes = {"weight": weight, "model": model, "kind": kind, "from_settings": False}
            return now.having(known.model_copy(update=changes))
        record = EngineRecord(
            name=name,
            url=root_of(url),
            weight=weight,
            model=model,
            kind=kind,
            generation=now.next_generation,
            since=time.time(),
        )
        return now.having(record)

    return _known(await roster.change(added), name)


async def drain_engine(roster: SharedRoster, name: str, deadline_s: float) -> EngineRecord:
    """Raises: NotFound."""
    by = time.time() + deadline_s

    def drained(now: Roster) -> Roster:
        record = _known(now, name)
        if record.state is EngineState.DEAD:
            return now.having(record.model_copy(update={"removed": True}))
        to = record.to(EngineState.DRAINING, "told to drain", drain_by=by, held_by="")
        return now.having(to)

    return _known(await roster.change(drained), name, gone_too=True)


async def remove_engine(roster: SharedRoster, name: str) -> None:
    """Raises: NotFound."""

    def removed(now: Roster) -> Roster:
        record = _known(now, name)
        gone = record.to(EngineState.DEAD, "removed", removed=True, held_by="")
        return now.having(gone)

    await roster.change(removed)


def _known(roster: Roster, name: str, *, gone_too: bool = False) -> EngineRecord:
    record = roster.get(name)
    if record is None or (record.removed and not gone_too):
        raise NotFound(f"no engine {name!r}: `perdure engines list` names them")
    return record


# --- documents beside the roster ----------------------------------------------------------------


def plan_key(roster_key: str) -> str:
    return f"{roster_key.removesuffix('.json')}.plan.json"


def status_key(roster_key: str) -> str:
    return f"{roster_key.removesuffix('.json')}.replicas.json"


async def read_plan(store: Store, roster_key: str) -> EnginePlan | None:
    try:
        return EnginePlan.model_validate_json((await store.get(plan_key(roster_key))).data)
    except NotFound:
        return None


async def write_plan(store: Store, roster_key: str, plan: EnginePlan) -> None:
    await store.put(plan_key(roster_key), plan.model_dump_json(indent=1).encode())


async def read_status(store: Store, roster_key: str) -> PoolStatus:
    try:
        return PoolStatus.model_validate_json((await store.get(status_key(roster_key))).data)
    except NotFound:
        return PoolStatus()


async def write_status(store: Store, roster_key: str, status: PoolStatus) -> None:
    await store.put(status_key(roster_key), status.model_dump_json(indent=1).encode())
