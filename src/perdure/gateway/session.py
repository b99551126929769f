"""One session in a gateway's memory: its rules, its tree of turns, its sums.

Owns what a journal record does to a session. Calls and the journal itself are in `sessions`.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from perdure.dialects.base import Answer, Refused
from perdure.engines.base import Wait
from perdure.gateway.base import SessionSpec, SessionSummary
from perdure.gateway.canonical import Rolled, ToolDigests
from perdure.gateway.chains import Node, Tree
from perdure.gateway.journal.turn_record import (
    CLOSED,
    SEALED,
    STALE,
    TURN,
    TurnRecord,
    from_journal,
)
from perdure.gateway.replay import Recording
from perdure.types import EngineSpan

CallKey = tuple[str, str]
"""Chain and request digest."""


@dataclass
class Totals:
    """Running sums over a session's turns, for its summary."""

    turns: int = 0
    tokens: int = 0
    trainable: bool = True
    engine_seconds: float = 0.0
    replayed_turns: int = 0
    replayed_tokens: int = 0
    versions: set[int] = field(default_factory=set)
    chains: set[str] = field(default_factory=set)
    misses: Counter[str] = field(default_factory=Counter)

    def add(self, record: TurnRecord) -> None:
        sampled = record.answer.usage.get("completion_tokens")
        tokens = sampled if isinstance(sampled, int) else 0
        self.turns += 1
        self.tokens += tokens
        self.trainable = self.trainable and bool(record.completion)
        self.engine_seconds += record.engine_seconds
        self.chains.add(record.chain)
        self.versions.update(span.version for span in record.versions)
        if record.replayed_from:
            self.replayed_turns += 1
            self.replayed_tokens += tokens
        if record.miss is not None:
            self.misses[record.miss] += 1


@dataclass(eq=False)
class Session:
    """One attempt of one rollout. Its tree is in memory only while it is called."""

    spec: SessionSpec
    totals: Totals = field(default_factory=Totals)
    tree: Tree | None = None
    recording: Recording | None = None
    """What an earlier attempt recorded, while the tree is in memory."""
    position: int = 0
    """Journal records this process knows of: the number that the next one gets."""
    sealing: bool = False
    sealed: bool = False
    closed: bool = False
    elsewhere: EngineSpan | None = None
    """Where another process sampled its newest turn: its KV cache is there."""
    too_stale: str = ""
    """Why its calls are refused, in every gateway process, once one was."""
    unanswered: Wait | None = None
    """The engines gave up on its last call; the agent may try again."""
    commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the journal is read or written for this session."""
    close_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: "dict[CallKey, asyncio.Task[Answer]]" = field(default_factory=dict)
    """Calls in flight: an identical one joins."""
    sampling: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """Engine calls in progress, which closing the session abandons."""
    users: int = 0
    touched: float = field(default_factory=time.monotonic)

    @property
    def busy(self) -> bool:
        return bool(self.users or self.calls)

    def check_open(self) -> None:
        if self.sealing or self.sealed:
            raise Refused(403, "session_closed", "this session is closed: its attempt has ended")

    def replay(self, record: dict[str, Any]) -> None:
        """Take over one journal record that this process did not just write."""
        self.position += 1
        if record["kind"] == TURN:
            turn = from_journal(record)
            self.apply(turn)
            self.elsewhere = turn.engines[-1] if turn.engines else None
        elif record["kind"] == SEALED:
            self.sealed = True
        elif record["kind"] == CLOSED:
            self.sealed = self.closed = True
        elif record["kind"] == STALE:
            self.too_stale = record["message"]

    def apply(self, record: TurnRecord, rolled: Rolled | None = None) -> Node:
        assert self.tree is not None
        node = self.tree.apply(record, rolled)
        self.unanswered = None  # whichever process has got this answer
        self.totals.add(record)
        if self.recording is not None:
            self.recording.committed(record)
        return node

    def forget(self) -> None:
        """Let go of what the journal holds anyway."""
        self.tree = self.recording = None

    def awaken(self, tool_digests: ToolDigests, records: list[dict[str, Any]]) -> None:
        """Rebuild everything from the journal's records."""
        self.tree, self.totals, self.position = Tree(tool_digests), Totals(), 0
        for record in records:
            self.replay(record)

    def summary(self) -> SessionSummary:
        totals = self.totals
        return SessionSummary(
            session_id=self.spec.session_id,
            open=not self.sealed,
            turns=totals.turns,
            tokens=totals.tokens,
            trainable=totals.trainable,
            engine_seconds=totals.engine_seconds,
            policy_version_min=min(totals.versions, default=None),
            policy_version_max=max(totals.versions, default=None),
            bridge_misses=dict(totals.misses),
            chains=len(totals.chains),
            too_stale=self.too_stale,
            replayed_turns=totals.replayed_turns,
            replayed_tokens=totals.replayed_tokens,
            waits=None if self.sealed else self.unanswered,
        )
