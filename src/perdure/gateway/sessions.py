"""Sessions: who may call, one turn at a time, every turn journaled before it is answered.

Owns a session's life (open, turns, seal, close) and its recovery from the journal. What extends
what is in `chains`, bytes on disk in `journal`, the wire in `app` and `dialects`.
"""

import asyncio
import re
import time
from array import array
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound
from perdure.gateway.answers import hosted_answer, read_completion
from perdure.gateway.base import (
    SESSION_ID,
    Answer,
    ChatEngine,
    Journal,
    ModelRequest,
    Overtaken,
    Refused,
    SessionSpec,
    SessionSummary,
    TokenEngine,
)
from perdure.gateway.chains import (
    Chain,
    Fingerprint,
    Miss,
    RequestFacts,
    TurnRecord,
    from_journal,
    to_journal,
    turns_of,
)
from perdure.gateway.engines.choose import Engines
from perdure.gateway.metrics import Metrics
from perdure.gateway.sampling import chat_request, token_sampling
from perdure.gateway.tokenizers import Format
from perdure.storage.base import Store
from perdure.types import FinishReason, Turn

MAX_WAITING = 16
"""Calls of one session that may be in flight or queued; a linear chain needs one."""
INLINE_CHARS = 65_536
"""Text below which rendering on the event loop is cheaper than a thread."""

log = structlog.get_logger()
T = TypeVar("T")


@dataclass
class Totals:
    """Running sums over a session's turns, for its summary."""

    turns: int = 0
    tokens: int = 0
    trainable: bool = True
    engine_seconds: float = 0.0
    versions: set[int] = field(default_factory=set)
    misses: Counter[str] = field(default_factory=Counter)

    def add(self, record: TurnRecord) -> None:
        self.turns += 1
        sampled = record.answer.usage.get("completion_tokens")
        self.tokens += sampled if isinstance(sampled, int) else 0
        self.trainable = self.trainable and record.trainable
        self.engine_seconds += record.engine_seconds
        self.versions.update(span.version for span in record.versions)
        if record.miss is not None:
            self.misses[record.miss] += 1


@dataclass
class Session:
    """One attempt of one rollout, in memory while it is open."""

    spec: SessionSpec
    chain: Chain = field(default_factory=Chain)
    totals: Totals = field(default_factory=Totals)
    sealed: bool = False
    closed: bool = False
    turn_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    close_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: "dict[str, asyncio.Task[Answer]]" = field(default_factory=dict)
    """Calls in flight by request digest: an identical one joins."""
    records: int = 0
    """Journal records this process knows of: the number that the next one gets."""
    sampling: "asyncio.Future[Any] | None" = None
    """The engine call in progress, which closing the session abandons."""

    def apply(self, record: TurnRecord) -> None:
        self.chain.apply(record)
        self.totals.add(record)

    def replay(self, record: dict[str, Any]) -> None:
        """Take over one journal record."""
        if record["kind"] == "turn":
            self.apply(from_journal(record))
        elif record["kind"] == "sealed":
            self.sealed = True
        elif record["kind"] == "closed":
            self.sealed = self.closed = True

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
        )


class Sessions:
    """All sessions of this gateway process."""

    def __init__(
        self,
        journal: Journal,
        engines: Engines,
        model_format: Format,
        store: Store,
        metrics: Metrics,
    ) -> None:
        self._journal = journal
        self._engines = engines
        self._format = model_format
        self._store = store
        self._metrics = metrics
        self._sessions: dict[str, Session] = {}
        self._loading = asyncio.Lock()
        self._stop_ids = list(model_format.renderer.get_stop_token_ids())

    # --- control -------------------------------------------------------------------------------

    async def open(self, spec: SessionSpec) -> SessionSummary:
        """Repeating with the same spec joins; a closed session stays closed.

        Raises: ConfigurationError when the session exists with another spec.
        """
        async with self._loading:
            session = await self._find(spec.session_id)
            if session is None:
                session = Session(spec)
                await self._write(session, {"kind": "open", "spec": spec.model_dump(mode="json")})
                self._keep(session)
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

    async def get(self, session_id: str) -> SessionSummary:
        """Raises: NotFound."""
        return (await self._session(session_id)).summary()

    async def close(self, session_id: str) -> SessionSummary:
        """Seal the session, write its turns to the store. A call in flight is abandoned.

        Repeating gives the same summary. Raises: NotFound, StoreUnavailable (repeat the call).
        """
        session = await self._session(session_id)
        async with session.close_lock:
            if not session.closed:
                await self._seal(session)
                turns = await self._turns(session_id)
                await self._store.put(session.spec.turns_key, await asyncio.to_thread(_pack, turns))
                await self._write(session, {"kind": "closed"})
                session.closed = True
                session.chain = Chain()
        return session.summary()

    async def _seal(self, session: Session) -> None:
        if not session.sealed:
            session.sealed = True
            if session.sampling is not None:
                session.sampling.cancel()
            # Turns that already left the engine are journaled first.
            await asyncio.gather(*session.calls.values(), return_exceptions=True)
            await self._write(session, {"kind": "sealed"})

    async def _turns(self, session_id: str) -> list[Turn]:
        records = await self._journal.read(session_id)
        return turns_of([from_journal(r) for r in records if r["kind"] == "turn"])

    async def _session(self, session_id: str) -> Session:
        if (session := self._sessions.get(session_id)) is not None:
            return session
        async with self._loading:
            known = re.match(SESSION_ID, session_id)  # also keeps paths out of the journal
            session = await self._find(session_id) if known else None
        if session is None:
            raise NotFound(f"no session {session_id!r}")
        return session

    async def _find(self, session_id: str) -> Session | None:
        """The session, read back from its journal when this process has not met it yet."""
        if (session := self._sessions.get(session_id)) is not None:
            return session
        records = await self._journal.read(session_id)
        if not records:  # killed while opening: nobody was told that it is open
            return None
        session = Session(SessionSpec.model_validate(records[0]["spec"]))
        for record in records[1:]:
            session.replay(record)
        session.records = len(records)
        log.info("session read back", session_id=session_id, turns=session.totals.turns)
        return self._keep(session)

    def _keep(self, session: Session) -> Session:
        self._sessions[session.spec.session_id] = session
        self._metrics.sessions.set(len(self._sessions))
        return session

    # --- turns ---------------------------------------------------------------------------------

    async def complete(self, session_id: str, request: ModelRequest) -> Answer:
        """The answer to one model call, durable when it returns.

        A retry joins the call in flight or repeats the recorded answer. The call goes on when the
        client goes away. Raises: Refused, GatewayUnavailable, NotFound.
        """
        session = await self._session(session_id)
        _check_open(session)
        fingerprint = session.chain.fingerprint(request)
        call = session.calls.get(fingerprint.sha256)
        if call is None:
            if (answer := self._recorded(session, fingerprint)) is not None:
                return answer
            call = self._start(session, request, fingerprint)
        return await asyncio.shield(call)

    async def count_tokens(self, session_id: str, request: ModelRequest) -> int:
        """Tokens of the request as rendered anew; nothing is sampled or recorded.

        Raises: Refused, NotFound.
        """
        _check_open(await self._session(session_id))
        try:
            return len(await self._render(request))
        except Exception as error:
            problem = f"the messages do not fit the model's format: {error}"
            raise Refused(400, "invalid_value", problem, param="messages") from error

    def _start(
        self, session: Session, request: ModelRequest, fingerprint: Fingerprint
    ) -> "asyncio.Task[Answer]":
        if len(session.calls) >= MAX_WAITING:
            raise Refused(
                429, "too_many_calls", f"this session has {MAX_WAITING} calls in flight already"
            )
        call = asyncio.create_task(self._turn(session, request, fingerprint))
        session.calls[fingerprint.sha256] = call
        call.add_done_callback(lambda task: _forget(session, fingerprint.sha256, task))
        return call

    def _recorded(self, session: Session, fingerprint: Fingerprint) -> Answer | None:
        if session.chain.request_sha256 != fingerprint.sha256:
            return None
        self._metrics.replays.inc()
        return session.chain.answer

    async def _turn(
        self, session: Session, request: ModelRequest, fingerprint: Fingerprint
    ) -> Answer:
        arrived = time.time()
        async with session.turn_lock:
            _check_open(session)
            if session.chain.turns != fingerprint.after_turns:
                # The chain grew while this call waited for its turn.
                fingerprint = session.chain.fingerprint(request)
                if (answer := self._recorded(session, fingerprint)) is not None:
                    return answer
            facts = session.chain.facts(fingerprint, arrived)
            engine = await _abandonable(session, self._engines.current())
            if engine.tokens is not None:
                record = await self._sample(session, request, fingerprint, facts, engine.tokens)
            else:
                assert engine.chat is not None
                record = await self._ask(session, request, facts, engine.chat, engine.name)
            await self._write(session, to_journal(record))
            session.apply(record)
        self._count(record)
        return record.answer

    async def _sample(
        self,
        session: Session,
        request: ModelRequest,
        fingerprint: Fingerprint,
        facts: RequestFacts,
        engine: TokenEngine,
    ) -> TurnRecord:
        """One turn of a token engine: render or bridge, sample, read."""
        session_id, turn_id = session.spec.session_id, _turn_id(session)
        prompt, miss = await self._prompt(session.chain, request, fingerprint)
        sampling = token_sampling(session.spec.sampling, request, len(prompt), self._stop_ids)
        started = time.monotonic()
        completion = await _abandonable(
            session,
            engine.generate(prompt, sampling, session_id=session_id, request_id=turn_id),
        )
        engine_seconds = time.monotonic() - started
        read = read_completion(self._format, request, prompt, completion, turn_id)
        kept = 0 if miss else len(session.chain.prompt) + len(session.chain.completion)
        return TurnRecord(
            **vars(facts),
            kept_ids=kept,
            prompt=array("i", prompt[kept:]),
            completion=array("i", completion.token_ids),
            logprobs=array("d", completion.logprobs),
            versions=tuple(completion.versions),
            finish_reason=completion.finish_reason,
            engine=completion.engine,
            miss=miss,
            trainable=True,
            engine_seconds=engine_seconds,
            seconds=time.time() - facts.started_at,
            reasoning_open=read.reasoning_open,
            answer=read.answer,
        )

    async def _prompt(
        self, chain: Chain, request: ModelRequest, fingerprint: Fingerprint
    ) -> tuple[list[int], str | None]:
        """The next prompt, and why it is not a bridge (None: it is)."""
        started = time.monotonic()
        try:
            bridged = chain.bridge(self._format.renderer, request, fingerprint)
            if not isinstance(bridged, Miss):
                return bridged, None
            return await self._render(request), bridged.reason
        except Exception as error:
            # What a client sends decides what a template trips over.
            log.info("messages cannot be rendered", error=repr(error))
            problem = f"the messages do not fit the model's format: {error}"
            raise Refused(400, "invalid_value", problem, param="messages") from error
        finally:
            self._metrics.prompt_seconds.observe(time.monotonic() - started)

    async def _render(self, request: ModelRequest) -> list[int]:
        def render() -> list[int]:
            return list(
                self._format.renderer.render_ids(
                    request.messages, tools=request.tools, add_generation_prompt=True
                )
            )

        if sum(len(message["content"]) for message in request.messages) < INLINE_CHARS:
            return render()
        return await asyncio.to_thread(render)

    async def _ask(
        self,
        session: Session,
        request: ModelRequest,
        facts: RequestFacts,
        engine: ChatEngine,
        name: str,
    ) -> TurnRecord:
        """One turn of a hosted API: no ids, nothing to train on."""
        body = chat_request(session.spec.sampling, request) | {"model": session.spec.model}
        started = time.monotonic()
        completion = await _abandonable(
            session, engine.chat(body, session_id=session.spec.session_id)
        )
        engine_seconds = time.monotonic() - started
        answer = hosted_answer(request, completion, _turn_id(session))
        cut = answer.finish_reason == FinishReason.LENGTH.value
        return TurnRecord(
            **vars(facts),
            kept_ids=0,
            prompt=array("i"),
            completion=array("i"),
            logprobs=array("d"),
            versions=(),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            engine=name,
            miss=None,
            trainable=False,
            engine_seconds=engine_seconds,
            seconds=time.time() - facts.started_at,
            reasoning_open=False,
            answer=answer,
        )

    async def _write(self, session: Session, record: dict[str, Any]) -> None:
        started = time.monotonic()
        session_id = session.spec.session_id
        try:
            await self._journal.append(session_id, record, position=session.records)
        except Overtaken as error:
            self._sessions.pop(session_id, None)  # the next call reads what the other one wrote
            raise GatewayUnavailable(str(error)) from error
        session.records += 1
        self._metrics.journal_seconds.observe(time.monotonic() - started)

    def _count(self, record: TurnRecord) -> None:
        metrics = self._metrics
        metrics.turns.labels(record.finish_reason.value).inc()
        metrics.tokens.labels("sampled").inc(len(record.completion))
        metrics.tokens.labels("prompt").inc(record.kept_ids + len(record.prompt))
        metrics.engine_seconds.observe(record.engine_seconds)
        if record.miss is not None:
            metrics.bridge_misses.labels(record.miss).inc()


def _check_open(session: Session) -> None:
    if session.sealed:
        raise Refused(403, "session_closed", "this session is closed: its attempt has ended")


async def _abandonable(session: Session, call: Coroutine[Any, Any, T]) -> T:
    """Wait for an engine, unless the session is closed meanwhile: then nobody wants the answer."""
    session.sampling = task = asyncio.ensure_future(call)
    try:
        return await task
    except asyncio.CancelledError:
        _check_open(session)
        raise
    finally:
        session.sampling = None


def _turn_id(session: Session) -> str:
    return f"{session.spec.session_id}-{session.chain.turns}"


def _forget(session: Session, digest: str, call: "asyncio.Task[Answer]") -> None:
    session.calls.pop(digest, None)
    if not call.cancelled() and call.exception() is not None:
        log.info("call failed", session_id=session.spec.session_id, error=repr(call.exception()))


def _pack(turns: list[Turn]) -> bytes:
    from perdure.episodes import turns as codec  # pyarrow: only when a session closes

    return codec.encode(turns)
