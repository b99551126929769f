"""Registers Ray's replicas in the home's roster: they join, get the published weights, and leave.

It writes only the shared roster, by the roster's rules. Gateways see a change within a second.
"""

import time

from perdure.engines.engine_roster import Roster, SharedRoster
from perdure.engines.engine_state import EngineRecord, EngineState, name_of
from perdure.engines.weights.weight_publishing import Published
from perdure.engines.weights.weight_update import UPDATE
from perdure.serving.replica_plan import EnginePlan, fenced_name

CATCHING_UP = "catching up with "
"""Prefix of `held_by` while the manager loads the published version into a replica."""


def held_by_prefix(published: Published) -> str:
    """Prefix of `held_by` for a replica that joins. If a trainer sends weights by its own transfer, the
    replica gets them only with the trainer's next update."""
    return CATCHING_UP if published.source else UPDATE


def lacks(record: EngineRecord, published: Published) -> bool:
    """Whether the manager must load the published version into this engine now."""
    if not published.source:
        return False
    if record.held_by:
        return record.held_by.startswith(CATCHING_UP)
    return record.serves and (record.version is None or record.version < published.version)


class ReplicaRegistration:
    """The roster changes that the replicas' manager makes."""

    def __init__(self, roster: SharedRoster) -> None:
        self._roster = roster

    async def read(self) -> Roster:
        return await self._roster.read()

    async def reserve_generation(self) -> int:
        """Reserve a fencing number that the home uses only once."""

        def reserved(roster: Roster) -> Roster:
            return roster.model_copy(update={"next_generation": roster.next_generation + 1})

        return (await self._roster.change(reserved)).next_generation - 1

    async def join(
        self, plan: EnginePlan, url: str, generation: int, published: Published | None = None
    ) -> str:
        """Register a proven replica and return its name in the pool. The gateways prove it again.

        With `published` it joins paused and takes no session before it has that version. `held_by`
        says which side loads it: the manager (`CATCHING_UP`) or a trainer (`UPDATE`).
        """
        held = "" if published is None else f"{held_by_prefix(published)}{published.version}"
        record = EngineRecord(
            name=name_of(url),
            url=url,
            weight=plan.weight,
            model=plan.served_model,
            generation=generation,
            start_id=fenced_name(plan, generation),
            state=EngineState.PAUSED if held else EngineState.STARTING,
            kind="sglang" if plan.server == "sglang" else "vllm",
            behind_proxy=plan.proxy_keys is not None,
            reason=held or "started by Ray",
            held_by=held,
            coming=None if published is None else published.version,
            since=time.time(),
        )
        await self._roster.change(lambda roster: roster.having(record))
        return record.name

    async def hold(self, name: str, generation: int, version: int) -> EngineRecord | None:
        """Announce that this generation gets the published version; None if it must not be held.

        The manager does not touch an engine that an update holds or that has a newer version by now. No
        trainer takes over an engine that the manager holds.
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

    async def finish_catch_up(self, held: EngineRecord, problem: str = "") -> None:
        """Mark the held engine ready with its version or, with a `problem`, failed."""

        def over(roster: Roster) -> Roster:
            now = roster.get(held.name)
            if now is None or (now.generation, now.held_by) != (held.generation, held.held_by):
                return roster
            if problem:
                changes = {
                    "condemned": now.start_id,
                    "held_by": "",
                    "coming": None,
                    "version": None,
                }
                return roster.having(now.to(EngineState.DEAD, problem, **changes))
            ready = {"held_by": "", "coming": None, "version": held.coming}
            return roster.having(now.to(EngineState.READY, "", **ready))

        await self._roster.change(over)

    async def drain(self, name: str, generation: int, by: float) -> None:
        """Send it no new sessions. Calls that still run at `by` (Unix seconds) move to other engines."""

        def drained(roster: Roster) -> Roster:
            record = roster.get(name)
            live = record is not None and record.generation == generation
            if record is None or not live or record.state is EngineState.DEAD:
                return roster
            to = record.to(EngineState.DRAINING, "its node is leaving", drain_by=by, held_by="")
            return roster.having(to)

        await self._roster.change(drained)

    async def leave(self, name: str, generation: int) -> None:
        """Remove this generation; a later one at the same address stays."""

        def left(roster: Roster) -> Roster:
            record = roster.get(name)
            ours = record is not None and record.generation == generation
            return roster.without(name) if ours else roster

        await self._roster.change(left)
