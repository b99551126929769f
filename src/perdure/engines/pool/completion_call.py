"""One completion, which several engines may sample in turn: its request, its tokens, its patience.

`engine_pool` moves the call from engine to engine.
"""

import hashlib
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.engines.base import Completion
from perdure.engines.clients.hosted_requests import FIRST_PAUSE_S, LONGEST_PAUSE_S
from perdure.engines.clients.token_endpoint import BreakKind, EngineRequest, StreamBroken
from perdure.engines.engine_state import EngineRecord
from perdure.engines.pool.policy_versions import Versions
from perdure.engines.pool.pooled_engine import PooledEngine
from perdure.engines.pool.session_routing import EngineStart, holder
from perdure.engines.pool.token_salvage import Salvage, resumable
from perdure.types import DEFAULT_MODEL, EngineSpan, FinishReason, RoutedExperts
from perdure.types.kept_tokens import KeptTokens

MOST_MOVES = 50
"""Engines that one call may lose before it fails."""


@dataclass(eq=False)
class GenerateCall:
    """One completion, which several engines may sample in turn."""

    prompt_ids: Sequence[int]
    sampling: Mapping[str, Any]
    session_id: str
    request_id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """The session's labels. `group` and `run` decide its engine and its queue."""
    salvage: Salvage = field(default_factory=Salvage)
    """The tokens so far, from all engines."""
    last: EngineSpan | None = None
    """The engine that the session used in another process."""
    start: EngineStart | None = None
    """That engine, as the pool knows it; None once it has been used."""
    engine: PooledEngine | None = None
    """Set from the assignment of an engine until the call continues."""
    vocabulary: int | None = None
    """How many token ids the model has; None: not known."""
    model: str = DEFAULT_MODEL
    """The model that samples, as the roster names it."""
    tokenizer: str = ""
    """The tokenizer that encoded the prompt: the digest of its canary. Empty: not checked."""
    is_reserved: bool = False
    """Whether only engines that are reserved for the run may sample."""
    routed_from: int = 0
    """The first position of the prompt whose experts are not recorded yet."""
    avoid: set[str] = field(default_factory=set)
    moves: int = 0
    versions: Versions = field(init=False)
    """The versions that may sample it."""
    gained: int = 0
    """How many tokens of the last engine were kept."""
    waited_s: float = 0.0
    """Seconds in which the call was on no engine."""
    _since: float = field(default_factory=time.monotonic)
    _pause: float = FIRST_PAUSE_S

    def __post_init__(self) -> None:
        self.versions = Versions.of(self.labels)
        self.salvage.prompt_rows = max(0, len(self.prompt_ids) - 1 - self.routed_from)

    @property
    def group(self) -> str:
        return self.labels.get("group", "")

    @property
    def run(self) -> str:
        return self.labels.get("run", "")

    @property
    def holder(self) -> str:
        """The holder of the call's lease. A session holds one lease for each model that it
        calls."""
        return holder(self.session_id, self.model)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.salvage.ids)

    def ask(self, model: str) -> EngineRequest:
        """The request for the missing tokens, with the tokens so far at the end of the prompt.

        Each try has its own request id, because an engine runs a repeated id a second time.
        """
        held = len(self.salvage.ids)
        sampling, prompt = self.sampling, self.prompt_ids
        if held:
            prompt = array("i", prompt) + self.salvage.ids
            if "max_tokens" in sampling:
                sampling = {**sampling, "max_tokens": sampling["max_tokens"] - held}
            if sampling.get("seed") is not None:
                sampling = {**sampling, "seed": seed_after(sampling["seed"], held)}
        request_id = self.request_id if not self.moves else f"{self.request_id}-{self.moves}"
        return EngineRequest(
            *(model, prompt, sampling, self.session_id, request_id, self.vocabulary),
            routed_from=self.routed_from + self.salvage.rows,
        )

    def lost(self, broken: StreamBroken, engine: PooledEngine) -> FinishReason | None:
        """Note that the stream broke. Returns the finish reason if the completion only lacked that."""
        self.moves += 1
        self.avoid = {engine.record.name}
        if broken.kind is BreakKind.IMPOSSIBLE:
            self.salvage.cut_part()
        self.gained = self.salvage.part
        if not resumable(self.sampling):
            self.salvage.cut()
            self.gained = 0
        if self.gained:
            self.reset_patience()
            self._pause = FIRST_PAUSE_S
        return self.ended()

    def ended(self) -> FinishReason | None:
        """The finish reason, if no token may follow those so far."""
        ids = self.salvage.ids
        if ids and ids[-1] in self.sampling.get("stop_token_ids", ()):
            return FinishReason.STOP
        if ids and len(ids) >= self.sampling.get("max_tokens", len(ids) + 1):
            return FinishReason.LENGTH
        return None

    @property
    def fit(self) -> int:
        """How many leading tokens may be kept: all tokens before the first one from a version that the
        group does not accept."""
        spans = self.salvage.versions if self.versions.last is not None else ()
        outside = (span.start for span in spans if not self.versions.include(span.version))
        return next(outside, len(self.salvage.ids))

    def reset_patience(self) -> None:
        """Restart the patience, because the call makes progress or waits only for room."""
        self._since = time.monotonic()

    def patience(self, patience_s: float) -> float:
        """Seconds left of `patience_s` without progress."""
        return max(0.0, self._since + patience_s - time.monotonic())

    def pause(self, retry_after: float | None) -> float:
        """Seconds to wait before the next try. They double each time."""
        pause, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE_S)
        return min(max(retry_after or 0.0, pause), LONGEST_PAUSE_S)

    def completion(self, reason: FinishReason, engine: str, record: EngineRecord) -> Completion:
        """`record`: the record of the engine that finished it."""
        salvage = self.salvage
        experts = salvage.experts
        return Completion(
            salvage.ids,
            salvage.logprobs,
            reason,
            tuple(salvage.versions),
            engine,
            tuple(salvage.engines),
            self.waited_s,
            asked_model=record.model,
            model=record.served.root or record.model,
            routed_experts=(
                None if experts is None else RoutedExperts.of(experts, self.routed_from)
            ),
            kept_tokens=None if (kept := salvage.kept) is None else KeptTokens.of(kept),
            preemptions=salvage.preemptions,
        )


def seed_after(seed: int, held: int) -> int:
    """The seed for the tokens after the first `held`. With the same seed, an engine would repeat the random
    draws of the first tokens, so that the new tokens would depend on them."""
    return int(hashlib.sha256(f"{seed}/{held}".encode()).hexdigest()[:12], 16)
