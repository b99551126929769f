"""The tree of a session, with a scripted engine: parents, retries, several processes, replay."""

import asyncio
import functools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.dialects.base import Answer, ContextExhausted, ModelRequest, Refused
from perdure.engines.base import Completion, Engine
from perdure.engines.clients.token_endpoint import body_with_prompt
from perdure.engines.pool.completion_call import GenerateCall
from perdure.episodes.trajectory_segments import cut
from perdure.episodes.turns_parquet import decode
from perdure.errors import Boundary, GatewayUnavailable
from perdure.gateway import session_manager as sessions_module
from perdure.gateway.base import PLACEHOLDER, SessionSpec
from perdure.gateway.gateway_metrics import Metrics
from perdure.gateway.journal.closed_session_file import turns_file
from perdure.gateway.journal.recorded_turns import turns_of
from perdure.gateway.journal.turn_record import turn_records
from perdure.gateway.rendering.chat_template import ChatTemplate
from perdure.gateway.rendering.jinja_template import JinjaTemplate
from perdure.gateway.rendering.message_format import QWEN3, Format, load_format
from perdure.gateway.rendering.tool_call_parsers.format_detection import Found
from perdure.gateway.rendering.tool_call_parsers.hermes import Hermes
from perdure.gateway.session_manager import Sessions
from perdure.gateway.session_model import ModelLoader, SessionModel
from perdure.gateway.turns.identical_calls import Caller
from perdure.gateway.turns.prompt_bridge import bridge
from perdure.gateway.turns.turn_maker import await_unless_closed
from perdure.storage.local_store import LocalStore
from perdure.testing.scripted_engine import logprob
from perdure.testing.scripted_policy import Policy
from perdure.types import Caps, FinishReason, Price, Purpose, Sampling, Turn

FORMAT = load_format("qwen3")
POLICY = Policy(FORMAT.tokenizer, {})
Message = dict[str, Any]
CALL: Message = {
    "content": "Look.",
    "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}],
}
TWO_CALLS: Message = {
    "tool_calls": [{"name": "bash", "arguments": {"command": c}} for c in ("ls", "pwd")]
}
TEXT: Message = {"content": "All done."}
NO_LATE_SYSTEM = (
    "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('system comes first') }}"
    "{% endif %}{% endfor %}"
)
THOUGHT: Message = {"raw": "<think>\nHm.\n</think>\n\n"}


class Speaker:
    """A token engine that gives scripted turns in order, and then repeats the last one."""

    def __init__(self, *turns: Message) -> None:
        self.turns = list(turns or (CALL,))
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.request_ids: list[str] = []
        self.released = asyncio.Event()
        self.released.set()
        self.failure: Exception | None = None

    async def generate(self, call: GenerateCall) -> Completion:
        sent = json.loads(body_with_prompt({"model": "m"}, "ids", call.ask("m")))
        assert sent == {"model": "m", "ids": list(call.prompt_ids)}
        ids = POLICY.tokens(self.turns.pop(0) if len(self.turns) > 1 else self.turns[0])
        self.seen.append((tuple(call.prompt_ids), tuple(ids)))
        self.request_ids.append(call.request_id)
        await self.released.wait()
        if self.failure is not None:
            raise self.failure
        logprobs = [logprob(token_id, i) for i, token_id in enumerate(ids)]
        return Completion(ids, logprobs, FinishReason.STOP, (), "speaker")

    async def current(self) -> Engine:
        """Stands in for `ConfiguredEngine.current`."""
        return Engine("speaker", tokens=self)

    async def choose(self, name: str, run: str) -> None:
        """Stands in for `ConfiguredEngine.choose`: there is one model."""


CALLER, AGAIN = Caller(), Caller(says_retry=True)


class Process:
    """The sessions of one gateway process, over a journal that several processes may share."""

    def __init__(self, folder: Path, speaker: Speaker, model_format: Format = FORMAT) -> None:
        self.store = LocalStore(folder / "store")
        self.metrics = Metrics()
        engines: Any = speaker
        models = ModelLoader(SessionModel("policy", model_format, speaker.current), engines)
        self.sessions = Sessions(models, self.store, self.metrics, secret=b"k")
        self.journal = self.sessions._journal

    async def ask(
        self, messages: list[Message], session: str = "s", caller: Caller = CALLER, **fields: Any
    ) -> Answer:
        return await self.sessions.complete(session, _request(messages, **fields), caller)

    async def turns(self, session: str = "s") -> list[Turn]:
        return turns_of(turn_records(await self.journal.read(session)))


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts gateway processes over one journal."""
    return functools.partial(Process, tmp_path)


def _spec(session: str = "s", **fields: Any) -> SessionSpec:
    return SessionSpec(session_id=session, turns_key=f"{session}.parquet", **fields)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _request(messages: list[Message], **fields: Any) -> ModelRequest:
    wire = json.loads(json.dumps(messages))  # as if parsed from the wire, so that nothing is shared
    body = {"model": "m", "messages": wire}
    defaults: Any = {"tools": None, "sampling": {}, "max_tokens": None}
    return ModelRequest(model="m", messages=wire, body=body, **(defaults | fields))


def _results(answer: Answer, text: str = "ok") -> list[Message]:
    calls = answer.message.get("tool_calls", ())
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]


def _next(messages: list[Message], answer: Answer, text: str = "ok") -> list[Message]:
    """The next request of an agent's loop."""
    return [*messages, answer.message, *(_results(answer, text) or [_user(text)])]


HELLO = [{"role": "system", "content": "You fix code."}, _user("Fix it.")]


# --- parents -----------------------------------------------------------------------------------


async def test_any_turn_of_a_chain_may_be_continued(start: Start) -> None:
    """A request that leaves out the newest exchange continues the turn before it: a fork."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    second = _next(HELLO, await process.ask(HELLO))
    await process.ask(second)
    await process.ask([*second, _user("Summarise.")])
    await process.ask([*second, _user("Once more.")])

    turns = await process.turns()

    assert [(turn.parent, turn.bridge_miss) for turn in turns] == [
        (None, "first"),
        (0, None),
        (0, None),
        (0, None),
    ]


def _defaults(message: Message) -> None:
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps({"extra": False, **json.loads(function["arguments"])})


def _another_command(message: Message) -> None:
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps({"command": "rm -rf /"})


def _unparsed(message: Message) -> None:
    raw = message["tool_calls"][0]["function"]["arguments"]
    wrapped = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    message["tool_calls"][0]["function"]["arguments"] = json.dumps(wrapped)


def _set(name: str, value: Any) -> Callable[[Message], None]:
    return lambda message: message.update({name: value})


def _rename(message: Message) -> None:
    message["tool_calls"][0]["function"]["name"] = "sh"


@pytest.mark.parametrize(
    ("change", "miss", "said"),
    [
        (_defaults, None, ["arguments_normalised"]),
        (_unparsed, None, ["arguments_normalised"]),
        (_another_command, None, ["arguments_changed"]),
        (_set("reasoning_content", ""), None, ["reasoning_dropped"]),
        (_set("content", "Now:\n\nLook."), None, ["text_moved"]),
        (_set("content", "Now:  Look!"), "echo_edited", ["text_changed"]),
        (_rename, "echo_edited", ["name_changed"]),
        (lambda message: message["tool_calls"].pop(), "echo_edited", ["calls_changed"]),
    ],
)
async def test_an_echo_is_compared_by_its_ids_and_classed(
    start: Start, change: Callable[[Message], None], miss: str | None, said: list[str]
) -> None:
    """Changes that clients normalize are counted and bridged; changed text, names or calls are
    edits."""
    said_first = {**TWO_CALLS, "content": "Now: Look.", "reasoning": "Hm."}
    process = start(Speaker(said_first, TEXT))
    await process.sessions.open(_spec())
    messages = json.loads(json.dumps(_next(HELLO, await process.ask(HELLO))))
    change(messages[2])
    await process.ask(messages)

    turn = (await process.turns())[1]

    assert turn.bridge_miss == miss
    assert json.loads(turn.answer)["parent_echo_changes"] == said


async def test_an_old_echo_may_change_its_form_later(start: Start) -> None:
    """If inputs of an earlier turn are rewritten later and results reordered, the chain stays
    one."""
    process = start(Speaker(TWO_CALLS, CALL, TEXT))
    await process.sessions.open(_spec())
    second = _next(HELLO, await process.ask(HELLO))
    third = json.loads(json.dumps(_next(second, await process.ask(second))))
    _defaults(third[2])
    third[3], third[4] = third[4], third[3]
    third[1]["content"] += "\n"
    await process.ask(third)

    assert [turn.bridge_miss for turn in await process.turns()] == ["first", None, None]


async def test_a_text_only_answer_is_found_again(start: Start) -> None:
    """Two equal texts of one chain are distinguished by the messages before them."""
    process = start(Speaker(TEXT))
    await process.sessions.open(_spec())
    second = _next(HELLO, await process.ask(HELLO), "Go on.")
    await process.ask(second)
    await process.ask([*second[:3], _user("Or else?")])

    assert [turn.parent for turn in await process.turns()] == [None, 0, 0]


async def test_an_edited_answer_and_a_foreign_answer_have_different_reasons(start: Start) -> None:
    """Text that was not sampled is never bridged, whether it replaces an answer or follows one."""
    process = start(Speaker(TEXT))
    await process.sessions.open(_spec())
    answer = await process.ask(HELLO)
    edited = {"role": "assistant", "content": "I did nothing."}
    await process.ask([*HELLO, edited, _user("Go on.")])
    await process.ask([*HELLO, answer.message, _user("Go on."), edited, _user("Go on.")])

    turns = await process.turns()

    assert [turn.bridge_miss for turn in turns] == ["first", "echo_edited", "foreign_assistant"]


async def test_ids_of_another_chain_are_no_parent(start: Start) -> None:
    """A sub-agent that gets its parent's history does not continue the parent's turns."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    messages = _next(HELLO, await process.ask(HELLO))
    await process.ask([_user("Look.")], chain="a1", parent_chain="main")
    await process.ask(messages, chain="a1", parent_chain="main")
    await process.ask(messages)

    turns = await process.turns()

    assert [(turn.chain, turn.parent_chain, turn.parent) for turn in turns] == [
        ("main", "", None),
        ("a1", "main", None),
        ("a1", "main", None),
        ("main", "", 0),
    ]


async def test_a_system_note_in_the_middle_is_bridged_in_place(start: Start) -> None:
    """A note after the tool results is rendered at its position, and the history before it
    stays."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    messages = _next(HELLO, await process.ask(HELLO))
    note = {"role": "system", "content": "[SYSTEM NOTIFICATION] done"}
    await process.ask([*messages, note])

    turn = (await process.turns())[1]

    assert turn.parent == 0
    assert FORMAT.tokenizer.decode(turn.prompt_ids).endswith(
        "<|im_start|>system\n[SYSTEM NOTIFICATION] done<|im_end|>\n<|im_start|>assistant\n"
    )
    assert json.loads(turn.new_messages) == [*messages[3:], note]


async def test_a_late_system_note_becomes_a_user_message_if_the_format_refuses_it(
    start: Start,
) -> None:
    """After a compaction, the note is in the middle of a root, where Qwen3.5 allows no system
    message."""
    strict = JinjaTemplate(NO_LATE_SYSTEM + (QWEN3 / "chat_template.jinja").read_text("utf-8"))
    qwen35 = ChatTemplate(FORMAT.tokenizer, strict, Found(Hermes(), False), Hermes.stops)
    process = start(Speaker(), Format(FORMAT.tokenizer, qwen35))
    await process.sessions.open(_spec())
    note = {"role": "system", "content": "Mind the tests."}
    await process.ask([*HELLO, note])

    prompt = FORMAT.tokenizer.decode((await process.turns())[0].prompt_ids)
    assert "<|im_start|>user\nMind the tests.<|im_end|>\n<|im_start|>assistant\n" in prompt


async def test_the_end_of_a_prompt_bridges_like_the_whole(start: Start) -> None:
    """Renderers that get only the end of a prompt give the same ids as for the whole prompt."""
    speaker = Speaker({**CALL, "reasoning": "Hm."}, THOUGHT, TEXT, CALL)
    process = start(speaker)
    await process.sessions.open(_spec())
    messages = [*HELLO[:1], _user("word " * 500)]
    for _ in range(4):
        messages = _next(messages, await process.ask(messages))
    awake = process.sessions._sessions["s"].awake
    assert awake is not None
    new = [_user("Go on.")]
    for node in awake.tree.nodes:
        prompt, completion = speaker.seen[node.record.index]
        whole = FORMAT.renderer.bridge_to_next_turn(list(prompt), list(completion), new)
        assert whole is not None

        assert list(bridge(FORMAT.renderer, node, node.ids(), new, None)) == whole


# --- retries -----------------------------------------------------------------------------------


async def test_a_used_answer_is_not_repeated(start: Start) -> None:
    """Once a later request carries the answer's ids, the same request is sampled again."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec())
    first = await process.ask(HELLO)
    again = await process.ask(HELLO)
    await process.ask(_next(HELLO, first))
    anew = await process.ask(HELLO)

    assert again == first
    assert anew.message["tool_calls"][0]["id"] != first.message["tool_calls"][0]["id"]
    assert len(set(speaker.request_ids)) == 3


async def test_an_answer_is_not_repeated_forever(start: Start) -> None:
    """An agent that repeats the same request gets out of its loop."""
    speaker = Speaker(TEXT)
    process = start(speaker)
    await process.sessions.open(_spec())
    for _ in range(14):
        await process.ask(HELLO)

    assert len(speaker.seen) == 2


async def _at_once(process: Process, speaker: Speaker, *callers: Caller, **spec: Any) -> list[str]:
    """The ids of the answers to identical concurrent calls."""
    await process.sessions.open(_spec(**spec))
    speaker.released.clear()
    calls = [asyncio.create_task(process.ask(HELLO, caller=one)) for one in callers]
    while sum(map(len, process.sessions._sessions["s"].callers.values())) < len(callers):
        await asyncio.sleep(0.001)
    speaker.released.set()
    return [answer.id for answer in await asyncio.gather(*calls)]


async def _gone() -> bool:
    return True


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (Caller(), Caller(), False),
        (Caller(), Caller(says_retry=True), True),
        (Caller(idempotency_key="a"), Caller(idempotency_key="a"), True),
        (Caller(idempotency_key="a"), Caller(idempotency_key="b"), False),
        (Caller(has_hung_up=_gone), Caller(), True),
    ],
    ids=["no proof", "header", "same key", "another key", "connection"],
)
async def test_identical_calls_are_siblings_unless_one_is_a_retry(
    first: Caller, second: Caller, same: bool, start: Start
) -> None:
    """Several samples of one prompt are several turns; a proven retry joins the call in flight."""
    speaker = Speaker()
    process = start(speaker)
    ids = await _at_once(process, speaker, first, second)

    assert len(set(ids)) == len(speaker.seen) == len(await process.turns()) == 2 - same


async def test_siblings_have_different_seeds(start: Start) -> None:
    """With a seed in the rollout, samples of one prompt differ, and repeating the calls repeats
    them."""
    speaker = Speaker()
    process = start(speaker)
    await _at_once(process, speaker, CALLER, CALLER, CALLER, sampling=Sampling(seed=7))
    seeds = [turn.sampling.seed for turn in await process.turns() if turn.sampling]

    assert len(set(seeds)) == 3


async def test_the_sibling_that_is_used_is_trained(start: Start) -> None:
    """The agent continues from the best of three answers; the others are no longer repeated for
    retries."""
    speaker = Speaker()
    process = start(speaker)
    await _at_once(process, speaker, CALLER, CALLER, CALLER)
    chosen = [turn for turn in await process.turns() if turn.index == 1]
    message = json.loads(chosen[0].answer)
    await process.ask([*HELLO, message, *_results(Answer("", 0, "m", message, "", {}))])
    turns = await process.turns()
    await process.ask(HELLO)

    assert [turn.index for turn in turns if turn.unused] == [0, 2]
    assert (turns[3].parent, turns[3].bridged) == (1, True)
    assert len(speaker.seen) == 5


async def unused(process: Process) -> list[int]:
    return [turn.index for turn in await process.turns() if turn.unused]


async def test_an_answer_that_is_asked_for_again_is_unused(start: Start) -> None:
    """The agent repeats the request with another limit and continues from the second answer. The
    last answer of the chain counts as used."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    await process.ask(HELLO)
    second = await process.ask(HELLO, max_tokens=64)
    await process.ask(_next(HELLO, second))

    assert await unused(process) == [0]


async def test_an_answer_that_the_agent_dropped_is_unused(start: Start) -> None:
    """The agent leaves out the newest exchange and continues the turn before it."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    first = await process.ask(HELLO)
    second = await process.ask(_next(HELLO, first))
    dropped = await process.ask(_next(_next(HELLO, first), second))
    assert dropped
    await process.ask(_next(_next(HELLO, first), second, "another result"))

    assert await unused(process) == [2]


async def test_an_edited_answer_was_used(start: Start) -> None:
    """The agent sends back its own form of the answer, so the policy's answer had an effect."""
    process = start(Speaker(TEXT))
    await process.sessions.open(_spec())
    await process.ask(HELLO)
    await process.ask([*HELLO, {"role": "assistant", "content": "My own words."}, _user("On.")])

    assert await unused(process) == []


async def test_a_summary_that_is_quoted_was_used(start: Start) -> None:
    """A harness that compacts by itself puts the answer into a user message."""
    summary = "The bug is in calc.py, and the fix is half done."
    process = start(Speaker({"content": summary}, TEXT))
    await process.sessions.open(_spec())
    await process.ask([*HELLO, _user("Sum up.")])
    await process.ask([*HELLO, _user(f"So far:\n{summary}\nGo on.")])

    assert await unused(process) == []


@pytest.mark.parametrize(
    ("told", "left_out"),
    [("Line 2.", []), ("<result>\nLine 2.\n</result>", []), ("Line 2. and 3", [1])],
)
async def test_an_unnamed_sub_agents_short_answer_is_used(
    start: Start, told: str, left_out: list[int]
) -> None:
    """Its requests are in the main chain; the agent gets the answer as a line of a tool result."""
    process = start(Speaker(CALL, {"content": "Line 2."}, TEXT))
    await process.sessions.open(_spec())
    asks = await process.ask(HELLO)
    await process.ask([_user("Which line?")])
    await process.ask(_next(HELLO, asks, told))

    assert await unused(process) == left_out


async def test_sub_agents_and_side_requests_are_used(start: Start) -> None:
    """The last answer of every chain counts as used. Turns that are not trained need no mark."""
    process = start(Speaker(TEXT))
    await process.sessions.open(_spec())
    await process.ask(HELLO, chain="sub")
    await process.ask([_user("A title?")], purpose=Purpose.SIDE)
    await process.ask([*HELLO, _user("Sum up.")], purpose=Purpose.COMPACTION)
    await process.ask([*HELLO, _user("More.")])

    assert await unused(process) == []


async def test_chains_run_concurrently(start: Start) -> None:
    """While one chain waits for the engine, another is sampled; neither joins the other."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec())
    speaker.released.clear()
    calls = [asyncio.create_task(process.ask(HELLO, chain=name)) for name in ("main", "a", "b")]
    while len(speaker.seen) < 3:
        await asyncio.sleep(0)
    speaker.released.set()
    answers = await asyncio.gather(*calls)

    turns = await process.turns()

    assert {turn.chain for turn in turns} == {"main", "a", "b"}
    assert [turn.index for turn in turns] == [0, 1, 2]
    assert len({answer.message["tool_calls"][0]["id"] for answer in answers}) == 3


async def test_an_empty_answer_gets_a_placeholder_and_its_ids_stay_recorded(start: Start) -> None:
    """An answer with only reasoning gives the agent text to send back; the record has what was
    sampled."""
    speaker = Speaker(THOUGHT, TEXT)
    process = start(speaker)
    await process.sessions.open(_spec())
    answer = await process.ask(HELLO)
    await process.ask(_next(HELLO, answer, "Go on."))

    first, second = await process.turns()

    assert answer.message["content"] == PLACEHOLDER
    assert json.loads(first.answer)["placeholder"] is True
    assert first.completion_ids == speaker.seen[0][1]
    assert second.parent == 0


async def test_a_prompt_without_room_for_an_answer_is_refused_before_sampling(start: Start) -> None:
    """A prompt as long as the context budget gives an error with both numbers, and no turn."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec(sampling=Sampling(max_context_tokens=20)))
    with pytest.raises(ContextExhausted) as caught:
        await process.ask([*HELLO, _user("word " * 30)])

    assert caught.value.limit == 20
    assert not speaker.seen


async def test_side_requests_are_recorded_and_not_trained(start: Start) -> None:
    """A title request is a turn that is not trained, and the session stays trainable."""
    process = start(Speaker(TEXT))
    await process.sessions.open(_spec())
    await process.ask(HELLO)
    await process.ask([_user("A title?")], purpose=Purpose.SIDE)

    turns = await process.turns()

    assert [turn.trainable for turn in turns] == [True, False]
    assert (await process.sessions.get("s")).trainable


# --- stray calls -------------------------------------------------------------------------------


async def test_a_call_without_the_agents_mark_is_stray(start: Start) -> None:
    """Code under test repeats the agent's own next request: it gets an answer of its own, which is not
    trained, and the agent's turns are as if nothing had happened."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    second = _next(HELLO, await process.ask(HELLO, mark="m"))
    await process.ask(second, chain="sub", parent_chain="main")
    await process.ask([_user("Sum up.")], mark="other", purpose=Purpose.COMPACTION)
    await process.ask(second, mark="m")

    turns = await process.turns()
    summary = await process.sessions.get("s")

    assert [(turn.chain, turn.purpose.value) for turn in turns] == [
        ("main", "step"),
        ("stray", "stray"),
        ("stray", "stray"),
        ("main", "step"),
    ]
    assert [turn.trainable for turn in turns] == [True, False, False, True]
    assert turns[3].parent == 0
    assert [segment.turns for segment in cut(turns)] == [(0, 3)]
    assert (summary.trainable, summary.chains) == (True, 1)


async def test_a_stray_call_without_an_answer_is_not_the_agents(start: Start) -> None:
    """The agent ended well although the engine failed its code under test."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec())
    await process.ask(HELLO, mark="m")
    speaker.failure = GatewayUnavailable("gone", boundary=Boundary.ENGINE)
    with pytest.raises(GatewayUnavailable):
        await process.ask([_user("From a test.")])

    assert (await process.sessions.close("s")).unanswered == ""


async def test_an_agent_without_a_mark_makes_all_calls(start: Start) -> None:
    """Agents that do not know the header are trained as ever."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    await process.ask(HELLO)
    await process.ask([_user("Look.")], mark="m")

    assert [turn.purpose for turn in await process.turns()] == [Purpose.STEP, Purpose.STEP]


async def test_another_process_knows_the_agents_mark(start: Start) -> None:
    """A gateway that had no call of the session learns from the journal who the agent is."""
    one, two = start(Speaker()), start(Speaker())
    await one.sessions.open(_spec())
    await two.sessions.open(_spec())
    await one.ask(HELLO, mark="m")
    await two.ask([_user("From a test.")])

    assert [turn.purpose for turn in await two.turns()] == [Purpose.STEP, Purpose.STRAY]


async def test_a_stray_call_ends_no_replay(start: Start) -> None:
    """In a new attempt the code under test asks something else; the agent's turns are still replayed."""
    process = start(Speaker())
    for session, replay_of in (("one", None), ("two", "one")):
        await process.sessions.open(_spec(session, replay_of=replay_of))
        second = _next(HELLO, await process.ask(HELLO, session, mark="m"))
        await process.ask([_user(f"From a test of {session}.")], session)
        await process.ask(second, session, mark="m")

    replayed = [turn.replayed_from for turn in await process.turns("two")]

    assert replayed == ["one/0", "", "one/2"]


# --- several processes -------------------------------------------------------------------------


async def test_another_process_continues_a_session(start: Start) -> None:
    """A second gateway reads what the first one wrote: retries repeat the answer, the next turn
    bridges."""
    speaker = Speaker()
    one, two = start(speaker), start(speaker)
    await one.sessions.open(_spec())
    await two.sessions.open(_spec())
    first = await one.ask(HELLO)
    repeated = await two.ask(HELLO)
    second = _next(HELLO, first)
    await two.ask(second)
    await one.ask([*second, _user("Go on.")])

    assert repeated == first
    assert [turn.parent for turn in await one.turns()] == [None, 0, 0]
    assert len(speaker.seen) == 3


async def test_one_of_two_processes_answers(start: Start) -> None:
    """If two gateways sample the same request at once, there is one turn, and both give its
    answer."""
    speaker = Speaker()
    one, two = start(speaker), start(speaker)
    await one.sessions.open(_spec())
    await two.sessions.open(_spec())
    speaker.released.clear()
    calls = [asyncio.create_task(process.ask(HELLO)) for process in (one, two)]
    while len(speaker.seen) < 2:
        await asyncio.sleep(0)
    speaker.released.set()
    answers = await asyncio.gather(*calls)

    assert answers[0] == answers[1]
    assert len(await one.turns()) == 1


async def test_a_session_that_another_gateway_sealed_refuses_calls(start: Start) -> None:
    """A turn that ends after another gateway closed the session is refused and not recorded."""
    speaker = Speaker()
    one, two = start(speaker), start(speaker)
    await one.sessions.open(_spec())
    speaker.released.clear()
    call = asyncio.create_task(one.ask(HELLO))
    while not speaker.seen:
        await asyncio.sleep(0)
    await two.sessions.close("s")
    speaker.released.set()

    with pytest.raises(Refused, match="closed"):
        await call
    assert await two.turns() == []


async def test_an_idle_session_sleeps_and_is_read_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle session's tree is freed, and nothing is lost."""
    monkeypatch.setattr(sessions_module, "IDLE_S", 0.0)
    monkeypatch.setattr(sessions_module, "TRIM_EVERY_S", 0.0)
    process = start(Speaker())
    await process.sessions.open(_spec())
    messages = _next(HELLO, await process.ask(HELLO))
    kept = process.sessions._sessions["s"].awake
    await process.ask(messages)

    assert kept is None
    assert [turn.parent for turn in await process.turns()] == [None, 0]
    assert (await process.sessions.get("s")).turns == 2


# --- closing -----------------------------------------------------------------------------------


async def test_an_idle_session_learns_what_another_process_did(start: Start) -> None:
    """The session sleeps here and is called at another gateway: its totals and its close include
    all turns."""
    one, two = start(Speaker()), start(Speaker())
    await one.sessions.open(_spec())
    messages = _next(HELLO, await one.ask(HELLO))
    one.sessions._sessions["s"].sleep()
    await two.ask(messages)

    assert (await one.sessions.get("s")).turns == 2
    one.sessions._sessions["s"].sleep()
    await two.ask([*messages, _user("More.")])
    assert (await one.sessions.close("s")).turns == 3
    assert len(decode((await one.store.get("s.parquet")).data)) == 3


async def test_a_call_during_a_close_is_not_sampled(start: Start) -> None:
    """If a session is closed while a call reads it back, the call is refused and no turn follows
    the seal."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec())
    messages = _next(HELLO, await process.ask(HELLO))
    session = process.sessions._sessions["s"]
    session.sleep()
    async with session.commit_lock:
        call = asyncio.create_task(process.ask(messages))
        close = asyncio.create_task(process.sessions.close("s"))
        while not session.sealing:
            await asyncio.sleep(0)

    with pytest.raises(Refused, match="closed"):
        await call
    assert (await close).turns == len(speaker.seen) == 1


async def test_a_prompt_that_is_made_too_late_is_not_sampled(start: Start) -> None:
    """Closing does not wait for a completion that has not begun."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec())
    session = process.sessions._sessions["s"]
    session.sealing = True

    with pytest.raises(Refused, match="closed"):
        await await_unless_closed(session, speaker.generate(GenerateCall([], {}, "s", "1")))
    assert speaker.seen == []


async def test_callers_that_joined_share_an_engines_failure(start: Start) -> None:
    """All get the error, nothing is recorded, and the next call is sampled again."""
    speaker = Speaker()
    speaker.released.clear()
    process = start(speaker)
    await process.sessions.open(_spec())
    calls = [asyncio.create_task(process.ask(HELLO, caller=AGAIN)) for _ in range(3)]
    while not speaker.seen:
        await asyncio.sleep(0.001)
    speaker.failure = GatewayUnavailable("gone", boundary=Boundary.ENGINE)
    speaker.released.set()
    told = await asyncio.gather(*calls, return_exceptions=True)
    speaker.failure = None

    assert [type(error) for error in told] == [GatewayUnavailable] * 3
    assert (await process.ask(HELLO)).message["tool_calls"]
    assert len(speaker.seen) == 2
    assert len(await process.turns()) == 1


async def test_a_turn_that_could_not_be_journaled_is_not_sampled_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call keeps its sampled tokens and waits until the journal accepts them."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec())
    refused = 0
    append = process.journal.append

    async def away_twice(*args: Any, **position: Any) -> None:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise GatewayUnavailable("the journal cannot be written")
        await append(*args, **position)

    monkeypatch.setattr(process.journal, "append", away_twice)
    answer = await process.ask(HELLO)
    await process.ask(_next(HELLO, answer))

    assert refused == 2
    assert len(speaker.seen) == 2
    assert len(await process.turns()) == 2
    assert process.sessions._sessions["s"].unwritten == {}


async def test_the_same_request_on_two_chains_is_two_turns(start: Start) -> None:
    """Two agents that send the same request at once each get an answer, and each continues its
    own."""
    process = start(Speaker())
    await process.sessions.open(_spec())
    names = ["main", "a1"]
    first = await asyncio.gather(*(process.ask(HELLO, chain=name) for name in names))
    asked = zip(names, first, strict=True)
    await asyncio.gather(*(process.ask(_next(HELLO, a), chain=name) for name, a in asked))

    turns = await process.turns()
    assert sorted(turn.chain for turn in turns) == ["a1", "a1", "main", "main"]
    parents = [(turn.chain, turns[turn.parent].chain) for turn in turns if turn.parent is not None]
    assert sorted(parents) == [("a1", "a1"), ("main", "main")]


# --- replay ------------------------------------------------------------------------------------


async def _attempt(process: Process, session: str, texts: list[str], **spec: Any) -> None:
    await process.sessions.open(_spec(session, **spec))
    messages: list[Message] = HELLO
    for text in texts:
        messages = _next(messages, await process.ask(messages, session), text)


async def test_a_new_attempt_replays_until_it_differs(start: Start) -> None:
    """Matching requests get the recorded ids without the engine; the first different one is
    sampled."""
    speaker = Speaker({**CALL, "reasoning": "Hm."})
    process = start(speaker)
    await _attempt(process, "one", ["a", "b", "c", "d"])
    await _attempt(process, "two", ["a", "b", "other", "d"], replay_of="one")

    one, two = await process.turns("one"), await process.turns("two")

    assert [turn.replayed_from for turn in two] == ["one/0", "one/1", "one/2", ""]
    assert [turn.parent for turn in two] == [None, 0, 1, 2]
    for before, after in zip(one[:3], two[:3], strict=True):
        assert (after.prompt_ids, after.completion_ids) == (
            before.prompt_ids,
            before.completion_ids,
        )
        assert (after.logprobs, after.answer) == (before.logprobs, before.answer)
    assert len(speaker.seen) == 5
    summary = await process.sessions.get("two")
    assert (summary.replayed_turns, summary.replayed_tokens) == (
        3,
        sum(len(turn.completion_ids) for turn in one[:3]),
    )


async def test_a_replay_that_ended_stays_ended(start: Start) -> None:
    """After its first different request, every request of a chain is sampled."""
    speaker = Speaker()
    process = start(speaker)
    await _attempt(process, "one", ["a"])
    await process.sessions.open(_spec("two", replay_of="one"))
    await process.ask([_user("Something else.")], "two")
    await process.ask(HELLO, "two")

    assert [turn.replayed_from for turn in await process.turns("two")] == ["", ""]


async def test_replay_continues_in_another_process_and_attempt(start: Start) -> None:
    """A gateway that takes over continues the replay; a third attempt replays the second one's
    turns."""
    speaker = Speaker()
    one, two = start(speaker), start(speaker)
    await _attempt(one, "one", ["a", "b", "c"])
    await _attempt(one, "two", ["a"], replay_of="one")
    await _attempt(two, "two", ["a", "b"], replay_of="one")
    await _attempt(two, "three", ["a", "b"], replay_of="two")

    assert [turn.replayed_from for turn in await two.turns("two")] == ["one/0", "one/1"]
    assert [turn.replayed_from for turn in await two.turns("three")] == ["one/0", "one/1"]
    assert len(speaker.seen) == 3


async def test_sub_agents_under_new_names_are_replayed(start: Start) -> None:
    """A harness gives its sub-agents new names; the chain with the same first request is the same
    one."""
    speaker = Speaker()
    process = start(speaker)
    await process.sessions.open(_spec("one"))
    await process.sessions.open(_spec("two", replay_of="one"))
    for session, chain in (("one", "a-77"), ("two", "a-99")):
        answer = await process.ask([_user("Look.")], session, chain=chain, parent_chain="main")
        await process.ask(_next([_user("Look.")], answer), session, chain=chain)

    assert [turn.replayed_from for turn in await process.turns("two")] == ["one/0", "one/1"]
    assert len(speaker.seen) == 2


async def test_session_ids_and_ports_do_not_end_a_replay(start: Start) -> None:
    """Differences that every attempt has do not count."""
    speaker = Speaker()
    process = start(speaker)
    uuids = ["52d6f847-bb41-41f3-861a-bf575299687a", "3b9b0af6-c927-4cf7-abd3-18b8ce74ae17"]
    await process.sessions.open(_spec("one"))
    await process.sessions.open(_spec("two", replay_of="one"))
    for session, uuid, port in zip(("one", "two"), uuids, (8100, 9200), strict=True):
        await process.ask([_user(f"In /tmp/{uuid}, at http://127.0.0.1:{port}/v1")], session)

    assert len(speaker.seen) == 1


@pytest.mark.parametrize(
    ("output", "first", "second"),
    [
        (
            "Chunk ID: {}\nWall time: {} seconds\nProcess exited with code 0\nOutput:\ncalc.py\n",
            ("5f25e9", "0.0512"),
            ("2490fc", "1.2000"),
        ),
        (
            "Output: calc.py\nBackground PIDs: {}\nProcess Group PGID: {}",
            ("71, 73", "70"),
            ("9", "8"),
        ),
    ],
    ids=["codex", "gemini_cli"],
)
async def test_what_agents_add_to_outputs_does_not_end_a_replay(
    start: Start, output: str, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """Two runs of a command with equal output count as equal, even if ids and times differ."""
    speaker = Speaker()
    process = start(speaker)
    await _attempt(process, "one", [output.format(*first), "x"])
    await _attempt(process, "two", [output.format(*second), "x"], replay_of="one")

    assert [turn.replayed_from for turn in await process.turns("two")] == ["one/0", "one/1"]
    assert len(speaker.seen) == 2


# --- any tree ----------------------------------------------------------------------------------


async def _random_session(process: Process, dice: random.Random) -> None:
    """Agents that continue, fork, compact, retry and edit, in several chains."""
    histories: dict[str, list[list[Message]]] = {"main": [HELLO]}
    for _ in range(dice.randint(5, 25)):
        chain = dice.choice([*histories, f"agent-{len(histories)}"])
        known = histories.setdefault(chain, [[_user(f"You are {chain}.")]])
        messages = dice.choice(known[-3:])
        for _ in range(dice.choice((1, 1, 1, 2))):
            answer = await process.ask(messages, chain=chain)
        following = json.loads(json.dumps(_next(messages, answer, f"result {dice.random()}")))
        kind = dice.randrange(8)
        if kind == 0:
            following = [_user(f"Continued: {dice.random()}"), *following[-2:]]
        elif kind == 1:
            following = [_user(f"Anew: {dice.random()}")]
        elif kind == 2:
            following[len(messages)]["content"] = "Edited."
        known.append(following)


async def test_a_gateway_answers_while_it_writes_the_turns_of_a_closed_session(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing the turns of a long session takes a second."""
    writing, answered = threading.Event(), threading.Event()

    def long(records: list[Any]) -> bytes:
        writing.set()
        assert answered.wait(30)
        return turns_file(records)

    monkeypatch.setattr(sessions_module, "turns_file", long)
    process = start(Speaker())
    for session in ("s", "other"):
        await process.sessions.open(_spec(session))
        await process.ask(HELLO, session)
    closing = asyncio.create_task(process.sessions.close("s"))
    while not writing.is_set():
        await asyncio.sleep(0.001)
    await process.ask([_user("And now?")], "other")
    answered.set()
    await closing

    assert len(decode((await process.store.get("s.parquet")).data)) == 1


@pytest.mark.parametrize("seed", range(12))
async def test_in_any_tree_every_token_is_in_one_node(start: Start, seed: int) -> None:
    """Recorded ids are the engine's, children start with their parents, and each token is trained
    once."""
    dice = random.Random(seed)
    said = [CALL, TWO_CALLS, TEXT, THOUGHT, {**CALL, "reasoning": "Hm."}]
    speaker = Speaker(*dice.choices(said, k=60))
    process = start(speaker)
    await process.sessions.open(_spec())
    await _random_session(process, dice)
    await process.sessions.close("s")

    turns = decode((await process.store.get("s.parquet")).data)

    assert [(turn.prompt_ids, turn.completion_ids) for turn in turns] == speaker.seen
    for turn in turns:
        if turn.parent is not None:
            held = turns[turn.parent].prompt_ids + turns[turn.parent].completion_ids
            assert turn.prompt_ids[: len(held)] == held
            assert turns[turn.parent].chain == turn.chain
    sampled = sum(len(turn.completion_ids) for turn in turns)
    unused = sum(len(turn.completion_ids) for turn in turns if turn.unused)
    assert sum(sum(segment.loss_mask) for segment in cut(turns)) == sampled - unused
    kept = cut(turns, keep_unused=True)
    assert sum(sum(segment.loss_mask) for segment in kept) == sampled


# --- caps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["turns", "tokens", "dollars"])
async def test_a_reached_cap_refuses_the_next_call(start: Start, what: str) -> None:
    """Another process refuses it too, and both tell the agent's stage. A repeated call still gets its
    answer."""
    one, two = start(Speaker()), start(Speaker())
    await one.sessions.open(_spec("other"))
    usage = (await one.ask(HELLO, "other")).usage
    # More than one call uses, and more than both calls sample.
    tokens = usage["prompt_tokens"] + 2 * usage["completion_tokens"] + 1
    price = Price(input=1e6, output=1e6)
    caps = {"turns": {"turns": 2}, "tokens": {"tokens": tokens}, "dollars": {"dollars": tokens}}
    await one.sessions.open(_spec(caps=Caps(price=price, **caps[what])))
    more = _next(HELLO, await one.ask(HELLO))
    second = await one.ask(more)
    for process in (one, two):
        with pytest.raises(Refused, match=f"it has used .* {what}") as refused:
            await process.ask(_next(more, second))

        assert refused.value.code == "cap_reached"
        assert what in (await process.sessions.get("s")).capped
    assert await one.ask(more) == second
    assert (await two.sessions.close("s")).turns == 2


async def test_a_stopped_session_refuses_its_next_call(start: Start) -> None:
    """In every process, of which each tells the agent's stage; not the call that it has answered. The
    agent has reached no cap until a call of it is refused: it may end by itself."""
    one, two = start(Speaker()), start(Speaker())
    await one.sessions.open(_spec())
    first = await one.ask(HELLO)
    stopped = [await process.sessions.stop("s") for process in (two, one)]

    assert [(it.stopped, it.capped, it.open) for it in stopped] == [(True, "", True)] * 2
    assert await one.ask(HELLO) == first
    with pytest.raises(Refused, match="stopped from outside") as refused:
        await one.ask(_next(HELLO, first))
    assert refused.value.code == "cap_reached"
    seen = await two.sessions.get("s")
    assert (seen.stopped, seen.capped, seen.turns) == (True, "stopped from outside", 1)


async def test_a_side_request_does_not_reach_a_cap(start: Start) -> None:
    """It is refused, but the agent may have ended by itself."""
    it = start(Speaker())
    await it.sessions.open(_spec(caps=Caps(turns=1)))
    await it.ask(HELLO)
    with pytest.raises(Refused):
        await it.ask([_user("A title?")], purpose=Purpose.SIDE)

    assert (await it.sessions.get("s")).capped == ""
