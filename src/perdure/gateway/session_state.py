"""One session in a gateway's memory, in two states: asleep (`Session` alone) and awake (`Awake`).

Owns how a journal record changes a session. `session_manager` owns its calls and the journal itself.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perdure.dialects.base import MAIN, Answer, ModelRequest, Refused
from perdure.engines.base import Wait
from perdure.gateway.base import STOPPED_OUTSIDE, SessionSpec, SessionSummary
from perdure.gateway.journal.record_encoding import JournalDamaged
from perdure.gateway.journal.turn_record import (
    CAPPED,
    CLOSED,
    DAMAGED,
    REFUSED,
    RETOKENIZED,
    SEALED,
    STALE,
    STOPPED,
    TURN,
    UNANSWERED,
    TurnRecord,
    usage_of,
)
from perdure.gateway.mcp.mcp_call_record import (
    MCP_BEGUN,
    MCP_CALL,
    MCP_ENDED,
    MCP_FAILED,
    content_size,
)
from perdure.gateway.rate_limits import Pace
from perdure.gateway.session_model import SessionModels
from perdure.gateway.turns.attempt_replay import Recording
from perdure.gateway.turns.canonical_request import RunningDigests, ToolDigests
from perdure.gateway.turns.identical_calls import Caller
from perdure.gateway.turns.turn_chains import Node, Tree
from perdure.types import EngineSpan, Price, Purpose

CallKey = tuple[str, str]
"""Chain and request digest."""


def chain_of(chain: str, purpose: Purpose) -> str:
    """The key under which a failed call is noted. The next answer with the same key clears the note. All
    side requests share one key."""
    return chain if purpose.is_of_trajectory else purpose.value


@dataclass
class Totals:
    """Running sums over a session's turns, for its summary."""

    turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    dollars: float = 0.0
    """Cost of its calls, if its caps have a price."""
    mark: str = ""
    """The first mark of a turn, which all later calls of the agent carry too."""
    trainable: bool = True
    engine_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Seconds in which at least one call waited; calls of sub-agents may wait at the same time."""
    waited_until: float = 0.0
    """Unix seconds."""
    replayed_turns: int = 0
    replayed_tokens: int = 0
    versions: set[int] = field(default_factory=set)
    chains: set[str] = field(default_factory=set)
    misses: Counter[str] = field(default_factory=Counter)

    def add(self, record: TurnRecord, price: Price | None = None) -> None:
        used = usage_of(record)
        self.prompt_tokens += used.prompt_tokens
        if price is not None:
            self.dollars += price.of(used.prompt_tokens, used.cached_tokens, used.sampled_tokens)
        sampled = record.answer.usage.get("completion_tokens")
        tokens = sampled if isinstance(sampled, int) else 0
        self.mark = self.mark or record.mark
        self.turns += 1
        self.tokens += tokens
        self.engine_seconds += record.engine_seconds
        self._add_wait(record.started_at, record.started_at + record.waiting_seconds)
        if record.purpose is not Purpose.STRAY:
            self.chains.add(record.chain)
        if record.purpose.is_of_trajectory:  # another model may answer the others
            self.trainable = self.trainable and bool(record.completion)
            self.versions.update(span.version for span in record.versions)
        if record.replayed_from:
            self.replayed_turns += 1
            self.replayed_tokens += tokens
        if record.bridge_miss is not None:
            self.misses[record.bridge_miss] += 1

    def _add_wait(self, since: float, until: float) -> None:
        self.waiting_seconds += max(0.0, until - max(since, self.waited_until))
        self.waited_until = max(until, self.waited_until)


@dataclass(eq=False)
class Session:
    """One attempt of one rollout: the part of a session that stays in memory while it sleeps."""

    spec: SessionSpec
    models: SessionModels
    pace: Pace = field(default_factory=Pace)
    totals: Totals = field(default_factory=Totals)
    awake: "Awake | None" = None
    """Its turns as a tree. None while it sleeps; then only the journal holds its turns."""
    position: int = 0
    """How many journal records this process knows, and so the number of the next record."""
    sealing: bool = False
    sealed: bool = False
    closed: bool = False
    turns_sha256: str = ""
    elsewhere: EngineSpan | None = None
    """The engine on which another process sampled the newest turn, and which has its KV cache."""
    too_stale: str = ""
    """Why no engine may sample for it any more; empty until a call is refused for this reason."""
    tokenizer_changed: str = ""
    """Why no engine can read its ids any more; empty until a call is refused for this reason."""
    damaged: str = ""
    """Why its attempt must end: see `SessionSummary.damaged`."""
    capped: str = ""
    """Which cap is reached; empty until a call is refused for it."""
    stopped: bool = False
    """Whether its rollout has been stopped, so that it takes no more calls."""
    mcp_failed: str = ""
    """Why a call of an MCP server got no answer; empty if each got one. The first reason stays."""
    mcp_begun: dict[str, str] = field(default_factory=dict)
    """Id of each open MCP call -> its server, as messages name it."""
    mcp_known: set[str] = field(default_factory=set)
    """Ids of all MCP calls that have begun."""
    mcp_here: set[str] = field(default_factory=set)
    """Ids of the open MCP calls that this process sent."""
    mcp_ended: set[str] = field(default_factory=set)
    """The sessions at MCP servers that the agent has ended."""
    mcp_recorded: int = 0
    """Characters recorded of calls of MCP servers."""
    unreadable: bool = False
    """Whether its journal cannot be read. Nothing is then added to it."""
    unanswered: dict[str, Wait] = field(default_factory=dict)
    """By chain: the wait of its newest call, if that got no answer. The agent may try again."""
    refused: str = ""
    """What the engine said when it refused a call before the first answer."""
    refusals: int = 0
    """How often the engine did so, as counted by this process."""
    commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the journal is read or written for this session."""
    close_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: "dict[CallKey, asyncio.Task[Answer]]" = field(default_factory=dict)
    """Calls in flight. A retry joins one; a sibling is a separate call."""
    callers: "dict[CallKey, list[Caller]]" = field(default_factory=dict)
    """The callers that wait for each call in flight."""
    unwritten: dict[CallKey, TurnRecord] = field(default_factory=dict)
    """Sampled turns that could not be journaled. A repeated call journals them and gets their answer."""
    sampling: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """Engine calls in flight. Closing the session cancels them."""
    users: int = 0
    touched: float = field(default_factory=time.monotonic)

    @property
    def busy(self) -> bool:
        return bool(self.users or self.calls)

    def check_open(self) -> None:
        if self.damaged:
            problem = f"this session records no more turns: {self.damaged}"
            raise Refused(403, "session_damaged", problem)
        if self.sealing or self.sealed:
            raise Refused(403, "session_closed", "this session is closed: its attempt has ended")

    @contextlib.contextmanager
    def record_journal_damage(self) -> Iterator[None]:
        """Wraps an access to its journal, and notes damage that the access finds."""
        try:
            yield
        except JournalDamaged as error:
            self.damaged, self.unreadable = self.damaged or str(error), True
            raise

    def wake(self, tool_digests: ToolDigests, records: Sequence[dict[str, Any]]) -> "Awake":
        """Rebuild its tree from all its journal records."""
        self.totals, self.position, self.mcp_recorded = Totals(), 0, 0
        awake = Awake(self, Tree(tool_digests))
        for record in records:
            awake.replay(record)
        self.awake = awake
        return awake

    def sleep(self) -> None:
        """Free the memory of its tree, which the journal can restore."""
        self.awake = None

    def note(self, record: dict[str, Any]) -> None:
        """Apply one journal record that is not a turn."""
        self.position += 1
        if record["kind"] == SEALED:
            self.sealed = True
        elif record["kind"] == CLOSED:
            self.sealed = self.closed = True
            self.turns_sha256 = record.get("turns_sha256", "")
        elif record["kind"] == DAMAGED:
            self.damaged = record["message"]
        elif record["kind"] == STALE:
            self.too_stale = record["message"]
        elif record["kind"] == RETOKENIZED:
            self.tokenizer_changed = record["message"]
        elif record["kind"] == CAPPED:
            self.capped = record["message"]
        elif record["kind"] == STOPPED:
            self.stopped = True
        elif record["kind"] == MCP_BEGUN:
            self.mcp_begun[record["call"]] = record["place"]
            self.mcp_known.add(record["call"])
        elif record["kind"] == MCP_CALL:
            self.mcp_begun.pop(record["call"], None)
            self.mcp_here.discard(record["call"])
            self.mcp_recorded += content_size(record)
        elif record["kind"] == MCP_FAILED:
            self.mcp_failed = self.mcp_failed or record["message"]
        elif record["kind"] == MCP_ENDED:
            self.mcp_ended.add(record["session"])
        elif record["kind"] == REFUSED:
            self.refused = record["message"]
        elif record["kind"] == UNANSWERED:
            until = record.get("until", 0.0)
            wait = Wait(since=record["since"], reason=record["reason"], until=until)
            self.unanswered[record.get("chain", MAIN)] = wait

    def answered(self, chain: str, purpose: Purpose) -> None:
        """Clear the failed calls that this answer makes up for. A step of the main agent clears all of
        them. An answer to another chain or to a side request says nothing about the main agent."""
        if chain == MAIN and purpose.is_of_trajectory:
            self.unanswered.clear()
        else:
            self.unanswered.pop(chain_of(chain, purpose), None)

    def attributed(self, request: ModelRequest) -> ModelRequest:
        """The request as it is if the agent made it, otherwise as a stray one. Once a turn has a
        mark, only requests with the same mark are the agent's. Requests that another model answers
        get a separate chain and are not trained."""
        if self.totals.mark not in ("", request.mark):
            stray = Purpose.STRAY
            return replace(request, chain=stray.value, parent_chain="", purpose=stray)
        model = self.models.of(request.model)
        if model.name == self.models.main.name:
            return request
        return replace(
            request,
            chain=f"{request.chain}@{model.name}",
            parent_chain=request.chain,
            purpose=Purpose.SIDE,
        )

    @property
    def mcp_elsewhere(self) -> list[str]:
        """The servers of the MCP calls that another process has sent and that have not ended."""
        return [place for call, place in self.mcp_begun.items() if call not in self.mcp_here]

    @property
    def reached_cap(self) -> str:
        """Which of its caps is reached, with figures; empty if none is. A stop counts as a cap."""
        if self.stopped:
            return STOPPED_OUTSIDE
        totals = self.totals
        tokens = totals.prompt_tokens + totals.tokens
        return self.spec.caps.reached(totals.turns, tokens, totals.dollars)

    @property
    def longest_unanswered(self) -> Wait | None:
        """The oldest wait for a quota's reset; without one, the oldest of all waits."""
        return min(
            self.unanswered.values(), key=lambda wait: (not wait.until, wait.since), default=None
        )

    def summary(self) -> SessionSummary:
        totals, unanswered = self.totals, self.longest_unanswered
        return SessionSummary(
            session_id=self.spec.session_id,
            open=not (self.sealed or self.damaged),
            turns=totals.turns,
            tokens=totals.tokens,
            trainable=totals.trainable,
            engine_seconds=totals.engine_seconds,
            waiting_seconds=totals.waiting_seconds,
            policy_version_min=min(totals.versions, default=None),
            policy_version_max=max(totals.versions, default=None),
            bridge_misses=dict(totals.misses),
            chains=len(totals.chains),
            too_stale=self.too_stale,
            tokenizer_changed=self.tokenizer_changed,
            capped=self.capped,
            stopped=self.stopped,
            damaged=self.damaged,
            turns_sha256=self.turns_sha256,
            refused=self.refused,
            refusals=self.refusals,
            replayed_turns=totals.replayed_turns,
            replayed_tokens=totals.replayed_tokens,
            waits=None if self.sealed else unanswered,
            unanswered=unanswered.reason if unanswered else "",
            mcp_failed=self.mcp_failed,
        )


@dataclass(eq=False)
class Awake:
    """A session with its turns in memory, so that it can take calls."""

    session: Session
    tree: Tree
    recording: Recording | None = None
    """The turns of an earlier attempt; None until they are read, or if the session replays none."""

    def replay(self, record: dict[str, Any]) -> None:
        """Apply one journal record that was read, not just written by this process."""
        if record["kind"] != TURN:
            return self.session.note(record)
        turn = TurnRecord.model_validate(record)
        self.apply(turn)
        self.session.elsewhere = turn.engines[-1] if turn.engines else None

    def apply(self, record: TurnRecord, rolled: RunningDigests | None = None) -> Node:
        """Add a committed turn. `rolled`: the digests of its request, if they are known."""
        node = self.tree.apply(record, rolled)
        self.session.position += 1
        self.session.totals.add(record, self.session.spec.caps.price)
        self.session.answered(record.chain, record.purpose)
        if self.recording is not None:
            self.recording.committed(record)
        return node
