"""The state of one engine: its record, its generation, and which changes of state are allowed.

The records are stored by `roster`; `health` finds out what state an engine is in.
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
"""Value of `condemned` if nothing distinguishes the engine's starts. Only a person can bring it
back."""


class EngineSpec(NamedTuple):
    """An engine that a user names, in the settings or at run time."""

    url: str
    weight: float = 1.0
    kind: Literal["vllm", "sglang"] = "vllm"


class EngineState(StrEnum):
    STARTING = "starting"
    """Known but not proven: this generation has not sampled a token yet."""
    READY = "ready"
    """The only state that takes new calls."""
    DRAINING = "draining"
    """Finishes its calls until `drain_by`, takes no new ones, then leaves."""
    PAUSED = "paused"
    """Its scheduler is stopped, for new weights."""
    SUSPECT = "suspect"
    """It stopped answering or sampling. Its calls were moved; it is probed again."""
    DEAD = "dead"
    """Every answer of this generation is dropped. If the engine comes back, it gets a new one."""


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
"""A DEAD engine leaves that state only by `reborn`."""


class ServedModel(Frozen):
    """The model behind an engine's address. Empty: the engine does not tell."""

    root: str = ""
    """As `/v1/models` reports it: a name, or the folder that it was loaded from."""
    tokenizer: str = ""
    """Digest of the ids that it makes of one text."""

    def replaced_by(
        self, other: "ServedModel", version: int | None, newer: int | None
    ) -> str | None:
        """Why another start may not go on where this one stopped; None: it may.

        A higher policy version says that another root is an update of the weights. Another tokenizer
        never is one, because recorded ids would mean other texts.
        """
        if self.tokenizer and other.tokenizer not in ("", self.tokenizer):
            models = f"{other.root or 'a model'} in place of {self.root or 'another'}"
            return f"its address now serves another tokenizer ({models})"
        if not self.root or other.root in ("", self.root):
            return None
        if newer is not None and newer > (-1 if version is None else version):
            return None
        return f"its address now serves the model {other.root} in place of {self.root}"

    def updated(self, other: "ServedModel") -> "ServedModel":
        """With what the newest start told."""
        told = {name: value for name, value in other if value}
        return self.model_copy(update=told)


class EngineRecord(Frozen):
    """One engine, as all gateways and managers of a home see it.

    Example:
        EngineRecord(name="10.0.0.7:8000", url="http://10.0.0.7:8000", generation=17,
                     state="ready", start_id="policy-g17", version=3)
    """

    name: str
    """`host:port`: its name for people and for the control API."""
    url: str
    weight: float = Field(1.0, gt=0)
    """Its share of new sessions, relative to the others."""
    model: str
    """The name it serves the policy under. If `start_id` is a fenced name, requests carry that."""
    kind: Literal["vllm", "sglang"] = "vllm"
    """Which server's token endpoint and control routes it has."""
    generation: int
    """Fencing number of this start of the engine; the home never gives it again."""
    state: EngineState = EngineState.STARTING
    reason: str = ""
    """Why it is in this state, for people."""
    since: float = 0.0
    """Unix seconds of the last change of state."""
    start_id: str = ""
    """Identifies this start of the server: its fenced model name, or its process's start time."""
    served: ServedModel = ServedModel()
    """What this start, or the last one that told, serves."""
    condemned: str = ""
    """A weight update broke the engine with this `start_id`, so that start may not serve again."""
    held_by: str = ""
    """What paused it and will release it, such as `update 7`."""
    version: int | None = None
    """Policy version of its weights. None: not known, or being changed."""
    coming: int | None = None
    """The version that the update in progress brings."""
    deaths: int = 0
    """Consecutive deaths, without `STABLE_S` of service between them."""
    not_before: float = 0.0
    """Unix seconds before which a dead engine is not probed again."""
    drain_by: float | None = None
    behind_proxy: bool = False
    """An `EngineProxy` before it asks for the home's engine keys."""
    from_settings: bool = False
    """Named by the settings of some gateway, and used by those gateways only."""
    removed: bool = False
    """Taken out by a person, though the settings still name it."""

    @property
    def serves(self) -> bool:
        return self.state is EngineState.READY

    @property
    def wire_model(self) -> str:
        """The model name in requests. If it is fenced, another start answers 404, not tokens."""
        return self.start_id if is_fenced(self.model, self.start_id) else self.model

    @property
    def backoff_s(self) -> float:
        """Seconds that it is left alone after its death."""
        return self.not_before - self.since

    def to(self, state: EngineState, reason: str = "", **changes: Any) -> "EngineRecord":
        """The record after a change of state. Raises: ValueError if the change is not allowed."""
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
        """Dead and marked as removed, so that a gateway's settings do not bring it back."""
        return self.to(EngineState.DEAD, "removed", removed=True, held_by="")

    def reborn(self, generation: int, start_id: str) -> "EngineRecord":
        """The next start of this engine, not proven yet."""
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
        """Whether this start may serve: it is not the one that was condemned."""
        return not self.condemned or self.condemned not in (ANY_START, start_id)


def backoff_s(deaths: int) -> float:
    """Seconds that a crash-looping engine is left alone: 0 after its first death, then 1, 2, 4."""
    if deaths <= 1:
        return 0.0
    return min(FIRST_BACKOFF_S * 2.0 ** min(deaths - 2, 30), LONGEST_BACKOFF_S)


def name_of(url: str) -> str:
    """`host:port` of an engine's URL. Raises: ValueError for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// URL")
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def root_of(url: str) -> str:
    """The server's URL without the `/v1` that people paste."""
    return url.rstrip("/").removesuffix("/v1")


def is_fenced(model: str, served: str) -> bool:
    """Whether `served` is `model` with a generation: `policy-g17`."""
    return re.fullmatch(re.escape(model) + r"-g\d+", served) is not None
