"""The state of one engine: its record, its generation, and the allowed transitions.

`roster` stores the records; `health` finds out which state an engine is in.
"""

import re
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field

from perdure.types import Frozen

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
STABLE_S = 600.0
"""Seconds of service after which an engine's earlier deaths no longer count."""
ANY_START = "*"
"""Value of `condemned` if nothing distinguishes the engine's starts. Only a user can bring the engine
back."""


class EngineSpec(NamedTuple):
    """An engine that a user names, in the settings or at run time."""

    url: str
    weight: float = 1.0
    kind: Literal["vllm", "sglang"] = "vllm"


class EngineState(StrEnum):
    STARTING = "starting"
    """Known but not proven: this generation has not yet sampled a token."""
    READY = "ready"
    """The only state that takes new calls."""
    DRAINING = "draining"
    """Takes no new calls, finishes its calls until `drain_by`, then is removed."""
    PAUSED = "paused"
    """Its scheduler is stopped for new weights."""
    SUSPECT = "suspect"
    """It stopped answering or sampling. Its calls were moved, and it is probed again."""
    DEAD = "dead"
    """Answers of this generation are dropped. If the engine comes back, it gets a new generation."""


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
"""Only `reborn` takes an engine out of DEAD."""


class ServedModel(Frozen):
    """The model at an engine's address. A field is empty if the engine does not report it."""

    root: str = ""
    """The model as `/v1/models` reports it: a name, or the folder that it was loaded from."""
    tokenizer: str = ""
    """Digest of the ids into which it tokenizes one fixed text."""

    def replaced_by(
        self, other: "ServedModel", version: int | None, newer: int | None
    ) -> str | None:
        """Why a start that serves `other` may not replace this one; None if it may.

        With a higher policy version, another root is an update of the weights. Another tokenizer is
        never accepted, because recorded ids would then stand for other texts.
        """
        if self.tokenizer and other.tokenizer not in ("", self.tokenizer):
            models = f"{other.root or 'a model'} instead of {self.root or 'another'}"
            return f"its address now serves another tokenizer ({models})"
        if not self.root or other.root in ("", self.root):
            return None
        if newer is not None and newer > (-1 if version is None else version):
            return None
        return f"its address now serves the model {other.root} instead of {self.root}"

    def updated(self, other: "ServedModel") -> "ServedModel":
        """A copy with the fields that the newest start reports."""
        told = {name: value for name, value in other if value}
        return self.model_copy(update=told)


class EngineRecord(Frozen):
    """One engine, as all gateways and managers of a home know it.

    Example:
        EngineRecord(name="10.0.0.7:8000", url="http://10.0.0.7:8000", generation=17,
                     state="ready", start_id="policy-g17", version=3)
    """

    name: str
    """`host:port`: its name for people and for the control API."""
    url: str
    weight: float = Field(1.0, gt=0)
    """Its share of new sessions, relative to other engines."""
    model: str
    """The name of its model. If `start_id` is a fenced name, requests carry that instead."""
    kind: Literal["vllm", "sglang"] = "vllm"
    """The server whose token endpoint and control routes it has."""
    run: str = ""
    """Glob of the run ids that it samples for. Empty: every run."""
    generation: int
    """Fencing number of this start of the engine. A home never reuses a number."""
    state: EngineState = EngineState.STARTING
    reason: str = ""
    """Why it is in this state, as text for people."""
    since: float = 0.0
    """Unix seconds of the last change of state."""
    start_id: str = ""
    """Identifies this start of the server: its fenced model name, or its process's start time."""
    served: ServedModel = ServedModel()
    """The model of this start, or of the last start that reported one."""
    condemned: str = ""
    """The `start_id` of a start that may not serve again, because a weight update broke it."""
    held_by: str = ""
    """What paused it and will release it, such as `update 7`."""
    version: int | None = None
    """Policy version of its weights. None: not known, or being changed."""
    coming: int | None = None
    """The version that an update in progress loads."""
    deaths: int = 0
    """Consecutive deaths, without `STABLE_S` of service between them."""
    not_before: float = 0.0
    """Unix seconds before which a dead engine is not probed again."""
    drain_by: float | None = None
    behind_proxy: bool = False
    """Whether an `EngineProxy` in front of it requires the home's engine keys."""
    from_settings: bool = False
    """Whether settings name it. Only gateways whose settings do so use it."""
    of_trainer: bool = False
    """Whether a trainer's process serves it. The record is removed when that process has ended."""
    removed: bool = False
    """Whether a user removed it, although the settings may still name it."""

    @property
    def serves(self) -> bool:
        return self.state is EngineState.READY

    @property
    def wire_model(self) -> str:
        """The model name in requests. If it is fenced, another start answers 404 instead of tokens."""
        return self.start_id if is_fenced(self.model, self.start_id) else self.model

    @property
    def backoff_s(self) -> float:
        """Seconds after its death in which it is not probed."""
        return self.not_before - self.since

    def to(self, state: EngineState, reason: str = "", **changes: Any) -> "EngineRecord":
        """The record after a transition to `state`. Raises: ValueError if that is not allowed."""
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

    def as_removed(self) -> "EngineRecord":
        """The record as dead and removed, so that a gateway's settings do not bring it back."""
        return self.to(EngineState.DEAD, "removed", removed=True, held_by="")

    def reborn(self, generation: int, start_id: str) -> "EngineRecord":
        """The record of the engine's next start, which is not yet proven."""
        update = {
            "generation": generation,
            "start_id": start_id,
            "state": EngineState.STARTING,
            "reason": "it came back",
            "since": time.time(),
            "version": None,
            "condemned": "",
            "held_by": "",
            "coming": None,
        }
        return self.model_copy(update=update)

    def may_return(self, start_id: str) -> bool:
        """Whether this start may serve, because it is not the condemned one."""
        return not self.condemned or self.condemned not in (ANY_START, start_id)


def backoff_s(deaths: int) -> float:
    """Seconds until a dead engine is probed again: 0 after its first death, then 1, 2, 4, ..."""
    if deaths <= 1:
        return 0.0
    return min(FIRST_BACKOFF_S * 2.0 ** min(deaths - 2, 30), LONGEST_BACKOFF_S)


def name_of(url: str) -> str:
    """`host:port` of an engine's URL. Raises: ValueError if it is not an HTTP URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def root_of(url: str) -> str:
    """The server's URL without the `/v1` that users may include."""
    return url.rstrip("/").removesuffix("/v1")


def is_fenced(model: str, served: str) -> bool:
    """Whether `served` is `model` with a generation: `policy-g17`."""
    return re.fullmatch(re.escape(model) + r"-g\d+", served) is not None
