"""One turn: the prompt (bridged or rendered), the sampling, the reading of what was sampled.

Owns how a turn's record is made. Who may ask, and that it is committed, is the business of
`sessions`.
"""

import asyncio
import secrets
import time
from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import structlog

from perdure.dialects.base import ModelRequest, Refused
from perdure.engines.base import ChatEngine, Completion, TokenEngine
from perdure.engines.configured import Engines
from perdure.engines.prompt_ids import PromptIds
from perdure.gateway.answers import Read, hosted_answer, read_completion
from perdure.gateway.canonical import Message
from perdure.gateway.chains import Miss, Place, bridge, common_ids
from perdure.gateway.journal.partials import Name, Partials, Wanted, call_name
from perdure.gateway.journal.turn_record import TurnRecord
from perdure.gateway.metrics import Metrics
from perdure.gateway.rendering import late_system
from perdure.gateway.rendering.tokenizers import Format
from perdure.gateway.replay import Recorded
from perdure.gateway.sampling import chat_request, token_sampling
from perdure.gateway.session import Session
from perdure.types import FinishReason, Purpose

INLINE_CHARS = 65_536
"""Text below which rendering on the event loop is cheaper than a thread."""
REPLAYED = "replayed"
"""Why a replayed turn has no parent that the recorded one had: that one was not replayed."""
UNCOMMITTED = -1
"""The index of a turn that is not committed yet."""

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A request, where it stands in the session's tree, and when it came (seconds since 1970)."""

    session: Session
    request: ModelRequest
    place: Place
    arrived: float

    @property
    def call(self) -> str:
        """The call's name, also when it is repeated at another process."""
        return call_name(self.request.chain, self.place.digests.exact)


class TurnMaker:
    """Makes the record of one turn, still to be committed."""

    def __init__(
        self, model_format: Format, engines: Engines, metrics: Metrics, partials: Partials
    ) -> None:
        self._format = model_format
        self._engines = engines
        self._metrics = metrics
        self._partials = partials
        self._stop_ids = list(model_format.renderer.get_stop_token_ids())

    async def sampled(self, asked: Asked) -> TurnRecord:
        """Raises: ContextExhausted, Refused, GatewayUnavailable."""
        engine = await abandonable(asked.session, self._engines.current())
        if engine.tokens is not None:
            return await self._sample(asked, engine.tokens)
        assert engine.chat is not None
        return await self._ask(asked, engine.chat, engine.name)

    async def count(self, request: ModelRequest) -> int:
        """Tokens of the request as rendered anew. Raises: Refused."""
        try:
            return len(await self._render(request))
        except Exception as error:
            raise _unrenderable(error) from error

    async def _sample(self, asked: Asked, engine: TokenEngine) -> TurnRecord:
        session, request, turn_id = asked.session, asked.request, new_turn_id(asked.session)
        prompt, miss = await self._prompt(asked)
        sampling = token_sampling(session.spec.sampling, request, len(prompt), self._stop_ids)
        partial = await self._partials.begin(_wanted(asked, turn_id, prompt, sampling))
        started = time.monotonic()
        with self._partials.kept(partial):
            completion = await abandonable(
                session,
                engine.generate(
                    prompt,
                    sampling,
                    session_id=session.spec.session_id,
                    request_id=turn_id,
                    labels=session.spec.labels,
                    salvage=partial.salvage,
                    last=session.elsewhere,
                ),
            )
        engine_seconds = time.monotonic() - started
        read = read_completion(self._format, request, prompt, completion, turn_id)
        return _record(asked, _Made(turn_id, prompt, completion, read, miss, engine_seconds))

    async def _prompt(self, asked: Asked) -> tuple[PromptIds, str | None]:
        """The next prompt, and why it is not a bridge (None: it is)."""
        started = time.monotonic()
        try:
            bridged = await self._bridge(asked)
            if not isinstance(bridged, Miss):
                return bridged, None
            return await self._render(asked.request), bridged.reason
        except Exception as error:
            # What a client sends decides what a template trips over.
            raise _unrenderable(error) from error
        finally:
            self._metrics.prompt_seconds.observe(time.monotonic() - started)

    async def _bridge(self, asked: Asked) -> PromptIds | Miss:
        request, place = asked.request, asked.place
        if place.parent is None:
            return Miss(place.miss or "first")
        new = request.messages[place.new :]
        renderer = self._format.renderer
        if _chars(new) < INLINE_CHARS:
            return bridge(renderer, place.parent, new, request.tools)
        return await asyncio.to_thread(bridge, renderer, place.parent, new, request.tools)

    async def _render(self, request: ModelRequest) -> PromptIds:
        def ids(messages: list[Message]) -> list[int]:
            found: list[int] = self._format.renderer.render_ids(
                messages, tools=request.tools, add_generation_prompt=True
            )
            return found

        def render() -> PromptIds:
            return PromptIds.of(late_system.rendered(request.messages, ids))

        if _chars(request.messages) < INLINE_CHARS:
            return render()
        return await asyncio.to_thread(render)

    async def _ask(self, asked: Asked, engine: ChatEngine, name: str) -> TurnRecord:
        """One turn of a hosted API: no ids, nothing to train on."""
        session, turn_id = asked.session, new_turn_id(asked.session)
        body = chat_request(session.spec.sampling, asked.request) | {"model": session.spec.model}
        started = time.monotonic()
        completion = await abandonable(
            session, engine.chat(body, session_id=session.spec.session_id)
        )
        engine_seconds = time.monotonic() - started
        read = hosted_answer(asked.request, completion, turn_id)
        cut = read.answer.finish_reason == FinishReason.LENGTH.value
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        nothing = Completion(array("i"), array("d"), reason, (), name)
        return _record(asked, _Made(turn_id, array("i"), nothing, read, None, engine_seconds))


def _wanted(asked: Asked, turn_id: str, prompt: PromptIds, sampling: dict[str, Any]) -> Wanted:
    session, request, digest = asked.session, asked.request, asked.place.digests.exact
    assert session.tree is not None
    name = Name(session.spec.session_id, asked.call, turn_id.rpartition("-")[2])
    turns, answered = len(session.tree.nodes), session.tree.newest(request.chain, digest)
    return Wanted(name, prompt, sampling, turns, answered)


def replayed(asked: Asked, recorded: Recorded) -> TurnRecord:
    """The record of a turn that an earlier attempt answered: its ids, logprobs and versions.

    The prompt is the recorded one too: it is what the logprobs belong to.
    """
    old = recorded.record
    completion = Completion(
        old.completion, old.logprobs, old.finish_reason, old.versions, old.engine, old.engines
    )
    read = Read(old.answer, old.reasoning_open, old.placeholder)
    lost = old.parent is not None and recorded.parent is None
    made = _Made(old.turn_id, recorded.prompt, completion, read, REPLAYED, 0.0)
    return replace(
        _record(asked, made),
        parent=recorded.parent,
        miss=REPLAYED if lost else old.miss,
        replayed_from=recorded.origin,
    )


class _Made(NamedTuple):
    """What a turn came to. Shape of `prompt`: [P]."""

    turn_id: str
    prompt: "array[int]"
    completion: Completion
    read: Read
    miss: str | None
    engine_seconds: float


def _record(asked: Asked, made: _Made) -> TurnRecord:
    request, place, completion = asked.request, asked.place, made.completion
    bridged = place.parent if made.miss is None else None
    base = bridged or place.base
    if bridged is not None:
        kept = bridged.prompt_length + len(bridged.completion)
    else:
        kept = common_ids(base, made.prompt)
    return TurnRecord(
        index=UNCOMMITTED,
        turn_id=made.turn_id,
        chain=request.chain,
        parent_chain=request.parent_chain,
        purpose=request.purpose,
        parent=None if bridged is None else bridged.index,
        base=None if base is None else base.index,
        echo_of=None if place.echo_of is None else place.echo_of.index,
        echo_changes=place.changes,
        replayed_from="",
        started_at=asked.arrived,
        request_sha256=place.digests.exact,
        across_sha256=place.digests.across,
        tools_sha256=place.tools_sha256,
        kept_messages=place.kept_messages,
        messages=request.messages[place.kept_messages :],
        kept_ids=kept,
        prompt=array("i", made.prompt[kept:]),
        completion=array("i", completion.token_ids),
        logprobs=array("d", completion.logprobs),
        versions=tuple(completion.versions),
        engines=tuple(completion.engines),
        finish_reason=completion.finish_reason,
        engine=completion.engine,
        miss=made.miss,
        trainable=bool(completion.token_ids) and request.purpose is not Purpose.SIDE,
        engine_seconds=made.engine_seconds,
        seconds=time.time() - asked.arrived,
        reasoning_open=made.read.reasoning_open,
        placeholder=made.read.placeholder,
        answer=made.read.answer,
    )


async def abandonable(session: Session, call: Awaitable[T]) -> T:
    """Wait for an engine, unless the session is closed meanwhile: then nobody wants the answer."""
    task = asyncio.ensure_future(call)
    session.sampling.add(task)
    if session.sealing:  # it was closed while the prompt was made
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        session.check_open()
        raise
    finally:
        session.sampling.discard(task)


def new_turn_id(session: Session) -> str:
    """Unique in all processes: ids of tool calls derive from it, and engines know tries by it."""
    return f"{session.spec.session_id}-{secrets.token_hex(8)}"


def _chars(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def _unrenderable(error: Exception) -> Refused:
    log.info("messages cannot be rendered", error=repr(error))
    problem = f"the messages do not fit the model's format: {error}"
    return Refused(400, "invalid_value", problem, param="messages")
