"""Makes one turn: builds its prompt (bridged or rendered), samples, and reads the sampled ids.

Owns how a turn's record is made. `session_manager` admits calls and commits the record.
"""

import asyncio
import secrets
import time
from array import array
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from perdure import tracing
from perdure.dialects.base import ModelRequest, Refused
from perdure.engines.base import ChatEngine, Completion, HostedEngine, TokenEngine
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.policy_versions import OF_POLICY
from perdure.gateway.gateway_metrics import Metrics
from perdure.gateway.journal.turn_record import TurnRecord
from perdure.gateway.rendering import late_system_message
from perdure.gateway.rendering.message_format import Format
from perdure.gateway.session_model import SessionModel
from perdure.gateway.session_state import Awake, Session
from perdure.gateway.turns.answer_parsing import Read, hosted_answer, read_completion
from perdure.gateway.turns.attempt_replay import RecordedTurn
from perdure.gateway.turns.canonical_request import Message
from perdure.gateway.turns.output_constraints import constraints
from perdure.gateway.turns.prompt_bridge import Miss, bridge, common_ids
from perdure.gateway.turns.sampling_params import (
    agents_stops,
    as_recorded,
    base_seed,
    call_seed,
    chat_request,
    token_sampling,
)
from perdure.gateway.turns.tool_call_ids import CallIds
from perdure.gateway.turns.turn_chains import Location, Node
from perdure.types import FinishReason, Purpose, TurnSampling

INLINE_CHARS = 65_536
"""Characters of text below which rendering on the event loop is cheaper than in a thread."""
REPLAYED = "replayed"
"""The bridge miss of a replayed turn whose recorded parent was not replayed."""
UNCOMMITTED = -1
"""The index of a turn that is not yet committed."""

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class PendingTurn:
    """A model call that will become a turn: its request, the turn that it continues, and its arrival."""

    awake: Awake
    request: ModelRequest
    location: Location
    arrived: float
    """Unix seconds."""
    since: float = field(default_factory=time.monotonic)
    """The same moment in `time.monotonic` seconds."""

    @property
    def session(self) -> Session:
        return self.awake.session

    @property
    def model(self) -> SessionModel:
        """The model that answers it. Stray calls share a chain, so one model answers them all."""
        models = self.session.models
        is_stray = self.request.purpose is Purpose.STRAY
        return models.main if is_stray else models.of(self.request.model)

    @property
    def labels(self) -> Mapping[str, str]:
        """The session's labels. Calls to other models leave out its policy versions, which are
        those of the main model."""
        labels, main = self.session.spec.labels, self.session.models.main
        if self.model.name == main.name:
            return labels
        return {name: labels[name] for name in labels if name not in OF_POLICY}


class TurnMaker:
    """Makes the record of a turn, which `session_manager` commits."""

    def __init__(self, metrics: Metrics, call_ids: CallIds) -> None:
        self._call_ids = call_ids
        self._metrics = metrics

    async def sampled(self, pending: PendingTurn) -> TurnRecord:
        """Raises: ContextExhausted, Refused, GatewayUnavailable."""
        engine = await await_unless_closed(pending.session, pending.model.engine())
        if isinstance(engine, HostedEngine):
            return await self._ask(pending, engine.chat, engine.name)
        return await self._sample(pending, engine.tokens)

    async def count(self, session: Session, request: ModelRequest) -> int:
        """Tokens of the request, rendered in full. Raises: Refused."""
        try:
            return len(await self._render(request, session.models.of(request.model).format))
        except Exception as error:
            raise _unrenderable(error) from error

    async def _sample(self, pending: PendingTurn, engine: TokenEngine) -> TurnRecord:
        session, request, turn_id = pending.session, pending.request, new_turn_id(pending.session)
        model = pending.model
        with tracing.span("make prompt") as span:
            prompt, miss = await self._prompt(pending)
            span.set({"perdure.bridge_miss": miss})
        sampling = self._sampling(pending, len(prompt))
        parent = pending.location.parent if miss is None else None
        started = time.monotonic()
        completion = await await_unless_closed(
            session,
            engine.generate(
                GenerateCall(
                    prompt,
                    sampling,
                    session.spec.session_id,
                    turn_id,
                    pending.labels,
                    last=session.elsewhere,
                    vocabulary=model.format.tokenizer.vocabulary,
                    model=model.name,
                    tokenizer=model.tokenizer,
                    is_reserved=model.is_reserved,
                    routed_from=parent.routed if parent else 0,
                )
            ),
        )
        engine_seconds = time.monotonic() - started - completion.waited_s
        with tracing.span("read answer"):
            stops = agents_stops(session.spec.sampling, request)
            rollout = session.spec.rollout
            read = read_completion(
                model.format,
                request,
                prompt,
                completion,
                turn_id,
                mint=lambda position: self._call_ids.mint(rollout, turn_id, position),
                stops=stops,
            )
        return _record(
            pending,
            turn_id=turn_id,
            prompt=prompt,
            completion=completion,
            read=read,
            miss=miss,
            engine_seconds=engine_seconds,
            waiting_seconds=completion.waited_s,
            sampling=as_recorded(sampling),
        )

    def _sampling(self, pending: PendingTurn, prompt_tokens: int) -> dict[str, Any]:
        spec, request = pending.session.spec, pending.request
        model_format = pending.model.format
        stop_ids = list(model_format.renderer.get_stop_token_ids())
        found = token_sampling(spec.sampling, request, prompt_tokens, stop_ids)
        found |= constraints(model_format, spec.sampling, request)
        if (seed := self._seed(pending)) is not None:
            found["seed"] = seed
        return found

    def _seed(self, pending: PendingTurn) -> int | None:
        spec, request = pending.session.spec, pending.request
        base = base_seed(spec.sampling, request)
        if base is None:
            return None
        turn = pending.awake.tree.turns_of(request.chain)
        place = request.chain
        if number := pending.location.sibling:
            place = f"{place}/{number}"
        return call_seed(base, spec.sample, place, turn)

    async def _prompt(self, pending: PendingTurn) -> tuple["array[int]", str | None]:
        """The next prompt, and why it was not bridged (None: it was)."""
        started = time.monotonic()
        try:
            bridged = await self._bridge(pending)
            if not isinstance(bridged, Miss):
                return bridged, None
            return await self._render(pending.request, pending.model.format), bridged.reason
        except Exception as error:
            # On unexpected messages, a template may raise any exception.
            raise _unrenderable(error) from error
        finally:
            self._metrics.prompt_seconds.observe(time.monotonic() - started)

    async def _bridge(self, pending: PendingTurn) -> "array[int] | Miss":
        request, at = pending.request, pending.location
        if at.parent is None:
            return Miss(at.miss or "first")
        new = request.messages[at.new :]
        renderer = pending.model.format.renderer
        held = pending.awake.tree.continued.ids_of(at.parent)
        if _chars(new) < INLINE_CHARS:
            return bridge(renderer, at.parent, held, new, request.tools)
        return await asyncio.to_thread(bridge, renderer, at.parent, held, new, request.tools)

    async def _render(self, request: ModelRequest, model_format: Format) -> "array[int]":
        def ids(messages: list[Message]) -> list[int]:
            found: list[int] = model_format.renderer.render_ids(
                messages, tools=request.tools, add_generation_prompt=True
            )
            return found

        def render() -> "array[int]":
            return array("i", late_system_message.rendered(request.messages, ids))

        if _chars(request.messages) < INLINE_CHARS:
            return render()
        return await asyncio.to_thread(render)

    async def _ask(self, pending: PendingTurn, engine: ChatEngine, name: str) -> TurnRecord:
        """One turn from a hosted API: it has no ids, so it cannot be trained on."""
        session, turn_id = pending.session, new_turn_id(pending.session)
        rules = session.spec.sampling
        engine.check(rules)
        asked_model = engine.model or pending.model.name
        body = chat_request(rules, pending.request, self._seed(pending))
        body["model"] = asked_model
        started = time.monotonic()
        attributes: tracing.Attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": name.partition(" ")[0],
            "gen_ai.request.model": asked_model,
            "gen_ai.conversation.id": session.spec.session_id,
            "perdure.engine": name,
        }
        with tracing.span("engine call", attributes, kind="client"):
            completion, waited_s = await await_unless_closed(
                session, engine.chat(body, session_id=session.spec.session_id)
            )
        engine_seconds = time.monotonic() - started - waited_s
        read = hosted_answer(pending.request, completion, turn_id)
        cut = read.answer.finish_reason == FinishReason.LENGTH.value
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        said = completion.get("model")
        model = said if isinstance(said, str) else ""
        nothing = Completion(
            array("i"), array("d"), reason, (), name, asked_model=asked_model, model=model
        )
        return _record(
            pending,
            turn_id=turn_id,
            prompt=array("i"),
            completion=nothing,
            read=read,
            miss=None,
            engine_seconds=engine_seconds,
            waiting_seconds=waited_s,
        )


def replayed(pending: PendingTurn, recorded: RecordedTurn) -> TurnRecord:
    """The record of a turn that an earlier attempt answered, with that turn's ids, logprobs and versions.

    The prompt is also the recorded one, because the logprobs belong to it.
    """
    old = recorded.record
    record = _record(
        pending,
        turn_id=old.turn_id,
        prompt=recorded.prompt,
        completion=Completion(
            *(old.completion, old.logprobs, old.finish_reason, old.versions),
            *(old.engine, old.engines),
            asked_model=old.asked_model,
            model=old.model,
            routed_experts=old.routed_experts,
            kept_tokens=old.kept_tokens,
        ),
        read=Read(old.answer, old.reasoning_open, old.placeholder),
        miss=REPLAYED,
        engine_seconds=0.0,
        sampling=old.sampling,
    )
    lost = old.parent is not None and recorded.parent is None
    changes = {
        "parent": recorded.parent,
        "bridged": recorded.parent is not None and bool(old.completion),
        "bridge_miss": REPLAYED if lost else old.bridge_miss,
        "replayed_from": recorded.origin,
    }
    return record.model_copy(update=changes)


def _record(
    pending: PendingTurn,
    *,
    turn_id: str,
    prompt: "array[int]",
    completion: Completion,
    read: Read,
    miss: str | None,
    engine_seconds: float,
    waiting_seconds: float = 0.0,
    sampling: TurnSampling | None = None,
) -> TurnRecord:
    """The record of a turn. `prompt`: the whole prompt, shape [P]. `miss`: why it extends no earlier turn."""
    request, at = pending.request, pending.location
    parent = at.parent if miss is None else None
    base = parent or at.base
    kept_ids = common_ids(base, prompt) if parent is None else parent.total_length
    return TurnRecord(
        index=UNCOMMITTED,
        turn_id=turn_id,
        chain=request.chain,
        parent_chain=request.parent_chain,
        purpose=request.purpose,
        parent=_index(parent),
        base=_index(base),
        echo_of=_index(at.echo_of),
        echo_changes=at.changes,
        mark=request.mark,
        started_at=pending.arrived,
        request_sha256=at.digests.exact,
        across_sha256=at.digests.across,
        tools_sha256=at.tools_sha256,
        kept_messages=at.kept_messages,
        messages=request.messages[at.kept_messages :],
        kept_ids=kept_ids,
        prompt=array("i", prompt[kept_ids:]),
        completion=array("i", completion.token_ids),
        logprobs=array("d", completion.logprobs),
        versions=tuple(completion.versions),
        engines=tuple(completion.engines),
        sampling=sampling,
        finish_reason=completion.finish_reason,
        engine=completion.engine,
        asked_model=completion.asked_model,
        model=completion.model,
        bridged=parent is not None and bool(completion.token_ids),
        bridge_miss=miss,
        trainable=bool(completion.token_ids) and request.purpose.is_of_trajectory,
        engine_seconds=engine_seconds,
        waiting_seconds=waiting_seconds,
        seconds=time.monotonic() - pending.since,
        answer=read.answer,
        reasoning_open=read.reasoning_open,
        placeholder=read.placeholder,
        routed_experts=completion.routed_experts,
        kept_tokens=completion.kept_tokens,
        preemptions=completion.preemptions,
    )


def _index(node: Node | None) -> int | None:
    return None if node is None else node.record.index


async def await_unless_closed(session: Session, call: Awaitable[T]) -> T:
    """Await an engine's call. Closing the session cancels it, because the agent has then ended."""
    task = asyncio.ensure_future(call)
    session.sampling.add(task)
    if session.sealing:  # the session was closed while the prompt was made
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        session.check_open()
        raise
    finally:
        session.sampling.discard(task)


def new_turn_id(session: Session) -> str:
    """An id that is unique across processes. Tool-call ids derive from it, and engines get it as the call's
    id."""
    return f"{session.spec.session_id}-{secrets.token_hex(8)}"


def _chars(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def _unrenderable(error: Exception) -> Refused:
    log.info("messages cannot be rendered", error=repr(error))
    problem = f"the model's chat template cannot render the messages: {error}"
    return Refused(400, "invalid_value", problem, param="messages")
