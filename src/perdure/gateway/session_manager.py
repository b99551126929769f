"""All sessions of a gateway process: admits calls, runs many turns concurrently, and journals each turn
before it answers.

Owns a session's life (open, calls, seal, close), its journal, which other gateway processes also write,
and what stays in memory. `turns.maker` makes a turn, `turns.chains` finds the turn that it continues,
`http.app` and `dialects` read and write the wire.
"""

import asyncio
import contextlib
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeVar

import structlog

from perdure import tracing
from perdure.dialects.base import MAIN, Answer, ModelRequest, Refused
from perdure.engines.base import OTHER_TOKENIZER, TOO_STALE, Wait
from perdure.engines.open_hours import models_open
from perdure.engines.quota_resets import QuotaReset, QuotaResets, model_account, model_name
from perdure.engines.waiting_calls import Waits
from perdure.errors import (
    Boundary,
    CallsRefused,
    ConfigurationError,
    GatewayUnavailable,
    NotFound,
    PerdureError,
    QuotaExhausted,
    RetryHere,
)
from perdure.gateway.base import SESSION_ID, SessionSpec, SessionSummary
from perdure.gateway.gateway_metrics import Metrics
from perdure.gateway.journal.closed_session_file import turns_file
from perdure.gateway.journal.record_encoding import JournalDamaged
from perdure.gateway.journal.turn_journal import Journal, Record, RecordNumberTaken
from perdure.gateway.journal.turn_record import (
    CAPPED,
    CLOSED,
    DAMAGED,
    OPEN,
    REFUSED,
    RETOKENIZED,
    SEALED,
    STALE,
    STOPPED,
    UNANSWERED,
    TurnRecord,
    to_journal,
    turn_records,
)
from perdure.gateway.mcp.mcp_call_record import (
    MCP_CALL,
    MCP_ENDED,
    MCP_FAILED,
    RECORDED,
    McpCall,
    begun_record,
    call_record,
    calls_file,
    calls_key,
    without_content,
)
from perdure.gateway.rate_limits import DEFAULT_CEILINGS, Ceilings, Pace
from perdure.gateway.session_model import ModelLoader, RecordedModels, SessionModels
from perdure.gateway.session_state import Awake, CallKey, Session, chain_of
from perdure.gateway.turns.attempt_replay import Recording
from perdure.gateway.turns.canonical_request import ToolDigests
from perdure.gateway.turns.identical_calls import UNKNOWN, Caller, is_retry, sibling_digest
from perdure.gateway.turns.tool_call_ids import CallIds
from perdure.gateway.turns.turn_chains import Location, Node
from perdure.gateway.turns.turn_maker import PendingTurn, TurnMaker, await_unless_closed, replayed
from perdure.storage.base import Store
from perdure.types import McpServer, Purpose

ENGINE_REFUSAL_HINTS = {
    "engine_refused": "",
    "context_length_exceeded": (
        " Raise sampling.max_context_tokens or the server's --max-model-len: the first prompt does not fit"
    ),
}
"""Engine refusals that every rollout would get at its first call, with the fix that the message lacks."""
MAX_WAITING = 64
"""Calls that one session may have in flight; each parallel sub-agent needs one."""
LONG_WAIT_S = 60.0
"""Seconds without an engine after which a call counts as unanswered even if its agent hung up. The
agents' own clients wait longer than this."""
IDLE_S = 300.0
"""Seconds without a call after which a session goes to sleep. The next call reads it back from the
journal."""
TREE_BYTES = 192 << 20
"""Bytes of trees kept in memory. Above this, the least recently called sessions go to sleep earlier."""
KEPT_SESSIONS = 4096
"""How many sessions keep their rules and totals in memory. Others are read back when they are called."""
TRIM_EVERY_S = 1.0
HUNG_UP_KNOWN_S = 5.0
"""If an agent hangs up on an MCP call, a living gateway process records that within this time."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
"""Seconds before a call retries the journal. The pause doubles each time."""

log = structlog.get_logger()
Result = TypeVar("Result")


class Sessions:
    """All sessions of this gateway process."""

    def __init__(
        self,
        models: ModelLoader,
        store: Store,
        metrics: Metrics,
        *,
        secret: bytes,
        engine_url: str = "",
        open_hours: str = "",
        ceilings: Ceilings = DEFAULT_CEILINGS,
    ) -> None:
        """`secret`: marks the ids of tool calls; all processes of a home share it. `engine_url`: the
        endpoint that the settings name, whose quotas are noted. `open_hours`: as the setting."""
        self._resets, self._engine_url = QuotaResets(store, secret), engine_url
        self._open_hours = open_hours
        self._ceilings = ceilings
        self._journal = Journal(store)
        self._store = store
        self._metrics = metrics
        self._call_ids = CallIds(secret)
        self._maker = TurnMaker(metrics, self._call_ids)
        self._models = models
        self._tool_digests = ToolDigests()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.waiting = Waits()
        """Calls that wait for the journal."""
        self._loading = asyncio.Lock()
        self._trimmed = 0.0

    # --- control -------------------------------------------------------------------------------

    async def open(self, spec: SessionSpec) -> SessionSummary:
        """Open a session, or join it if it has the same spec. A closed or damaged one stays that way.

        Raises: ConfigurationError if the session exists with another spec, or if no engine has a model
        that it names; GatewayUnavailable, StoreUnavailable.
        """
        async with self._loading:
            session = await self._find(spec.session_id)
        if session is None:
            chosen = await self._models.chosen(spec)
            models = await self._models.loaded(chosen)
            async with self._loading:
                session = self._sessions.get(spec.session_id)
                session = session or await self._create(spec, chosen, models)
        if session.spec != spec and not session.damaged:
            changed = [
                name
                for name in SessionSpec.model_fields
                if getattr(spec, name) != getattr(session.spec, name)
            ]
            raise ConfigurationError(
                f"session {spec.session_id!r} is already open with another {', '.join(changed)}"
            )
        return session.summary()

    async def _create(
        self, spec: SessionSpec, chosen: RecordedModels, models: SessionModels
    ) -> Session:
        record = {
            "kind": OPEN,
            "spec": spec.model_dump(mode="json"),
            "models": chosen.model_dump(mode="json"),
            "tokenizers": models.tokenizers,
        }
        try:
            await self._append(spec.session_id, record, 0)
        except RecordNumberTaken:  # another process opened it at the same moment
            found = await self._find(spec.session_id)
            if found is None:
                problem = (
                    f"another gateway opened session {spec.session_id!r}, but it cannot be read"
                )
                raise GatewayUnavailable(problem) from None
            return found
        session = Session(spec, models, Pace(self._ceilings))
        session.wake(self._tool_digests, [record])
        return self._keep(session)

    async def get(self, session_id: str) -> SessionSummary:
        """Raises: NotFound."""
        async with self._using(session_id) as session:
            with contextlib.suppress(JournalDamaged), session.record_journal_damage():
                await self._refresh(session)
            return session.summary()

    async def stop(self, session_id: str) -> SessionSummary:
        """Refuse the session's next calls, as if a cap were reached. Calls in flight are answered.

        Repeating is harmless. Raises: NotFound, StoreUnavailable (repeat the call).
        """
        async with self._using(session_id) as session:
            await self._note(session, {"kind": STOPPED}, lambda: session.stopped)
            return session.summary()

    async def close(self, session_id: str) -> SessionSummary:
        """Abandon the session's calls in flight, seal it, and write its turns to the store. A damaged
        session's remaining records stay in its journal, for the next attempt.

        Repeating returns the same summary. Raises: NotFound, StoreUnavailable (repeat the call).
        """
        async with self._using(session_id) as session, session.close_lock:
            if not session.closed:
                with contextlib.suppress(JournalDamaged), session.record_journal_damage():
                    await self._close(session)
            return session.summary()

    async def _close(self, session: Session) -> None:
        session_id = session.spec.session_id
        if session.spec.mcp_servers:
            await self._note_broken_mcp_calls(session)
        await self._seal(session)
        records = await self._journal.read(session_id)
        turns = await asyncio.to_thread(turns_file, records)
        await self._store.put(session.spec.turns_key, turns)
        if calls := calls_file(records):
            await self._store.put(calls_key(session.spec.turns_key), calls)
        digest = hashlib.sha256(turns).hexdigest()
        await self._mark(session, {"kind": CLOSED, "turns_sha256": digest})
        session.sleep()

    async def write_turns(self, session_id: str) -> SessionSummary:
        """Close the session, and write its turns to the store again, from its journal.

        Raises: NotFound if its journal is gone or damaged; StoreUnavailable.
        """
        await self.close(session_id)
        async with self._using(session_id) as session:
            if session.damaged:
                raise NotFound(f"session {session_id!r} is damaged: {session.damaged}")
            records = await self._journal.read(session_id)
            turns = await asyncio.to_thread(turns_file, records)
            await self._store.put(session.spec.turns_key, turns)
            return session.summary()

    async def forget(self, session_id: str) -> None:
        """Close the session, which writes its turns to the store, then delete its journal. Repeating is
        harmless.

        Raises: StoreUnavailable (repeat the call).
        """
        with contextlib.suppress(NotFound):
            await self.close(session_id)
            await self._journal.forget(session_id)
            self._sessions.pop(session_id, None)

    async def _seal(self, session: Session) -> None:
        session.sealing = True
        for call in session.sampling:
            call.cancel()
        # Turns that the engine has already sampled are journaled first.
        await asyncio.gather(*session.calls.values(), return_exceptions=True)
        await self._mark(session, {"kind": SEALED})

    async def _mark(self, session: Session, record: Record) -> None:
        """Journal that a session is sealed or closed, unless another process already did."""
        await self._write(session, lambda: None if getattr(session, record["kind"]) else record)

    async def gave_up(self, session_id: str, wait: Wait) -> None:
        """Note a call that still waits when the session is about to be closed. Raises: NotFound."""
        if time.time() - wait.since > LONG_WAIT_S:
            async with self._using(session_id) as session:
                await self._note_unanswered(session, MAIN, wait)

    async def _note_unanswered(self, session: Session, chain: str, wait: Wait) -> None:
        """Journal it, so that every process reports it until an answer clears it."""
        record = {"kind": UNANSWERED, "chain": chain, **wait.model_dump()}
        try:
            await self._note(session, record, lambda: _is_noted(session, chain, wait))
        except RetryHere:
            raise
        except PerdureError as error:
            log.warning("cannot journal an unanswered call", error=str(error))
            session.unanswered.setdefault(chain, wait)

    async def _note(
        self, session: Session, record: dict[str, Any], is_known: Callable[[], object]
    ) -> None:
        """Journal a fact about the session, unless it is known or the session is sealed."""
        await self._write(session, lambda: None if is_known() or session.sealed else record)

    # --- memory --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _using(self, session_id: str) -> AsyncIterator[Session]:
        """The session, which stays in memory while it is used. Raises: NotFound."""
        session = self._sessions.get(session_id) or await self._load(session_id)
        session.users += 1
        try:
            with session.record_journal_damage():
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
        """The session, read back from its journal if it is not in memory."""
        if (session := self._sessions.get(session_id)) is not None:
            return session
        damage = ""
        try:
            records = await self._journal.read(session_id)
        except JournalDamaged as error:
            records, damage = error.intact, str(error)
        if not records and not damage:  # no such session
            return None
        unknown = SessionSpec(session_id=session_id, turns_key="")
        spec = SessionSpec.model_validate(records[0]["spec"]) if records else unknown
        opened = records[0] if records else {}
        models = await self._models.loaded(
            RecordedModels.model_validate(opened.get("models", {})), opened.get("tokenizers")
        )
        session = Session(spec, models, Pace(self._ceilings))
        session.wake(self._tool_digests, records)
        session.damaged = session.damaged or damage
        session.unreadable = bool(damage)
        if session.closed or session.damaged:
            session.sleep()
        log.info("session read back", session_id=session_id, turns=session.totals.turns)
        return self._keep(session)

    def _keep(self, session: Session) -> Session:
        self._sessions[session.spec.session_id] = session
        self._metrics.sessions.set(len(self._sessions))
        return session

    async def _awake(self, session: Session) -> Awake:
        """The session with its tree, read back if it slept, and with the recording that it may replay."""
        awake, earlier = session.awake, session.spec.replay_of
        if awake is not None and (earlier is None or awake.recording is not None):
            return awake
        async with session.commit_lock:
            awake = session.awake or session.wake(
                self._tool_digests, await self._journal.read(session.spec.session_id)
            )
            if earlier is not None and awake.recording is None:
                awake.recording = await self._recording(session, earlier)
        return awake

    async def _recording(self, session: Session, earlier: str) -> Recording:
        try:
            records = await self._journal.read(earlier)
        except JournalDamaged as error:
            records = error.intact
        tokenizers = session.models.tokenizers
        if records and records[0].get("tokenizers", tokenizers) != tokenizers:
            records = []  # no engine of this session could read its ids
        recording = Recording(earlier, turn_records(records))
        own = await self._journal.read(session.spec.session_id)
        for record in turn_records(own[: session.position]):
            recording.committed(record)
        return recording

    def _trim(self) -> None:
        """Put idle sessions to sleep, and drop the least recently used above KEPT_SESSIONS."""
        now = time.monotonic()
        if now - self._trimmed < TRIM_EVERY_S:
            return
        self._trimmed = now
        awake = [s.awake for s in self._sessions.values() if s.awake is not None]
        weight = sum(one.tree.weight for one in awake)
        idle = [one for one in awake if not one.session.busy]
        for one in idle:  # the least recently called comes first
            if weight <= TREE_BYTES and now - one.session.touched < IDLE_S:
                break
            weight -= one.tree.weight
            one.session.sleep()
        surplus = len(self._sessions) - KEPT_SESSIONS
        for session in [s for s in self._sessions.values() if not s.busy][: max(0, surplus)]:
            del self._sessions[session.spec.session_id]
        self._metrics.sessions.set(len(self._sessions))

    # --- calls ---------------------------------------------------------------------------------

    async def complete(
        self, session_id: str, request: ModelRequest, caller: Caller = UNKNOWN
    ) -> Answer:
        """The answer to one model call; it is durable on return.

        A retry joins the call in flight, or gets the recorded answer again. An identical call that is
        not a retry is sampled separately. The call continues if the client disconnects. While the journal
        cannot be reached, the call waits: a rollout whose call failed has no verdict, so the gateway
        journals a failure before the agent sees it.
        Raises: Refused, GatewayUnavailable, NotFound.
        """
        return await self._outlasting(
            session_id, lambda wait: self._complete(session_id, request, caller, wait)
        )

    async def _outlasting(
        self, session_id: str, work: Callable[[Wait | None], Awaitable[Result]]
    ) -> Result:
        """Run `work`, and repeat it while the journal cannot be reached. `work` gets the wait so far."""
        pause, wait = FIRST_PAUSE_S, None
        while True:
            try:
                return await work(wait)
            except RetryHere as error:
                if not _is_of_journal(error):
                    raise
                wait = Wait(since=wait.since if wait else time.time(), reason=str(error))
            log.warning("a call waits for the journal", session_id=session_id, reason=wait.reason)
            with self.waiting.noted(session_id, wait):
                await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _complete(
        self, session_id: str, request: ModelRequest, caller: Caller, wait: Wait | None
    ) -> Answer:
        """`wait`: since when, and why, the call has waited for the journal."""
        has_left = wait is not None and await caller.has_hung_up()
        async with self._using(session_id) as session:
            session.check_open()
            try:
                awake = await self._awake(session)
            except (Refused, RetryHere):
                raise
            except Exception as error:  # its journal cannot be read, so the note stays in memory
                wait = Wait(since=time.time(), reason=_reason(error))
                session.unanswered.setdefault(chain_of(request.chain, request.purpose), wait)
                raise
            session.check_open()  # it may have been closed while it was read back
            if not session.totals.turns:  # another process may know who the agent is
                await self._refresh(session)
            request = session.attributed(request)
            location, known = awake.tree.locate(request), len(awake.tree.nodes)
            number = await self._sibling(awake, request, caller, location.digests.exact)
            if len(awake.tree.nodes) > known:  # another turn was committed during the await
                location = awake.tree.locate(request)
            location = location.of_sibling(number)
            key = (request.chain, location.digests.exact)
            call = session.calls.get(key)
            if call is not None:
                self._metrics.retries.labels("joined").inc()
            elif (node := self._recorded(awake, key)) is not None:
                return node.record.answer
            elif wait is not None and has_left:
                if time.time() - wait.since > LONG_WAIT_S:
                    chain = chain_of(request.chain, request.purpose)
                    await self._note_unanswered(session, chain, wait)
                raise _client_closed()
            elif awake.tree.newest(*key) >= 0 and await caller.has_hung_up():
                raise _client_closed()  # another process answered its retry, and the agent continued
            else:
                call = self._start(awake, request, location, key, wait)
            session.callers.setdefault(key, []).append(caller)
            return await asyncio.shield(call)

    async def _sibling(
        self, awake: Awake, request: ModelRequest, caller: Caller, exact: str
    ) -> int:
        """0, or the number of an additional sample of a prompt that is being answered."""
        session, number = awake.session, 0
        while True:
            digest = sibling_digest(exact, number)
            waiting = session.callers.get((request.chain, digest))
            done = number > 0 and awake.tree.newest(request.chain, digest) >= 0
            if waiting is None and not done:
                return number
            if waiting is not None and await is_retry(caller, tuple(waiting)):
                return number
            number += 1

    # --- MCP servers ---------------------------------------------------------------------------

    async def mcp_server(self, session_id: str, name: str) -> McpServer:
        """The session's server of this name, when its rate limit allows another call.

        Raises: Refused, also if the session has no such server; NotFound.
        """
        async with self._using(session_id) as session:
            session.check_open()
            server = session.spec.mcp_servers.get(name)
            if server is None:
                raise Refused(404, "no_mcp_server", f"this session has no MCP server {name!r}")
            await session.pace.turn()
            return server

    async def mcp_ended(self, session_id: str) -> Collection[str]:
        """The sessions at MCP servers that the agent has ended, in any process. Raises: NotFound."""
        async with self._using(session_id) as session:
            await self._refresh(session)
            return session.mcp_ended

    async def note_mcp_begun(self, session_id: str, call_id: str, place: str) -> bool:
        """Journal a call that is about to be sent, as this process's. Returns False if a call with this
        id has begun before, in any process. Raises: NotFound."""
        is_new = False

        async def note(_: Wait | None) -> None:
            async with self._using(session_id) as session:

                def begun() -> Record | None:
                    nonlocal is_new
                    is_new = not session.sealed and call_id not in session.mcp_known
                    if is_new:
                        session.mcp_here.add(call_id)
                    return begun_record(call_id, place) if is_new else None

                await self._write(session, begun)

        await self._outlasting(session_id, note)
        return is_new

    async def note_mcp_call(self, session_id: str, call_id: str, call: McpCall) -> None:
        """Journal how a call ended; it is durable on return. Raises: NotFound."""
        await self._note_mcp(session_id, call_record(call_id, call))

    async def _note_broken_mcp_calls(self, session: Session) -> None:
        """Mark the session as failed if a gateway process died during an MCP call. A living process
        records how its calls end, even if the agent hangs up."""
        until = time.monotonic() + HUNG_UP_KNOWN_S
        await self._refresh(session)
        while (places := session.mcp_elsewhere) and time.monotonic() < until:
            await asyncio.sleep(FIRST_PAUSE_S)
            await self._refresh(session)
        if places:
            message = f"a gateway process died during a call of {places[0]}"
            failed = {"kind": MCP_FAILED, "message": message}
            await self._note(session, failed, lambda: session.mcp_failed)

    async def note_mcp_failed(self, session_id: str, reason: str) -> None:
        """Journal that a server could not answer, which ends the attempt. Raises: NotFound."""
        await self._note_mcp(session_id, {"kind": MCP_FAILED, "message": reason})

    async def note_mcp_ended(self, session_id: str, held: str) -> None:
        """Journal that the agent ended its session at a server. Raises: NotFound."""
        await self._note_mcp(session_id, {"kind": MCP_ENDED, "session": held})

    async def _note_mcp(self, session_id: str, record: Record) -> None:
        async def note(_: Wait | None) -> None:
            async with self._using(session_id) as session:
                full = record["kind"] == MCP_CALL and session.mcp_recorded > RECORDED
                kept = without_content(record) if full else record
                await self._write(session, lambda: None if session.sealed else kept)

        await self._outlasting(session_id, note)

    async def model_of(self, session_id: str) -> str:
        """The name of the session's model. Raises: NotFound."""
        async with self._using(session_id) as session:
            return session.models.main.name

    async def count_tokens(self, session_id: str, request: ModelRequest) -> int:
        """Tokens of the request, rendered in full; nothing is sampled or recorded.

        Raises: Refused, NotFound.
        """

        async def count(_: Wait | None) -> int:
            async with self._using(session_id) as session:
                session.check_open()
                return await self._maker.count(session, request)

        return await self._outlasting(session_id, count)

    def _start(
        self,
        awake: Awake,
        request: ModelRequest,
        location: Location,
        key: CallKey,
        wait: Wait | None,
    ) -> "asyncio.Task[Answer]":
        session = awake.session
        if len(session.calls) >= MAX_WAITING:
            raise Refused(
                429, "too_many_calls", f"this session already has {MAX_WAITING} calls in flight"
            )
        call = asyncio.create_task(self._traced_turn(awake, request, location, key, wait))
        session.calls[key] = call
        call.add_done_callback(lambda task: _forget(session, key, task))
        return call

    def _recorded(self, awake: Awake, key: CallKey, since: int | None = None) -> Node | None:
        """The turn that already answered the same request, if its answer may be repeated."""
        node = awake.tree.recorded(*key, since)
        if node is not None:
            node.repeats += 1
            self._metrics.replays.inc()
            self._metrics.retries.labels("repeated").inc()
        return node

    async def _traced_turn(
        self,
        awake: Awake,
        request: ModelRequest,
        location: Location,
        key: CallKey,
        wait: Wait | None,
    ) -> Answer:
        """Make a turn within a trace span of its rollout. An error that keeps the gateway from answering
        is noted, unless the journal cannot be reached: then the call waits."""
        spec, arrived = awake.session.spec, time.time()
        parent = spec.labels.get(tracing.PARENT, "")
        with tracing.span(
            "turn", {"perdure.chain": request.chain}, kind="server", parent=parent
        ) as span:
            try:
                answer = await self._turn(awake, request, location, wait)
            except Refused:
                raise
            except Exception as error:
                if _is_of_journal(error):
                    raise
                await self._failed(awake.session, request, key, arrived, error)
                raise
            span.set(
                {
                    "gen_ai.conversation.id": spec.session_id,
                    "gen_ai.request.model": spec.model,
                    "gen_ai.usage.input_tokens": answer.usage.get("prompt_tokens"),
                    "gen_ai.usage.output_tokens": answer.usage.get("completion_tokens"),
                    "gen_ai.response.finish_reasons": [answer.finish_reason],
                }
            )
            return answer

    async def _turn(
        self, awake: Awake, request: ModelRequest, location: Location, wait: Wait | None
    ) -> Answer:
        arrived = time.time()
        known, session = len(awake.tree.nodes), awake.session
        news = await self._refresh(session)
        if news:
            location = awake.tree.locate(request).of_sibling(location.sibling)
        key = (request.chain, location.digests.exact)
        unwritten = session.unwritten.pop(key, None)
        if news and (node := self._recorded(awake, key, known)) is not None:
            return node.record.answer
        await self._check_calls(awake, request, location)
        if unwritten is None:
            await self._check_caps(session, request)
        pending = PendingTurn(awake, request, location, arrived)
        recording = awake.recording
        across = location.digests.across
        recorded = recording.take(request.chain, across) if recording is not None else None
        if recording is None or recorded is None:
            draft = unwritten or await self._sampled(pending)
            try:
                answer = await self._commit(
                    pending, known, _with_earlier_wait(draft, wait, arrived)
                )
            except BaseException:
                session.unwritten[key] = draft
                raise
            return answer
        try:
            return await self._commit(pending, known, replayed(pending, recorded))
        except BaseException:
            recording.give_back(recorded)
            raise

    async def _check_calls(self, awake: Awake, request: ModelRequest, location: Location) -> None:
        """Detect a truncated journal: a tool-call id that the gateways of this home minted, but that no
        turn has, proves that its turn is lost. Raises: Refused."""
        session = awake.session
        new = request.messages[location.kept_messages :]
        calls = [call["id"] for message in new for call in message.get("tool_calls") or ()]
        for call_id in calls:
            if awake.tree.knows_call(call_id):
                continue
            if self._call_ids.is_minted(session.spec.rollout, call_id):
                message = f"its journal lacks the turn of tool call {call_id}, which the agent has"
                damage = {"kind": DAMAGED, "message": message}
                await self._note(session, damage, lambda: session.damaged)
                session.check_open()

    async def _check_caps(self, session: Session, request: ModelRequest) -> None:
        """Refuse the call if a cap of the session is reached. A refused call of the agent is
        journaled, so that every process reports it and the agent stage ends the agent as `limit`.
        Raises: Refused."""
        if not (reached := session.reached_cap):
            return
        if request.purpose.is_of_trajectory:
            capped = {"kind": CAPPED, "message": reached}
            await self._note(session, capped, lambda: session.capped)
        raise Refused(403, "cap_reached", f"this session takes no more calls: {reached}")

    async def _sampled(self, pending: PendingTurn) -> TurnRecord:
        """Sample a turn, and journal a refusal that ends the rollout, so that every process of the pool
        can report it."""
        session = pending.session
        if session.pace.wait_s() > 0:
            log.info("a session exceeds its rate limit", session_id=session.spec.session_id)
            self._metrics.paced.inc()
            await await_unless_closed(session, session.pace.turn())
        else:
            await session.pace.turn()
        chain = chain_of(pending.request.chain, pending.request.purpose)
        try:
            earlier = session.unanswered.get(chain)
            if reset := models_open(self._open_hours, time.time(), ""):
                raise QuotaExhausted(reset.reason, reset.resets_at)
            record = await self._maker.sampled(pending)
            record = _with_earlier_wait(record, earlier, pending.arrived)
            session.pace.sampled(record.answer.usage.get("completion_tokens") or 0)
            return record
        except Refused as refused:
            if refused.code == TOO_STALE:
                stale = {"kind": STALE, "message": str(refused)}
                await self._note(session, stale, lambda: session.too_stale)
            if refused.code == OTHER_TOKENIZER:
                changed = {"kind": RETOKENIZED, "message": str(refused)}
                await self._note(session, changed, lambda: session.tokenizer_changed)
            if refused.code in ENGINE_REFUSAL_HINTS:
                await self._note_refused(session, f"{refused}{ENGINE_REFUSAL_HINTS[refused.code]}")
            raise
        except QuotaExhausted as error:
            url, model = self._engine_url, pending.model.name
            reset = QuotaReset(
                resets_at=error.resets_at, reason=str(error), account=model_name(url, model)
            )
            await self._resets.note(model_account(url, model), reset)
            raise
        except CallsRefused as error:
            await self._note_refused(session, str(error))
            if not session.totals.turns:
                raise Refused(403, "engine_refused", str(error)) from None
            raise

    async def _note_refused(self, session: Session, message: str) -> None:
        """Journal an engine's refusal if the session has no answer yet: its rollout cannot start."""
        if not session.totals.turns:
            session.refusals += 1
            refused = {"kind": REFUSED, "message": message}
            await self._note(session, refused, lambda: session.refused)

    async def _failed(
        self, session: Session, request: ModelRequest, key: CallKey, since: float, error: Exception
    ) -> None:
        """Note a call without an answer, unless it is stray or its agent hung up within LONG_WAIT_S."""
        if request.purpose is Purpose.STRAY:  # the agent does not depend on it
            return
        callers = session.callers.get(key, ())
        has_left = bool(callers) and all([await one.has_hung_up() for one in callers])
        if has_left and time.time() - since < LONG_WAIT_S:
            return
        chain = chain_of(request.chain, request.purpose)
        earlier = session.unanswered.get(chain)
        until = error.resets_at if isinstance(error, QuotaExhausted) else 0.0
        began = earlier.since if earlier else since
        wait = Wait(since=began, reason=_reason(error), until=until)
        await self._note_unanswered(session, chain, wait)
        session.unanswered[chain] = wait

    async def _commit(self, pending: PendingTurn, known: int, draft: TurnRecord) -> Answer:
        """Journal a turn, unless another process has answered the same request first.

        `known`: how many turns of the session this process knew when the call arrived.
        """
        awake, session = pending.awake, pending.session
        node: Node | None = None
        record = draft

        def say() -> Record | None:
            nonlocal node, record
            if session.sealed:
                session.check_open()
            node = awake.tree.recorded(draft.chain, draft.request_sha256, known)
            if node is not None:
                return None
            known_tools = draft.tools_sha256 in awake.tree.tool_lists
            tools = None if known_tools else pending.request.tools
            numbered = {"index": len(awake.tree.nodes), "tools": tools or None}
            record = draft.model_copy(update=numbered)
            return to_journal(record)

        def apply(_: Record) -> None:
            self._count(awake.apply(record, pending.location.rolled))
            session.elsewhere = None

        with tracing.span("write turn"):
            await self._write(session, say, apply)
        if node is not None:
            self._metrics.retries.labels("overtaken").inc()
            return node.record.answer
        return record.answer

    # --- journal -------------------------------------------------------------------------------

    async def _refresh(self, session: Session) -> bool:
        """Read the records of other processes. Returns whether there were new ones."""
        if session.closed or session.damaged:
            return False
        async with session.commit_lock:
            return await self._read_on(session)

    async def _read_on(self, session: Session) -> bool:
        session_id = session.spec.session_id
        records = await self._journal.read(session_id, session.position)
        if not records:
            return False
        if (awake := session.awake) is None:  # it slept: its tree is rebuilt from the beginning
            session.wake(self._tool_digests, await self._journal.read(session_id))
            return True
        for record in records:
            awake.replay(record)
        return True

    async def _write(
        self,
        session: Session,
        say: Callable[[], Record | None],
        apply: Callable[[Record], None] | None = None,
    ) -> None:
        """Journal the record that `say` returns, and apply it to the session. `say` is called again each
        time another process wrote first; None from it means there is nothing to write."""
        async with session.commit_lock:
            while (record := say()) is not None:
                if session.unreadable:  # the record would take the number of a lost one
                    raise JournalDamaged(session.damaged)
                try:
                    await self._append(session.spec.session_id, record, session.position)
                except RecordNumberTaken:
                    await self._read_on(session)
                else:
                    return (apply or session.note)(record)

    async def _append(self, session_id: str, record: dict[str, Any], position: int) -> None:
        started = time.monotonic()
        await self._journal.append(session_id, record, position=position)
        self._metrics.journal_seconds.observe(time.monotonic() - started)

    def _count(self, node: Node) -> None:
        metrics, record = self._metrics, node.record
        model = record.asked_model
        metrics.turns.labels(record.finish_reason.value, model).inc()
        sampled = 0 if record.replayed_from else len(record.completion)
        metrics.tokens.labels("sampled", model).inc(sampled)
        metrics.tokens.labels("prompt", model).inc(record.prompt_length)
        metrics.engine_seconds.observe(record.engine_seconds)
        if record.bridge_miss is not None:
            metrics.bridge_misses.labels(record.bridge_miss).inc()
        for change in record.echo_changes:
            metrics.echo_changes.labels(change).inc()
        if record.replayed_from:
            metrics.replayed_turns.inc()
        if record.placeholder:
            metrics.placeholders.inc()
        if node.parent is not None and node.parent.children > 1:
            metrics.forks.inc()


def _client_closed() -> Refused:
    return Refused(400, "client_closed_request", "the client disconnected")


def _is_noted(session: Session, chain: str, wait: Wait) -> bool:
    """Whether the journal says that the chain waits, and until when."""
    known = session.unanswered.get(chain)
    return known is not None and known.until == wait.until


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PerdureError) else f"the gateway failed: {error!r}"


def _is_of_journal(error: Exception) -> bool:
    """Whether the error is that the journal or its store cannot be reached. Errors of engines name
    their boundary."""
    return isinstance(error, RetryHere) and error.boundary is not Boundary.ENGINE


def _with_earlier_wait(record: TurnRecord, wait: Wait | None, until: float) -> TurnRecord:
    """The record, with the time from its first unanswered try to this one added to its waiting time."""
    if wait is None:
        return record
    earlier = max(0.0, until - wait.since)
    return record.model_copy(update={"waiting_seconds": record.waiting_seconds + earlier})


def _forget(session: Session, key: CallKey, call: "asyncio.Task[Answer]") -> None:
    session.calls.pop(key, None)
    session.callers.pop(key, None)
    if not call.cancelled() and call.exception() is not None:
        log.info("call failed", session_id=session.spec.session_id, error=repr(call.exception()))
