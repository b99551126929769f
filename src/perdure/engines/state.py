"""What an engine is at a moment: its state, its generation, and which changes may follow.

Owns the record and its rules. Where records are kept is in `roster`, who looks in `watch`.
"""

import re
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from perdure.types import Frozen

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
STABLE_S = 600.0
"""An engine that served for so long is forgiven its earlier deaths."""
ANY_BOOT = "*"
"""A condemned engine whose boots cannot be told apart: only a person brings it back."""


class EngineState(StrEnum):
    STARTING = "starting"
    """Known, and not proven yet: no token has come out of this generation."""
    READY = "ready"
    """The only state that takes new calls."""
    DRAINING = "draining"
    """Finishes what it has until `drain_by`, takes nothing new, then leaves."""
    PAUSED = "paused"
    """Its scheduler stands still, for new weights."""
    SUSPECT = "suspect"
    """It stopped answering or sampling; its calls were moved, and it is asked again."""
    DEAD = "dead"
    """Nothing from this generation is taken any more. Coming back makes a new one."""


ALLOWED: Mapping[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: frozenset(
        {EngineState.READY, EngineState.PAUSED, EngineState.DRAINING, EngineState.DEAD}
    ),
    EngineState.READY: frozenset(set(EngineState) - {EngineState.STARTING}),
    EngineState.PAUSED: frozenset(
        {EngineState.READY, EngineState.SUSPECT, EngineState.DRAINING, EngineState.DEAD}
    ),
    EngineState.SUSPECT: frozenset(
        {EngineState.READY, EngineState.PAUSED, EngineState.DRAINING, EngineState.DEAD}
    ),
    EngineState.DRAINING: frozenset({EngineState.DEAD}),
    EngineState.DEAD: frozenset(),
}
"""From DEAD only `reborn` leads on."""


class EngineRecord(Frozen):
    """One engine, as all gateways and managers of a home see it.

    Example:
        EngineRecord(name="10.0.0.7:8000", url="http://10.0.0.7:8000", generation=17,
                     state="ready", boot="policy-g17", version=3)
    """

    name: str
    """`host:port`: what people and the control API call it."""
    url: str
    weight: float = Field(1.0, gt=0)
    """Its share of new sessions, relative to the others."""
    model: str
    """The name it serves the policy under; requests carry `boot` instead where it has one."""
    kind: Literal["vllm", "sglang"] = "vllm"
    """Whose token endpoint and control routes it has."""
    generation: int
    """Fencing number of this boot, given once, never again, in this home."""
    state: EngineState = EngineState.STARTING
    reason: str = ""
    """Why it is in this state, for people."""
    since: float = 0.0
    """Unix seconds of the last change of state."""
    boot: str = ""
    """What tells this boot from the next: a fenced model name, or its process's start time."""
    condemned: str = ""
    """A boot that may not serve again: a weight update broke it."""
    held_by: str = ""
    """Who paused it and will say when it goes on: `update 7`."""
    version: int | None = None
    """Policy version of its weights; None: not known, or changing this moment."""
    coming: int | None = None
    """The version that the update in progress brings."""
    deaths: int = 0
    """In a row, without `STABLE_S` of service between them."""
    not_before: float = 0.0
    """Unix seconds before which a dead engine is not asked again."""
    drain_by: float | None = None
    guarded: bool = False
    """A front stands before it and asks for the home's engine keys (`perdure.engines.proxy`)."""
    from_settings: bool = False
    """Named by the settings of some gateway, and used by those gateways only."""
    removed: bool = False
    """Taken out by a person, though the settings still name it."""

    @property
    def serves(self) -> bool:
        return self.state is EngineState.READY

    @property
    def wire_model(self) -> str:
        """The name a request must carry, so that another boot answers 404 instead of tokens."""
        return self.boot if is_fenced(self.model, self.boot) else self.model

    @property
    def backoff_s(self) -> float:
        """Seconds that it is left alone, dead."""
        return self.not_before - self.since

    def to(self, state: EngineState, reason: str = "", **changes: Any) -> "EngineRecord":
        """The record after a change of state. Raises: ValueError when it may not follow."""
        if state is self.state:
            return self.model_copy(update={"reason": reason or self.reason, **changes})
        if state not in ALLOWED[self.state]:
            raise ValueError(f"engine {self.name} is {self.state} and cannot become {state}")
        now = time.time()
        if state is EngineState.DEAD:
            changes |= self._death(now)
        return self.model_copy(update={"state": state, "reason": reason, "since": now, **changes})

    def _death(self, now: float) -> dict[str, Any]:
        served = self.state is EngineState.READY and now - self.since > STABLE_S
        deaths = 1 if served else self.deaths + 1
        return {"deaths": deaths, "not_before": now + backoff_s(deaths)}

    def reborn(self, generation: int, boot: str) -> "EngineRecord":
        """The next boot of this engine, not proven yet."""
        update = {
            "generation": generation,
            "boot": boot,
            "state": EngineState.STARTING,
            "reason": "it came back",
            "since": time.time(),
            "version": None,
            "condemned": "",
            "held_by": "",
            "coming": None,
        }
        return self.model_copy(update=update)

    def may_return(self, boot: str) -> bool:
        """Whether this boot may serve: not the one that was condemned."""
        return not self.condemned or self.condemned not in (ANY_BOOT, boot)


def backoff_s(deaths: int) -> float:
    """Seconds a crash-looping engine is left alone: 0 after the first death, then 1, 2, 4, ..."""
    if deaths <= 1:
        return 0.0
    return min(FIRST_BACKOFF_S * 2.0 ** min(deaths - 2, 30), LONGEST_BACKOFF_S)


def name_of(url: str) -> str:
    """`host:port` of an engine's URL. Raises: ValueError when it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// URL")
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def root_of(url: str) -> str:
    """The server itself, without the `/v1` that people paste."""
    return url.rstrip("/").removesuffix("/v1")


def is_fenced(model: str, served: str) -> bool:
    """Whether `served` is `model` with a generation: `policy-g17`."""
    return re.fullmatch(re.escape(model) + r"-g\d+", served) is not None
