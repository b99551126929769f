"""One completion on its way through engines: what it asks, what it has, how long it waits.

Owns no engine and no queue; `pool` takes it from one to the next.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from perdure.engines.base import Completion
from perdure.engines.clients.token_server import Ask, Broken
from perdure.engines.clients.wire import FIRST_PAUSE_S, LONGEST_PAUSE_S
from perdure.engines.pool.leases import Boot
from perdure.engines.pool.salvage import Salvage, resumable
from perdure.engines.pool.seats import Seat
from perdure.engines.pool.versions import Versions
from perdure.engines.prompt_ids import PromptIds
from perdure.types import FinishReason

MOST_MOVES = 50
"""Engines that one call may lose before it is given up."""


@dataclass(eq=False)
class Call:
    """One completion on its way through engines."""

    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    session_id: str
    request_id: str
    labels: Mapping[str, str]
    salvage: Salvage
    last: Boot | None = None
    """Where another process had the session."""
    seat: Seat | None = None
    avoid: set[str] = field(default_factory=set)
    moves: int = 0
    gained: int = 0
    """Tokens of the last engine that were kept."""
    _since: float = field(default_factory=time.monotonic)
    _pause: float = FIRST_PAUSE_S

    @property
    def group(self) -> str:
        return self.labels.get("group", "")

    @property
    def run(self) -> str:
        return self.labels.get("run", "")

    @cached_property
    def versions(self) -> Versions:
        return Versions.of(self.labels)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.salvage.ids)

    def ask(self, model: str) -> Ask:
        """Prompt and salvage, for what is missing. A try's id is its own: engines run equal ids twice."""
        held = len(self.salvage.ids)
        sampling, prompt = self.sampling, self.prompt_ids
        if held:
            prompt = PromptIds.of([*prompt, *self.salvage.ids])
            if "max_tokens" in sampling:
                sampling = {**sampling, "max_tokens": sampling["max_tokens"] - held}
        request_id = self.request_id if not self.moves else f"{self.request_id}-{self.moves}"
        return Ask(model, prompt, sampling, self.session_id, request_id)

    def lost(self, broken: Broken, seat: Seat) -> FinishReason | None:
        """Take note; the finish reason when nothing was missing but the engine's saying so."""
        self.moves += 1
        self.avoid = {seat.record.name}
        self.gained = self.salvage.part
        if not resumable(self.sampling):
            self.salvage.cut()
            self.gained = 0
        if self.gained:
            self.be_patient()
            self._pause = FIRST_PAUSE_S
        return self.ended()

    def ended(self) -> FinishReason | None:
        """The finish reason that nobody said, when nothing more may be sampled."""
        ids = self.salvage.ids
        if ids and ids[-1] in self.sampling.get("stop_token_ids", ()):
            return FinishReason.STOP
        if ids and len(ids) >= self.sampling.get("max_tokens", len(ids) + 1):
            return FinishReason.LENGTH
        return None

    @property
    def fit(self) -> int:
        """Tokens before the first that its group may not be sampled by, whatever was known then."""
        spans = self.salvage.versions if self.versions.last is not None else ()
        outside = (span.start for span in spans if not self.versions.include(span.version))
        return next(outside, len(self.salvage.ids))

    def be_patient(self) -> None:
        """What it waits for is on its way: patience begins anew."""
        self._since = time.monotonic()

    def patience(self, patience_s: float) -> float:
        """Seconds left without progress."""
        return max(0.0, self._since + patience_s - time.monotonic())

    def pause(self, retry_after: float | None) -> float:
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE_S)
        return min(max(retry_after or 0.0, pause), LONGEST_PAUSE_S)

    def completion(self, reason: FinishReason, engine: str) -> Completion:
        salvage = self.salvage
        return Completion(
            salvage.ids,
            salvage.logprobs,
            reason,
            tuple(salvage.versions),
            engine,
            tuple(salvage.engines),
        )
