"""`perdure show --turns`: a trajectory as text and as JSON, from real turns files and journals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.cli.main import invoke
from perdure.episodes import turns_parquet
from perdure.errors import NotFound
from perdure.reports import readable_trajectory, stored_rollout
from perdure.sandboxes.base import identity_of
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import Purpose, Turn

ATTEMPT = "runs/r/rollouts/click-1/0/attempts/1"
Show = Callable[..., str]


def turn(index: int, prompt: tuple[int, ...], completion: tuple[int, ...], **fields: Any) -> Turn:
    known = {"prompt_ids": prompt, "completion_ids": completion, "engine": "vllm-0"}
    logprobs = (-0.5,) * len(completion)
    return Turn.model_validate({"index": index, **known, "logprobs": logprobs, **fields})


def said(content: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TASK = "Fix the bug.\n" + "Take care. " * 60
CALL = {"id": "c1", "function": {"name": "Bash", "arguments": '{"command": "ls"}'}}
TURNS = [
    turn(
        0,
        (1, 2, 3),
        (4, 5),
        bridge_miss="first",
        new_messages=json.dumps([said(TASK)]),
        answer=json.dumps(said("", "assistant", reasoning_content="Look first", tool_calls=[CALL])),
    ),
    turn(1, (50,), (51,), chain="agent-7", parent_chain="main", bridge_miss="first"),
    turn(2, (90,), (91, 92, 93), purpose=Purpose.SIDE, bridge_miss="first"),
    turn(
        3,
        (1, 2, 3, 4, 5, 6),
        (7,),
        parent=0,
        bridged=True,
        new_messages=json.dumps([said("bug.py \x1b[31mred", "tool")]),
        answer=json.dumps(said("Done.", "assistant")),
    ),
    turn(4, (70, 71), (72,), bridge_miss="restart"),
]


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Show:
    """The command's stdout for a stored trajectory."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("PERDURE_STORE", raising=False)

    def run(*options: str, data: bytes = turns_parquet.encode(TURNS)) -> str:
        file = tmp_path / "home" / "store" / ATTEMPT / "turns.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        code = invoke(["show", "click-1", "--turns", *options])
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def test_the_head_counts_what_is_trained_and_what_is_not(shown: Show) -> None:
    """The head counts turns, chains, segments, and untrained tokens by reason."""
    head = shown().splitlines()[:3]

    assert head == [
        "r/click-1/0",
        "attempt 1: 5 turns in 2 chains, 0 compactions",
        "8 tokens sampled, 5 trained in 3 segments; not trained: 3 side",
    ]


def test_each_turn_shows_its_tokens_its_rendering_and_its_training(shown: Show) -> None:
    """Each turn shows its token counts, how its prompt was made, and whether it is trained or why not."""
    text = shown()

    assert "  3  prompt 6 (+1) → 1 · logprob -0.50 · stop · vllm-0 · 0.00 s · bridged" in text
    assert "side · rendered: first  not trained: side" in text


def test_messages_are_cut_to_the_width_and_counted(shown: Show) -> None:
    """Each text is one line, no wider than the terminal; if it is cut, its length follows."""
    lines = shown().splitlines()

    (task,) = [line for line in lines if line.lstrip().startswith("user")]
    assert task.endswith(f"… {len(TASK)} characters")
    assert max(map(len, (line for line in lines if line.startswith("     ")))) <= 100


def test_full_prints_every_text_whole(shown: Show) -> None:
    """--full cuts no text."""
    text = shown("--full")

    assert text.count("Take care.") == 60
    assert "characters" not in text


def test_output_of_a_tool_cannot_control_the_terminal(shown: Show) -> None:
    """Escape sequences in recorded text are shown as replacement characters; no colour in a pipe."""
    text = shown()

    assert "\x1b" not in text
    assert "bug.py \N{REPLACEMENT CHARACTER}[31mred" in text


def test_answers_show_reasoning_and_calls(shown: Show) -> None:
    """Reasoning, text and tool calls have lines of their own."""
    text = shown()

    assert "thinks   Look first" in text
    assert 'calls    Bash {"command": "ls"}' in text
    assert "says     Done." in text


def test_sub_agents_are_shown_under_the_chain_that_started_them(shown: Show) -> None:
    """A sub-agent's chain is indented under the chain that started it."""
    lines = shown().splitlines()

    assert "━━ main" in lines
    assert "  ━━ sub-agent agent-7, started by main after turn 0" in lines


def test_stray_calls_have_a_heading_of_their_own(shown: Show) -> None:
    """A call that the agent did not make is not shown as a sub-agent's."""
    stray = turn(5, (8,), (81,), chain="stray", purpose=Purpose.STRAY)
    text = shown(data=turns_parquet.encode([*TURNS, stray]))

    assert "━━ stray calls" in text.splitlines()
    assert "not trained: stray" in text


def test_a_new_segment_says_why(shown: Show) -> None:
    """Where a new segment begins, the reason that the gateway recorded is shown."""
    assert "┌ segment 2 final (new: restart): prompt 2, response 1, trained 1" in shown()


def test_json_holds_everything_but_the_ids(shown: Show) -> None:
    """The JSON has full texts, counts, segments, and why a turn is not trained."""
    document = json.loads(shown("--json"))
    by_index = {one["index"]: one for one in document["turns"]}

    assert by_index[0]["new_messages"][0]["content"] == TASK
    assert (by_index[2]["untrained"], by_index[2]["segment"]) == ("side", None)
    assert (by_index[3]["new_prompt_tokens"], by_index[3]["logprob_mean"]) == (1, -0.5)
    assert document["counts"]["untrained_tokens"] == {"side": 3}
    assert [one["kind"] for one in document["segments"]] == ["subagent", "wipe", "final"]


def test_an_unreadable_file_is_named(shown: Show) -> None:
    """An unreadable turns file is one line with its key."""
    assert f"{ATTEMPT}/turns.parquet is unreadable" in shown(data=b"PAR1 torn")


async def test_a_running_rollout_is_read_from_the_journal(tmp_path: Path) -> None:
    """Answered turns can be read before their session is closed."""
    name = stored_rollout.RolloutName("r", "click-1", 0)
    session = identity_of(name.run_id, name.workflow_id, "agent", 1)
    async with (
        ScriptedEngine() as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        key = await gateway.open(session)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
            body = {"model": "policy", "messages": [said("Hello?")]}
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
        found = await readable_trajectory.read(
            gateway.store, stored_rollout.StoredRollout(name, None), attempt=None
        )

    assert (found.source, len(found.turns)) == ("journal", 1)
    assert "Hello?" in found.turns[0].new_messages


async def test_a_rollout_without_a_turn_says_so(tmp_path: Path) -> None:
    """Without turns the command says so."""
    async with LocalGateway(tmp_path) as gateway:
        with pytest.raises(NotFound, match="has no turns in attempt 1"):
            await readable_trajectory.read(
                gateway.store,
                stored_rollout.StoredRollout(stored_rollout.RolloutName("r", "click-1", 0), None),
                attempt=None,
            )
