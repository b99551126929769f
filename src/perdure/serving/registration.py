"""How what Ray started enters and leaves the pool of a home, and what is kept of it beside that.

Writes the shared roster only by its own rules; gateways follow within a second.
"""

import time
from typing import Literal

from pydantic import Field

from perdure.errors import NotFound
from perdure.serving.commands import EnginePlan, boot_name
from perdure.serving.roster import Roster, SharedRoster
from perdure.serving.state import EngineRecord, EngineState, name_of, root_of
from perdure.storage.base import Store
from perdure.types import Frozen


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

    async def join(self, plan: EnginePlan, url: str, generation: int) -> str:
        """Let a proven replica take sessions; its name in the pool. The gateways prove it again."""
        record = EngineRecord(
            name=name_of(url),
            url=url,
            weight=plan.weight,
            model=plan.served_model,
            generation=generation,
            boot=boot_name(plan, generation),
            state=EngineState.STARTING,
            kind="sglang" if plan.server == "sglang" else "vllm",
            guarded=plan.guard is not None,
            reason="started by Ray",
            since=time.time(),
        )
        await self._roster.change(lambda roster: roster.having(record))
        return record.name

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

    Raises: ValueError naming the URL.
    """
    name = name_of(url)

    def added(now: Roster) -> Roster:
        known = now.get(name)
        if known is not None and not known.removed and known.state is not EngineState.DEAD:
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
