"""Sessions: who may call, many turns at a time, each journaled before it is answered.

Owns a session's life (open, calls, seal, close), its place in the journal beside other gateway
processes, and what is kept in memory. How a turn is made is in `turns`, what extends what in
`chains`, the wire in `app` and `dialects`.
"""

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import structlog

from perdure.dialects.base import Answer, ModelRequest, Refused
from perdure.engines.base import TOO_STALE, Wait
from perdure.engines.configured import Engines
from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound
from perdure.gateway.base import SESSION_ID, SessionSpec, SessionSummary
from perdure.gateway.canonical import ToolDigests
from perdure.gateway.chains import Node, Place, Tree
from perdure.gateway.journal.base import Journal, Overtaken
from perdure.gateway.journal.partials import Partials
from perdure.gateway.journal.turn_record import (
    CLOSED,
    OPEN,
    SEALED,
    STALE,
    TurnRecord,
    to_journal,
    turn_deltas,
    turn_records,
)
from perdure.gateway.metrics import Metrics
from perdure.gateway.rendering.tokenizers import Format
from perdure.gateway.replay import Recorded, Recording
from perdure.gateway.session import CallKey, Session
from perdure.gateway.turns import Asked, TurnMaker, replayed
from perdure.storage.base import Store

MAX_WAITING = 64
"""Calls of one session that may be in flight; parallel sub-agents need one each."""
IDLE_S = 300.0
"""A session not called for so long is read back from the journal when it is called again."""
TREE_BYTES = 192 << 20
"""Trees kept in memory; beyond it the ones not called for longest are let go earlier."""
KEPT_SESSIONS = 4096
"""Sessions whose rules and sums are kept; others are read back when they are asked for."""
TRIM_EVERY_S = 1.0

log = structlog.get_logger()


class Sessions:
    """All sessions of this gateway process."""

    def __init__(
        self,
        journal: Journal,
        engines: Engines,
        model_format: Format,
        store: Store,
        metrics: Metrics,
        *,
        partials: Partials,
    ) -> None:
        self._partials = partials
        self._journal = journal
        self._store = store
        self._metrics = metrics
        self._maker = TurnMaker(model_format, engines, metrics, partials)
        self._tool_digests = ToolDigests()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._loading = asyncio.Lock()
        self._trimmed = 0.0

    # --- control -------------------------------------------------------------------------------

    async def open(self, spec: SessionSpec) -> SessionSummary:
        """Repeating with the same spec joins; a closed session stays closed.

        Raises: ConfigurationError when the session exists with another spec.
        """
        async with self._loading:
            session = await self._find(spec.session_id) or await self._create(spec)
        if session.spec != spec:
            changed = [
                name
                for name in SessionSpec.model_fields
                if getattr(spec, name) != getattr(session.spec, name)
            ]
            raise ConfigurationError(
                f"session {spec.session_id!r} is open with another {', '.join(changed)}"
            )
        return session.summary()

    async def _create(self, spec: SessionSpec) -> Session:
        record = {"kind": OPEN, "spec": spec.model_dump(mode="json")}
        try:
            await self._append(spec.session_id, record, 0)
        except Overtaken:  # another process opened it this moment
            found = await self._find(spec.session_id)
            assert found is not None
            return found
        return self._keep(Session(spec, position=1, tree=Tree(self._tool_digests)))

    async def get(self, session_id: str) -> SessionSummary:
        """Raises: NotFound."""
        async with self._using(session_id) as session:
            await self._refresh(session)
            return session.summary()

    async def close(self, session_id: str) -> SessionSummary:
        """Seal the session, write its turns to the store. Calls in flight are abandoned.

        Repeating gives the same summary. Raises: NotFound, StoreUnavailable (repeat the call).
        """
        async with self._using(session_id) as session, session.close_lock:
            if not session.closed:
                await self._seal(session)
                await self._store.put(session.spec.turns_key, await self._turns(session_id))
                await self._mark(session, CLOSED)
                self._partials.left(session_id)
                session.forget()
            return session.summary()

    async def _seal(self, session: Session) -> None:
        session.sealing = True
        for call in session.sampling:
            call.cancel()
        # Turns that already left the engine are journaled first.
        await asyncio.gather(*session.calls.values(), return_exceptions=True)
        await self._mark(session, SEALED)

    async def _mark(self, session: Session, kind: str) -> None:
        """Write that a session is sealed or closed, unless another process already has."""
        async with session.commit_lock:
            while not getattr(session, kind):
                try:
                    await self._append(session.spec.session_id, {"kind": kind}, session.position)
                except Overtaken:
                    await self._read_on(session)
                else:
                    session.replay({"kind": kind})

    async def _note_stale(self, session: Session, message: str) -> None:
        record = {"kind": STALE, "message": message}
        async with session.commit_lock:
            while not (session.too_stale or session.sealed):
                try:
                    await self._append(session.spec.session_id, record, session.position)
                except Overtaken:
                    await self._read_on(session)
                else:
                    session.replay(record)

    async def _turns(self, session_id: str) -> bytes:
        records = await self._journal.read(session_id)
        return await asyncio.to_thread(_pack, records)

    # --- memory --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _using(self, session_id: str) -> AsyncIterator[Session]:
        """A session that stays in memory meanwhile. Raises: NotFound."""
        session = self._sessions.get(session_id) or await self._load(session_id)
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            session.touched = time.monotonic()
            self._sessions.move_to_end(session_id)
            self._trim()

    async def _load(self, session_id: str) -> Session:
        async with self._loading:
            known = re.match(SESSION_ID, session_id)  # also keeps paths out of the journal
            session = await self._find(session_id) if known else None
        if session is None:
            raise NotFound(f"no session {session_id!r}")
        return session

    async def _find(self, session_id: str) -> Session | None:
        """The session, read back from its journal when this process does not hold it."""
        if (session := self._sessions.get(session_id)) is not None:
            return session
        records = await self._journal.read(session_id)
        if not records:  # killed while opening: nobody was told that it is open
            return None
        session = Session(SessionSpec.model_validate(records[0]["spec"]))
        session.awaken(self._tool_digests, records)
        if session.closed:
            session.forget()
        log.info("session read back", session_id=session_id, turns=session.totals.turns)
        return self._keep(session)

    def _keep(self, session: Session) -> Session:
        self._sessions[session.spec.session_id] = session
        self._metrics.sessions.set(len(self._sessions))
        return session

    async def _awake(self, session: Session) -> Tree:
        """The session's tree, read back when it was let go; and what it may replay."""
        if session.tree is None or self._lacks_recording(session):
            async with session.commit_lock:
                if session.tree is None:
                    records = await self._journal.read(session.spec.session_id)
                    session.awaken(self._tool_digests, records)
                if self._lacks_recording(session):
                    session.recording = await self._recording(session)
        assert session.tree is not None
        return session.tree

    def _lacks_recording(self, session: Session) -> bool:
        return session.spec.replay_of is not None and session.recording is None

    async def _recording(self, session: Session) -> Recording:
        earlier = session.spec.replay_of
        assert earlier is not None
        recording = Recording(earlier, turn_records(await self._journal.read(earlier)))
        own = await self._journal.read(session.spec.session_id)
        for record in turn_records(own[: session.position]):
            recording.committed(record)
        return recording

    def _trim(self) -> None:
        """Let go of the trees of idle sessions, and of sessions nobody asked for in long."""
        now = time.monotonic()
        if now - self._trimmed < TRIM_EVERY_S:
            return
        self._trimmed = now
        idle = [s for s in self._sessions.values() if s.tree is not None and not s.busy]
        weight = sum(s.tree.weight for s in self._sessions.values() if s.tree is not None)
        for session in idle:  # the one not called for longest comes first
            if weight <= TREE_BYTES and now - session.touched < IDLE_S:
                break
            weight -= session.tree.weight if session.tree is not None else 0
            session.forget()
        surplus = len(self._sessions) - KEPT_SESSIONS
        for session in [s for s in self._sessions.values() if not s.busy][: max(0, surplus)]:
            del self._sessions[session.spec.session_id]
        self._metrics.sessions.set(len(self._sessions))

    # --- calls ---------------------------------------------------------------------------------

    async def complete(self, session_id: str, request: ModelRequest) -> Answer:
        """The answer to one model call, durable when it returns.

        A retry joins the call in flight or repeats the recorded answer. The call goes on when the
        client goes away. Raises: Refused, GatewayUnavailable, NotFound.
        """
        async with self._using(session_id) as session:
            session.check_open()
            tree = await self._awake(session)
            session.check_open()  # it may have been closed meanwhile
            place = tree.place(request)
            key = (request.chain, place.digests.exact)
            call = session.calls.get(key)
            if call is not None:
                self._metrics.retries.labels("joined").inc()
            elif (node := self._recorded(session, key)) is not None:
                return node.answer
            else:
                call = self._start(session, request, place, key)
            return await asyncio.shield(call)

    async def count_tokens(self, session_id: str, request: ModelRequest) -> int:
        """Tokens of the request as rendered anew; nothing is sampled or recorded.

        Raises: Refused, NotFound.
        """
        async with self._using(session_id) as session:
            session.check_open()
            return await self._maker.count(request)

    def _start(
        self, session: Session, request: ModelRequest, place: Place, key: CallKey
    ) -> "asyncio.Task[Answer]":
        if len(session.calls) >= MAX_WAITING:
            raise Refused(
                429, "too_many_calls", f"this session has {MAX_WAITING} calls in flight already"
            )
        call = asyncio.create_task(self._turn(session, request, place))
        session.calls[key] = call
        call.add_done_callback(lambda task: _forget(session, key, task))
        return call

    def _recorded(self, session: Session, key: CallKey, since: int | None = None) -> Node | None:
        """The turn that answered the same request already, if its answer may be repeated."""
        assert session.tree is not None
        node = session.tree.recorded(*key, since)
        if node is not None:
            node.repeats += 1
            self._metrics.replays.inc()
            self._metrics.retries.labels("repeated").inc()
        return node

    async def _turn(self, session: Session, request: ModelRequest, place: Place) -> Answer:
        arrived = time.time()
        assert session.tree is not None
        known = len(session.tree.nodes)
        if await self._refresh(session):
            place = session.tree.place(request)
            key = (request.chain, place.digests.exact)
            if (node := self._recorded(session, key, known)) is not None:
                return node.answer
        asked = Asked(session, request, place, arrived)
        recorded = self._replayable(asked)
        if recorded is None:
            answer = await self._commit(asked, known, await self._sampled(asked))
            self._partials.done(session.spec.session_id, asked.call)
            return answer
        try:
            return await self._commit(asked, known, replayed(asked, recorded))
        except BaseException:
            assert session.recording is not None
            session.recording.give_back(recorded)
            raise

    async def _sampled(self, asked: Asked) -> TurnRecord:
        """A refusal that ends the rollout is journaled: whoever watches it may ask elsewhere."""
        session = asked.session
        try:
            return await self._maker.sampled(asked)
        except Refused as refused:
            if refused.code == TOO_STALE:
                await self._note_stale(session, str(refused))
            raise
        except GatewayUnavailable as error:
            since = session.unanswered.since if session.unanswered else asked.arrived
            session.unanswered = Wait(since=since, reason=str(error))
            raise

    def _replayable(self, asked: Asked) -> Recorded | None:
        recording = asked.session.recording
        if recording is None:
            return None
        return recording.take(asked.request.chain, asked.place.digests.across)

    async def _commit(self, asked: Asked, known: int, draft: TurnRecord) -> Answer:
        """Journal a turn, unless another process answered the same request meanwhile.

        `known`: how many turns the session had, for us, when the call came.
        """
        session, request = asked.session, asked.request
        async with session.commit_lock:
            while True:
                if session.sealed:
                    session.check_open()
                assert session.tree is not None
                record = replace(draft, index=len(session.tree.nodes))
                try:
                    fields = to_journal(record)
                    await self._append(session.spec.session_id, fields, session.position)
                    break
                except Overtaken:
                    await self._read_on(session)
                    node = session.tree.recorded(request.chain, record.request_sha256, known)
                    if node is not None:
                        self._metrics.retries.labels("overtaken").inc()
                        return node.answer
            session.position += 1
            node = session.apply(record, asked.place.rolled)
            session.elsewhere = None
        self._count(node, record)
        return record.answer

    # --- journal -------------------------------------------------------------------------------

    async def _refresh(self, session: Session) -> bool:
        """Whether other processes wrote something that we did not know."""
        if session.closed:
            return False
        async with session.commit_lock:
            return await self._read_on(session)

    async def _read_on(self, session: Session) -> bool:
        session_id = session.spec.session_id
        records = await self._journal.read(session_id, session.position)
        if records and session.tree is None:  # let go while it was idle
            session.awaken(self._tool_digests, await self._journal.read(session_id))
            return True
        for record in records:
            session.replay(record)
        return bool(records)

    async def _append(self, session_id: str, record: dict[str, Any], position: int) -> None:
        started = time.monotonic()
        await self._journal.append(session_id, record, position=position)
        self._metrics.journal_seconds.observe(time.monotonic() - started)

    def _count(self, node: Node, record: TurnRecord) -> None:
        metrics = self._metrics
        metrics.turns.labels(record.finish_reason.value).inc()
        metrics.tokens.labels("sampled").inc(0 if record.replayed_from else len(node.completion))
        metrics.tokens.labels("prompt").inc(node.prompt_length)
        metrics.engine_seconds.observe(record.engine_seconds)
        if record.miss is not None:
            metrics.bridge_misses.labels(record.miss).inc()
        for change in record.echo_changes:
            metrics.echo_changes.labels(change).inc()
        if record.replayed_from:
            metrics.replayed_turns.inc()
        if record.placeholder:
            metrics.placeholders.inc()
        if node.parent is not None and node.parent.children > 1:
            metrics.forks.inc()


def _forget(session: Session, key: CallKey, call: "asyncio.Task[Answer]") -> None:
    session.calls.pop(key, None)
    if not call.cancelled() and call.exception() is not None:
        log.info("call failed", session_id=session.spec.session_id, error=repr(call.exception()))


def _pack(records: list[dict[str, Any]]) -> bytes:
    from perdure.episodes import turns as codec  # pyarrow: only when a session closes

    return codec.encode_deltas(codec.Delta(*delta) for delta in turn_deltas(turn_records(records)))
