"""The user of a conversation: what it is asked, when it answers, and how its turns are graded."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.agents import agent_validation
from perdure.agents.acp import Acp
from perdure.agents.codex import Codex
from perdure.agents.in_sandbox import acp_client
from perdure.agents.oracle import Oracle
from perdure.client.request_comparison import differences, outcome_fields
from perdure.data_source_handlers import PublicDatasetHandler
from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound
from perdure.gateway.gateway_addresses import Gateways
from perdure.home_folder import load_secrets
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.simulated_user import turn_grading, user_model
from perdure.rollouts.simulated_user.conversation import Conversation
from perdure.rollouts.simulated_user.user_model import END, UserModelRefused
from perdure.rollouts.simulated_user.user_turn import UserTurn
from perdure.rollouts.simulated_user.user_validation import check_user
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import (
    Grade,
    Grading,
    Instance,
    Outcome,
    PatchRef,
    Rewards,
    RolloutRequest,
    SimulatedUser,
    Source,
    SourceKind,
    TestStatus,
    conversation_user,
)
from tests.stack.quota_engine import QuotaEngine
from tests.unit.rollouts.one_try import OneTry

TASK = "add() subtracts."
INSTANCE = Instance(
    instance_id="add",
    dataset="tests",
    problem_statement=TASK,
    source=Source(kind=SourceKind.DIRECTORY, path="/nowhere"),
    grading=Grading(fail_to_pass=("t::add", "t::sub"), pass_to_pass=("t::old",)),
)
SAID = [UserTurn(turn=1, said="I added a file.", message="Remove it.")]


class Box:
    """A sandbox whose files are in a folder, and whose agent ends when a test says so."""

    identity = "box"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status = ExecStatus(ExecState.RUNNING)

    async def wait(self, _: str, seconds: float) -> ExecStatus:
        await asyncio.sleep(0)
        return self.status

    async def get(self, path: str, limit: int) -> bytes:
        try:
            return (self.folder / Path(path).name).read_bytes()[:limit]
        except FileNotFoundError:
            raise NotFound(path) from None

    async def put(self, path: str, data: bytes) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / Path(path).name).write_bytes(data)

    def says(self, turn: int) -> "asyncio.Task[str | None]":
        """The agent ends a turn, and waits for the user like the real client."""
        said = f"I ended turn {turn}."
        return asyncio.create_task(acp_client.next_message(self.folder, turn, said))


def job_of(tmp_path: Path, user: SimulatedUser | None, **services: Any) -> Job:
    store = LocalStore(tmp_path / "store")
    known = {"agent": lambda _: Acp(), **services}
    return Job(
        services=cast(Any, SimpleNamespace(store=store, **known)),
        activity_attempt=cast(Any, OneTry("play")),
        request=RolloutRequest(run_id="r", instance="tests/add", agent="acp", user=user),
        attempt=1,
        workflow_run_id="w",
        permit="",
        stop=False,
        row=INSTANCE,
    )


async def until_done(conversation: Conversation, answer: "asyncio.Task[str | None]") -> str | None:
    """Watch as the stage does until the agent has the user's answer."""
    async with asyncio.timeout(30):
        while not answer.done():
            await conversation.wait(0.05)
    return answer.result()


# --- what a user is -------------------------------------------------------------------------------


def test_a_request_overrides_the_rows_user_field_by_field() -> None:
    """So a row can bring the persona, and the request the model that plays it."""
    row = SimulatedUser(instruction="You maintain h11.", max_messages=3)
    merged = conversation_user(row, SimulatedUser(model="big"))

    assert merged == SimulatedUser(model="big", instruction="You maintain h11.", max_messages=3)
    assert conversation_user(row, SimulatedUser(max_messages=0)) is None
    assert conversation_user(None, None) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "user: give `messages`, or the `model`"),
        ({"model": "big"}, r"user\.instruction: tell the model"),
        ({"messages": ["x" * 66_000]}, "at most 65,536 are allowed"),
        ({"messages": ["x"] * 51}, "at most 50 items"),
        ({"messages": [""]}, "at least 1 character"),
        ({"messages": ["x"], "max_messages": 51}, "less than or equal to 50"),
    ],
)
def test_a_user_who_cannot_be_played_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        conversation_user(None, SimulatedUser(**fields))


def test_an_agent_that_takes_one_message_refuses_a_user() -> None:
    user = SimulatedUser(messages=("Go on.",))
    agent_validation.check_options("acp", {"command": ["goose", "acp"]}, user=user)
    agent_validation.check_options("nop", {}, user=user)

    with pytest.raises(ConfigurationError, match=r"user: agent 'codex' takes no message.*acp"):
        agent_validation.check_options("codex", {}, user=user)


async def test_wrong_tests_of_a_turn_are_refused_before_a_sandbox_boots(tmp_path: Path) -> None:
    """The error names the turn and the test."""
    tests = (("t::add",), ("t::gone",))
    user = SimulatedUser(messages=("Go on.",), grade_turns=True, turn_tests=tests)
    job = job_of(tmp_path, user, handler=PublicDatasetHandler)

    with pytest.raises(ConfigurationError, match=r"user\.turn_tests: turn 2 names 't::gone'"):
        await check_user(job)


async def test_a_rows_user_refuses_only_agents_that_would_ignore_it(tmp_path: Path) -> None:
    """Calibration applies the known fix to a row that has a user."""
    user = SimulatedUser(messages=("Go on.",))
    silent = job_of(tmp_path, user, agent=lambda _: Oracle(), handler=PublicDatasetHandler)
    deaf = job_of(tmp_path, user, agent=lambda _: Codex(), handler=PublicDatasetHandler)
    await check_user(silent)

    assert silent.user is None
    with pytest.raises(ConfigurationError, match="takes no message"):
        await check_user(deaf)


def test_another_user_is_another_rollout() -> None:
    plain = RolloutRequest(run_id="r", instance="tests/add")
    asked = plain.model_copy(update={"user": SimulatedUser(messages=("Go on.",))})

    assert differences(outcome_fields(plain), outcome_fields(asked))


# --- the conversation -----------------------------------------------------------------------------


async def test_each_message_of_a_script_comes_after_a_turn(tmp_path: Path) -> None:
    """The agent never sees a message early, and is told when the script is over."""
    box = Box(tmp_path / "box")
    job = job_of(tmp_path, SimulatedUser(messages=("Test it.", "Thanks.")))
    assert job.user is not None
    async with Conversation(job, cast(Any, box), job.user) as conversation:
        await conversation.wait(0)
        early = list(box.folder.glob("user-*"))
        heard = [await until_done(conversation, box.says(turn)) for turn in (1, 2, 3)]
    stored = await job.read("user-3.json", UserTurn)

    assert early == []
    assert heard == ["Test it.", "Thanks.", None]
    assert stored is not None
    assert (stored.end, stored.said) == ("script", "I ended turn 3.")


async def test_max_messages_ends_a_longer_script(tmp_path: Path) -> None:
    box = Box(tmp_path / "box")
    job = job_of(tmp_path, SimulatedUser(messages=("a", "b", "c"), max_messages=1))
    assert job.user is not None
    async with Conversation(job, cast(Any, box), job.user) as conversation:
        heard = [await until_done(conversation, box.says(turn)) for turn in (1, 2)]

    assert heard == ["a", None]


async def test_another_worker_sends_the_stored_answer_again(tmp_path: Path) -> None:
    """The first died between storing and sending it. The user is not asked a second time."""
    box = Box(tmp_path / "box")
    job = job_of(tmp_path, SimulatedUser(messages=("new",)))
    await job.write("user-1.json", UserTurn(turn=1, said="", message="stored", seconds=7.0))
    assert job.user is not None
    async with Conversation(job, cast(Any, box), job.user) as conversation:
        heard = await until_done(conversation, box.says(1))
        waited = conversation.waited_s

    assert (heard, waited) == ("stored", 7.0)


async def test_the_watch_learns_at_once_that_the_agent_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can then extend the agent's time. An agent that is ended while it waits is unanswered."""
    box, asked = Box(tmp_path / "box"), asyncio.Event()

    async def never(*_: object) -> Any:
        asked.set()
        await asyncio.Event().wait()

    job = job_of(tmp_path, SimulatedUser(model="big", instruction="Be kind."))
    assert job.user is not None
    async with Conversation(job, cast(Any, box), job.user) as conversation:
        monkeypatch.setattr(conversation, "_next", never)
        answer = box.says(1)
        async with asyncio.timeout(30):
            while not conversation.is_waiting:
                await conversation.wait(3600)
            await asked.wait()
        box.status = ExecStatus(ExecState.KILLED, cause="timeout")
        await conversation.wait(3600)

        assert conversation.is_unanswered
        assert conversation.waited_s > 0
    answer.cancel()


@pytest.mark.parametrize(("watched", "unanswered"), [(False, True), (True, False)])
async def test_who_is_to_blame_for_an_agent_that_was_ended_unwatched(
    tmp_path: Path, watched: bool, unanswered: bool
) -> None:
    """Without a watch, the user is to blame. With one, the turn ended too recently for that."""
    box = Box(tmp_path / "box")
    job = job_of(tmp_path, SimulatedUser(messages=("a",)))
    assert job.user is not None
    async with Conversation(job, cast(Any, box), job.user) as conversation:
        if watched:
            await conversation.wait(0)
        box.folder.mkdir(exist_ok=True)
        (box.folder / "turn-1.txt").write_text("Done.")
        box.status = ExecStatus(ExecState.KILLED, cause="timeout")
        await conversation.wait(0)

    assert conversation.is_unanswered is unanswered


# --- the model ------------------------------------------------------------------------------------


@asynccontextmanager
async def asking(
    tmp_path: Path, *answers: dict[str, Any], **user: Any
) -> AsyncIterator[tuple[Job, SimulatedUser, ScriptedEngine]]:
    """A real gateway, and an engine whose model plays the user with these answers."""
    async with (
        ScriptedEngine({"default": {"turns": list(answers)}}) as engine,
        asking_at(tmp_path, engine.url, "vllm", **user) as (job, played),
    ):
        yield job, played, engine


@asynccontextmanager
async def asking_at(
    tmp_path: Path, url: str, kind: str, **user: Any
) -> AsyncIterator[tuple[Job, SimulatedUser]]:
    """A real gateway before this engine."""
    async with LocalGateway(tmp_path / "home", engine={"url": url, "kind": kind}) as gateway:
        settings = Settings(home=tmp_path / "home", gateway={"url": gateway.url})
        gateways = Gateways(settings, gateway.store, load_secrets(settings))
        played = SimulatedUser(model="policy", instruction="You want floats.", **user)
        yield job_of(tmp_path, played, gateway=gateway.control, gateways=gateways), played


async def test_a_repeated_question_buys_no_second_answer(tmp_path: Path) -> None:
    """Another worker and another attempt get the same words, and they count once."""
    async with asking(tmp_path, {"content": "Remove it."}) as (job, user, engine):
        first = await user_model.next_message(job, user, [], "I added a file.")
        again = await user_model.next_message(replace(job, attempt=2), user, [], "I added a file.")
        sampled = [
            call for call in engine.calls if call.session_id == user_model.session_of(job.request)
        ]

    assert first == again
    assert first.message == "Remove it."
    assert first.completion is not None
    assert [len(call.completion_ids) for call in sampled] == [first.completion.sampled_tokens]


@pytest.mark.parametrize("content", [f"Thanks! {END}", ""])
async def test_the_model_ends_the_conversation(tmp_path: Path, content: str) -> None:
    """Its tokens still count."""
    async with asking(tmp_path, {"content": content}) as (job, user, _):
        answer = await user_model.next_message(job, user, [], "Done.")

    assert (answer.message, answer.end) == (None, "user")
    assert answer.completion is not None


async def test_a_conversation_that_no_longer_fits_the_model_ends(tmp_path: Path) -> None:
    """A policy must not be able to avoid a verdict by filling the user model's context."""
    long = [SAID[0].model_copy(update={"said": "word " * 3000})] * 40
    async with asking(tmp_path, {"content": "Go on."}) as (job, user, _):
        answer = await user_model.next_message(job, user, long, "Done.")

    assert answer == (None, "context", None)


async def test_a_model_that_only_reasons_is_no_user(tmp_path: Path) -> None:
    """Its limit is too low: the rollout has no verdict, and the error names the field."""
    thought = {"content": "Hi.", "reasoning": "Hm. " * 100}
    async with asking(tmp_path, thought, max_tokens=9) as (job, user, _):
        with pytest.raises(
            UserModelRefused, match=r"no message in 9 tokens: raise user\.max_tokens"
        ):
            await user_model.next_message(job, user, [], "Done.")


async def test_a_gateway_that_is_away_is_asked_again(tmp_path: Path) -> None:
    """Its failure is retried, and never an answer or a reward."""
    async with asking(tmp_path, {"content": "Go on."}) as (job, user, _):
        pass
    with pytest.raises(GatewayUnavailable):
        await user_model.next_message(job, user, [], "Done.")


async def test_a_user_without_quota_ends_the_watch(tmp_path: Path) -> None:
    """The rollout can then give its sandbox back. A worker that finds the agent ended knows why too."""
    async with QuotaEngine() as engine:
        engine.quota, engine.resets_at = 0, time.time() + 3600
        async with asking_at(tmp_path, engine.url, "openai") as (job, user):
            box = Box(tmp_path / "box")
            async with Conversation(job, cast(Any, box), user) as conversation:
                answer = box.says(1)
                async with asyncio.timeout(60):
                    while not conversation.waits_for_quota:
                        await conversation.wait(0.05)
                box.status = ExecStatus(ExecState.KILLED)
                told = await conversation.unanswered(box.status)
            answer.cancel()
            async with Conversation(job, cast(Any, box), user) as again:
                await again.wait(0)
                told_again = await again.unanswered(box.status)

    assert told.startswith("its user: the quota resets at 20")
    assert told_again == told


async def test_an_agent_that_ends_by_itself_has_no_excuse(tmp_path: Path) -> None:
    """Otherwise a policy could avoid a verdict by ending while the user thinks."""
    async with asking(tmp_path, {"content": "Go on."}) as (job, user, _):
        box = Box(tmp_path / "box")
        (tmp_path / "box").mkdir()
        (tmp_path / "box" / "turn-1.txt").write_text("Done.")
        box.status = ExecStatus(ExecState.EXITED, 1)
        async with Conversation(job, cast(Any, box), user) as conversation:
            await conversation.wait(0)
            told = await conversation.unanswered(box.status)

    assert (conversation.is_unanswered, told) == (True, "")


async def test_the_model_gets_the_conversation_from_the_users_side() -> None:
    user = SimulatedUser(model="big", instruction="You want floats.")
    messages = user_model.conversation(user, TASK, SAID, "")

    assert "You want floats." in messages[0]["content"]
    assert [one["content"] for one in messages if one["role"] == "assistant"] == [
        TASK,
        "Remove it.",
    ]
    assert [one["content"] for one in messages if one["role"] == "user"] == [
        user_model.GREETING,
        "I added a file.",
        user_model.SILENCE,
    ]


# --- grades ---------------------------------------------------------------------------------------


FINAL = Grade(
    outcome=Outcome.RESOLVED,
    rewards=Rewards(binary=1.0),
    named_rewards={"speed": 0.5, "turn-1": 9.0},
    fail_to_pass={"t::add": TestStatus.PASSED, "t::sub": TestStatus.PASSED},
    patch_sha256="final",
)
HALF = FINAL.model_copy(
    update={
        "outcome": Outcome.UNRESOLVED,
        "rewards": Rewards(binary=0.0),
        "fail_to_pass": {"t::add": TestStatus.PASSED, "t::sub": TestStatus.FAILED},
        "patch_sha256": "half",
    }
)
HALF_PATCH = PatchRef(key="turn-1.diff", sha256="half", size=1, empty=False)
REFUSED = PatchRef(key="turn-2.diff", sha256="", size=0, empty=True, refused="no git")


async def graded(tmp_path: Path, final: Grade, *tests: tuple[str, ...]) -> tuple[Grade, list[int]]:
    """The grade with those of two turns, of which the second left no diff; the turns that ran tests."""
    user = SimulatedUser(messages=("a", "b"), grade_turns=True, turn_tests=tests)
    job, ran = job_of(tmp_path, user), list[int]()

    async def by_tests(_: Job, patch: PatchRef, turn: int) -> Grade:
        ran.append(turn)
        return HALF

    turns = [(1, HALF_PATCH), (2, REFUSED)]
    for _ in range(2):  # a killed worker's grading begins again
        found = await turn_grading.with_turn_grades(job, final, turns, "g", by_tests)
    return found, ran


async def test_each_turn_has_a_reward_of_its_own(tmp_path: Path) -> None:
    """A turn without a diff has none. The tests run once per turn, and write no reward of a turn."""
    found, ran = await graded(tmp_path, FINAL)

    assert [one.reward for one in found.turn_grades] == [0.0, None, 1.0]
    assert [one.patch_sha256 for one in found.turn_grades] == ["half", "", "final"]
    assert found.named_rewards == {"speed": 0.5, "turn-1": 0.0, "turn-3": 1.0}
    assert ran == [1]


async def test_the_tests_of_a_turn_decide_its_reward(tmp_path: Path) -> None:
    """Their passing share. A turn that names none is graded by all."""
    found, _ = await graded(tmp_path, FINAL, ("t::add", "t::sub"))

    assert [one.reward for one in found.turn_grades] == [0.5, None, 1.0]


async def test_forged_results_have_no_turn_rewards(tmp_path: Path) -> None:
    tampered = FINAL.model_copy(update={"outcome": Outcome.TAMPERED, "named_rewards": {}})
    found, _ = await graded(tmp_path, tampered)

    assert found.named_rewards == {}
