"""Agent Client Protocol servers from npm, in a bubblewrap sandbox, against the real gateway and a
scripted policy: the published client drives several turns of the user."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perdure.agents.acp import Acp
from perdure.testing.agent_stand import Run, Stand, call, script
from perdure.types import AgentEnd, Outcome, Sampling
from tests.agents import (
    test_claude_code,
    test_codex,
    test_gemini_cli,
    test_opencode,
    test_qwen_code,
    tiny_acp_server,
)

pytestmark = pytest.mark.registry

TINY = ["python3", "-c", Path(tiny_acp_server.__file__).read_text()]
FIX = "RUN sed -i 's/a - b/a + b/' calc.py"
CHECK_IT = "Now check that it adds."
DONE = {"content": "add() adds now."}


class Case(NamedTuple):
    server: str
    read: dict[str, Any]
    edit: dict[str, Any]
    check: dict[str, Any]
    bash: Callable[[str], dict[str, Any]]
    asks: bool
    """Whether its settings leave permissions to the client."""
    context: int = 40_000
    full: AgentEnd = AgentEnd.LIMIT
    """Its end if the conversation no longer fits `context` tokens."""


NOISE = "head -c 9000 /dev/urandom | base64 -w 100"
CASES = [
    Case(
        "claude_code",
        test_claude_code.READ,
        test_claude_code.EDIT,
        test_claude_code.CHECK,
        lambda command: call("Bash", "Now.", command=command),
        asks=True,
        context=6500,
    ),
    Case(
        "codex",
        test_codex.READ,
        test_codex.EDIT,
        test_codex.CHECK,
        lambda command: call("exec_command", "Now.", cmd=command, yield_time_ms=30_000),
        asks=False,
    ),
    Case(
        "gemini_cli",
        test_gemini_cli.READ,
        test_gemini_cli.EDIT,
        test_gemini_cli.CHECK,
        test_gemini_cli.bash,
        asks=True,
    ),
    Case(
        "opencode",
        test_opencode.READ,
        test_opencode.EDIT,
        test_opencode.CHECK,
        test_opencode.bash,
        asks=False,
        full=AgentEnd.GAVE_UP,  # it asks for a summary, and the script calls a tool
    ),
]
every_server = pytest.mark.parametrize("case", CASES, ids=lambda case: case.server)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    log = [json.loads(line) for line in run.evidence.stdout_tail.splitlines()]
    return [event for event in log if event["type"] == kind]


def reasons(run: Run) -> list[str]:
    return [event["stop_reason"] for event in events(run, "turn_end")]


@every_server
async def test_it_solves_a_task_over_two_turns_of_the_user(stand: Stand, case: Case) -> None:
    """The second turn goes to the same session: the patch is resolved, every call is captured exactly,
    and all that was sampled in the main chain is trained."""
    run = await stand.run(
        Acp(),
        script(case.read, case.edit, DONE, case.check, DONE),
        asked={"Generate a title": {"content": "Fix add()"}},
        options={"server": case.server},
        messages=[CHECK_IT],
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert reasons(run) == ["end_turn", "end_turn"]
    assert len(run.steps()) == 5
    assert bool(events(run, "permission")) == case.asks
    assert run.trained() == sum(len(turn.completion_ids) for turn in run.steps())
    run.assert_token_exact()


@every_server
async def test_a_full_context_is_no_fault(stand: Stand, case: Case) -> None:
    """A prompt that the gateway refuses ends it as the agent itself would end, and its work is kept."""
    run = await stand.run(
        Acp(),
        script(case.edit, *[case.bash(NOISE)] * 14, DONE),
        asked={"Generate a title": {"content": "Fix add()"}},
        options={"server": case.server}
        | ({} if case.server == "gemini_cli" else {"context_window": 96_000}),
        messages=[CHECK_IT],
        sampling=Sampling(max_context_tokens=case.context, max_tokens_per_turn=500),
    )

    assert (run.end, run.grade.outcome) == (case.full, Outcome.RESOLVED), run.said
    run.assert_token_exact()


@pytest.mark.longer
@every_server
async def test_a_cancelled_turn_of_a_real_server(stand: Stand, case: Case) -> None:
    """It stops the command of the turn, and answers the user's next turn in the same session."""
    run = await stand.run(
        Acp(),
        script(case.read, case.bash("sleep 600"), case.edit, DONE),
        asked={"Generate a title": {"content": "Fix add()"}},
        options={"server": case.server, "turn_s": 12.0},
        messages=[CHECK_IT],
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert reasons(run) == ["cancelled", "end_turn"]


async def test_a_server_from_npm_that_no_one_listed(stand: Stand) -> None:
    """A package with its version and a command are enough: several turns, captured and graded."""
    run = await stand.run(
        Acp(),
        test_qwen_code.of(
            test_qwen_code.READ, test_qwen_code.EDIT, DONE, test_qwen_code.CHECK, DONE
        ),
        options={
            "package": "@qwen-code/qwen-code@0.15.10",
            "command": ["qwen", "--acp", "--auth-type", "openai"],
        },
        messages=[CHECK_IT],
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert reasons(run) == ["end_turn", "end_turn"]
    run.assert_token_exact()
    assert run.trained() == sum(len(turn.completion_ids) for turn in run.steps())


async def test_any_command_that_speaks_the_protocol(stand: Stand) -> None:
    """It needs no package. The client permits each action once, and prints what the server says."""
    run = await stand.run(
        Acp(),
        script({"content": FIX}, DONE),
        options={"command": TINY},
        messages=[CHECK_IT],
    )
    said = [event["content"]["text"] for event in events(run, "update")]

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert said == [FIX, DONE["content"]]
    assert [event["option"] for event in events(run, "permission")] == ["my-allow_once"]
    assert run.trained() == run.summary.tokens
    run.assert_token_exact()


async def test_a_policy_that_rejects_every_permission(stand: Stand) -> None:
    """The server runs nothing, and the user's next turn still comes."""
    run = await stand.run(
        Acp(),
        script({"content": FIX}, DONE),
        options={"command": TINY, "permissions": "reject"},
        messages=[CHECK_IT],
    )

    assert (run.end, run.diff) == (AgentEnd.FINISHED, b""), run.said
    assert [event["option"] for event in events(run, "permission")] == ["my-reject_once"]
    assert len(run.turns) == 2


async def test_a_cancelled_turn_is_followed_by_the_next(stand: Stand) -> None:
    """A turn that takes too long is cancelled; the session goes on, and its last turn decides."""
    run = await stand.run(
        Acp(),
        script({"content": "WAIT"}, {"content": FIX}, {"content": "WAIT"}),
        options={"command": TINY, "turn_s": 5.0},
        messages=[CHECK_IT, "And again."],
    )

    assert (run.end, run.grade.outcome) == (AgentEnd.LIMIT, Outcome.RESOLVED), run.said
    assert reasons(run) == ["cancelled", "end_turn", "cancelled"]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("STOP max_tokens", AgentEnd.LIMIT),
        ("STOP max_turn_requests", AgentEnd.LIMIT),
        ("STOP refusal", AgentEnd.GAVE_UP),
        ("FAIL maximum context length is 5 tokens", AgentEnd.LIMIT),
        ("FAIL no such tool", AgentEnd.CRASHED),
        ("STOP unheard", AgentEnd.CRASHED),
        ("EXIT", AgentEnd.CRASHED),
    ],
)
async def test_how_a_turn_stops_decides_the_end(stand: Stand, answer: str, end: AgentEnd) -> None:
    """After any stop but a whole turn, the server gets no further turn."""
    run = await stand.run(
        Acp(),
        script({"content": answer}, DONE),
        options={"command": TINY},
        messages=[CHECK_IT],
    )

    assert run.end is end, run.said
    assert len(run.turns) == 1


async def test_a_command_that_is_not_there_never_called_the_model(stand: Stand) -> None:
    """A launch fault has an end of its own, and its output names the program."""
    run = await stand.run(Acp(), script(DONE), options={"command": ["no-such-server"]})

    assert run.end is AgentEnd.NEVER_CALLED_MODEL
    assert "no-such-server" in run.said
