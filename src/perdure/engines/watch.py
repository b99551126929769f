"""One look at one engine: is it there, is it the same boot, does it still sample?

Owns the verdict. Health routes prove nothing (they answer while the scheduler hangs): a token does,
and the step counter. Who records a verdict and what follows is the gateway's pool.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

from perdure.engines.clients.vllm_control import EngineControl, EngineRefused, EngineSilent, Vitals
from perdure.engines.roster import Roster
from perdure.engines.state import ANY_BOOT, EngineRecord, EngineState, is_fenced
from perdure.errors import ControlPlaneError

SUSPECT_PROBE_S = 10.0
HELD_S = 3600.0
"""A manager that paused an engine for so long has died; what it left behind is not trusted."""


class Verdict(NamedTuple):
    """What an engine turned out to be. `boot`, `version`: as it says itself, when it did."""

    state: EngineState
    reason: str = ""
    boot: str = ""
    version: int | None = None


@dataclass
class Load:
    """What this process has on the engine. `progress`: `time.monotonic()` of its newest token, or
    of the start of its oldest call, whichever is later."""

    in_flight: int = 0
    progress: float = 0.0


class EngineWatch:
    """What one process has seen of an engine."""

    def __init__(self, control: EngineControl, *, hang_s: float) -> None:
        self._control = control
        self._hang_s = hang_s
        self.vitals = Vitals()
        self.refused = ""
        """Why it will never serve as configured: a wrong model name, a wrong key."""
        self._moved_at = time.monotonic()
        self._period: object = None
        self._period_began = 0.0

    def waited(self, record: EngineRecord) -> float:
        """Seconds since this process first saw it in its present state: clocks of hosts may differ."""
        if self._period != _period(record):
            self._period, self._period_began = _period(record), time.monotonic()
        return time.monotonic() - self._period_began

    async def look(self, record: EngineRecord, load: Load) -> Verdict | None:
        """What it should become, or None to leave it as it is."""
        waited = self.waited(record)
        match record.state:
            case EngineState.READY:
                self.refused = ""  # perhaps another process found out
                return await self._check(record, load)
            case EngineState.STARTING | EngineState.SUSPECT:
                return await self._prove(record)
            case EngineState.DEAD if not record.removed and waited >= record.backoff_s:
                return await self._prove(record)
            case EngineState.PAUSED:
                return await self._paused(record)
            case _:
                return None

    async def _check(self, record: EngineRecord, load: Load) -> Verdict | None:
        try:
            vitals = await self._control.vitals()
        except EngineSilent as silent:
            return Verdict(EngineState.DEAD if silent.gone else EngineState.SUSPECT, str(silent))
        except ControlPlaneError:
            vitals = self.vitals  # no metrics: its tokens alone tell
        restarted = self._note(vitals)
        if restarted or _another_boot(record, vitals):
            return Verdict(EngineState.DEAD, "another process answers at its address")
        if await self._stands_still():
            return Verdict(EngineState.PAUSED, "paused by somebody else")
        now = time.monotonic()
        if load.in_flight and now - max(load.progress, self._moved_at) > self._hang_s:
            return Verdict(
                EngineState.SUSPECT,
                f"no token for {self._hang_s:.0f} s while {load.in_flight} calls wait",
            )
        return None

    def _note(self, vitals: Vitals) -> bool:
        """Remember when its counters last moved; whether they fell, as only a restart makes them."""
        before, self.vitals = self.vitals, vitals
        if (vitals.steps, vitals.tokens) != (before.steps, before.tokens):
            self._moved_at = time.monotonic()
        if before.tokens is None or vitals.tokens is None:
            return False
        return vitals.tokens < before.tokens

    async def _prove(self, record: EngineRecord) -> Verdict | None:
        try:
            return await self._proven(record)
        except EngineRefused as refused:
            self.refused = str(refused)
            return Verdict(record.state, str(refused)) if self._is_news(record, refused) else None
        except EngineSilent as silent:
            return self._silent(record, silent)
        except ControlPlaneError as error:
            return Verdict(record.state, str(error)) if self._is_news(record, error) else None

    async def _proven(self, record: EngineRecord) -> Verdict | None:
        try:
            vitals = await self._control.vitals()
        except EngineRefused:
            vitals = Vitals()
        boot = await self._control.boot(record.model, vitals)
        if not record.may_return(boot):
            return None
        if await self._stands_still():
            return Verdict(EngineState.PAUSED, "paused by somebody else", boot)
        served = boot if is_fenced(record.model, boot) else record.model
        timeout_s = min(SUSPECT_PROBE_S, self._hang_s)
        if record.state is EngineState.STARTING:
            timeout_s = self._hang_s
        await self._control.round_trip(served, timeout_s=timeout_s)
        self.refused, self.vitals = "", vitals
        self._moved_at = time.monotonic()
        return Verdict(EngineState.READY, "", boot, await self._version())

    def _silent(self, record: EngineRecord, silent: EngineSilent) -> Verdict | None:
        lost = silent.gone or self.waited(record) > self._hang_s
        if record.state is EngineState.SUSPECT and lost:
            return Verdict(EngineState.DEAD, str(silent))
        return Verdict(record.state, str(silent)) if self._is_news(record, silent) else None

    def _is_news(self, record: EngineRecord, error: Exception) -> bool:
        return record.reason != str(error)

    async def _paused(self, record: EngineRecord) -> Verdict | None:
        if record.held_by:
            held = self.waited(record) > HELD_S
            return Verdict(EngineState.DEAD, f"{record.held_by} never ended") if held else None
        return None if await self._stands_still() else await self._prove(record)

    async def _stands_still(self) -> bool:
        try:
            return await self._control.is_paused() is True
        except ControlPlaneError:
            return False  # the token round trip or the progress will tell

    async def _version(self) -> int | None:
        try:
            return await self._control.version()
        except ControlPlaneError:
            return None


def _another_boot(record: EngineRecord, vitals: Vitals) -> bool:
    if is_fenced(record.model, record.boot):
        return False  # its name is on every request: another boot answers 404
    return bool(record.boot and vitals.boot) and record.boot != vitals.boot


def apply(roster: Roster, seen: EngineRecord, verdict: Verdict) -> Roster:
    """The roster after a verdict on the record that was looked at; unchanged when that is stale."""
    now = roster.get(seen.name)
    if now is None or _period(now) != _period(seen):
        return roster
    if verdict.state in (EngineState.READY, EngineState.PAUSED):
        return _came_back(roster, now, verdict)
    condemned = now.boot or ANY_BOOT
    held = verdict.state is EngineState.DEAD and now.held_by
    changes = {"condemned": condemned, "held_by": ""} if held else {}
    return roster.having(now.to(verdict.state, verdict.reason, **changes))


def _period(record: EngineRecord) -> tuple[int, EngineState, float]:
    """Ready, updated and ready again is not what it was: a look from before says nothing of it."""
    return record.generation, record.state, record.since


def _came_back(roster: Roster, now: EngineRecord, verdict: Verdict) -> Roster:
    """A dead engine, or another boot of one, is a new generation."""
    differs = bool(now.boot and verdict.boot and now.boot != verdict.boot)
    if now.state is EngineState.DEAD or differs:
        now = now.reborn(roster.next_generation, verdict.boot)
    version = now.version if verdict.version is None else verdict.version
    boot = verdict.boot or now.boot
    return roster.having(now.to(verdict.state, verdict.reason, boot=boot, version=version))
