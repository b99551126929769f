"""Data for SFT and preference trainers: prompts and answers, and which tokens are trained."""

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from perdure.cli.main import invoke
from perdure.episodes import turns_parquet
from perdure.episodes.demonstrations.rejection_sampling import Selection
from perdure.episodes.episode import EpisodeParts
from perdure.episodes.hub_dataset import write_folder
from perdure.episodes.run_export import ExportReport, Format, Rules, export_run
from perdure.episodes.trajectory_segments import cut
from perdure.errors import Boundary, ConfigurationError
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Failure,
    Grade,
    Outcome,
    Purpose,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
)
from tests.stored_episodes import store_episode

LOST = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="gone")
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it."}


def call(name: str) -> dict[str, Any]:
    """An assistant's message with one call."""
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    calls = [{"id": name, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": name}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turn(
    index: int,
    prompt: tuple[int, ...],
    completion: tuple[int, ...],
    new: list[dict[str, Any]],
    answer: dict[str, Any],
    **fields: Any,
) -> Turn:
    return Turn(
        index=index,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=(-0.5,) * len(completion),
        new_messages=json.dumps(new),
        answer=json.dumps(answer),
        **fields,
    )


def two_turns(ending: int, prefix: str = "a") -> tuple[Turn, ...]:
    """A call, its result, and an answer that depends on `ending`."""
    return (
        turn(0, (1, 2), (10, 11), [SYSTEM, USER], call(f"{prefix}1")),
        turn(
            1,
            (1, 2, 10, 11, 3),
            (ending,),
            [result(f"{prefix}1", "x.py")],
            said(f"Done {ending}."),
            parent=0,
        ),
    )


class Run:
    """A run in a store, and its exports."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder / "store")
        self.out = folder / "out"

    async def add(
        self,
        reward: float | None,
        turns: tuple[Turn, ...],
        sample_index: int = 0,
        instance: str = "click-1",
        **graded: Any,
    ) -> None:
        """`graded`: more fields of the grade."""
        request = RolloutRequest(
            run_id="r", instance=f"tests/{instance}", sample_index=sample_index
        )
        key = f"runs/r/rollouts/{instance}/{sample_index}/attempts/1/turns.parquet"
        await self.store.put(key, turns_parquet.encode(turns))
        outcome = Outcome.RESOLVED if reward == 1.0 else Outcome.UNRESOLVED
        parts = EpisodeParts(
            request=request,
            status=RolloutStatus.FAILED if reward is None else RolloutStatus.GRADED,
            failure=LOST if reward is None else None,
            grade=None
            if reward is None
            else Grade(outcome=outcome, rewards=Rewards(binary=reward), **graded),
            turns=turns,
            turns_key=key,
            started_at=0.0,
            finished_at=1.0,
        )
        segments = cut(parts.turns)
        await store_episode(self.store, parts, segments)

    async def export(self, format: Format, **selection: Any) -> tuple[list[Any], ExportReport]:
        rules = Rules(selection=Selection(**selection))
        report = await export_run(self.store, "r", format, self.out / f"{format}.jsonl", rules)
        lines = report.path.read_bytes().splitlines() if report.written else []
        return [json.loads(line) for line in lines], report


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# --- sft -------------------------------------------------------------------------------------


async def test_sft_has_the_recorded_conversation(run: Run) -> None:
    """The prompts and answers of any agent, with the reward."""
    await run.add(1.0, two_turns(20))
    lines, _ = await run.export("sft")

    assert lines == [
        {
            "instance_id": "click-1",
            "sample_index": 0,
            "reward": 1.0,
            "outcome": "resolved",
            "verification": "",
            "signals": "",
            "withheld": "",
            "named_rewards": "",
            "chain": "main",
            "messages": [SYSTEM, USER, call("a1"), result("a1", "x.py"), said("Done 20.")],
            "tools": [],
        }
    ]


async def test_sft_has_the_schemas_of_the_tools(run: Run) -> None:
    """A chat template needs the schemas: those of the last turn that changed them."""
    offered = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    first, second = two_turns(20)
    await run.add(1.0, (first.model_copy(update={"tools": json.dumps([offered])}), second))
    (line,), _ = await run.export("sft")

    assert line["tools"] == [offered]


# --- atif ------------------------------------------------------------------------------------


async def test_atif_has_each_step_once_with_what_it_saw(run: Run) -> None:
    """Harbor accepts it: a tool's result is an observation of the step that called it, tokens are
    exact, and a sub-agent's chain is its own trajectory inside."""
    first, second = two_turns(20)
    inside = turn(2, (9,), (30,), [USER], said("Found."), chain="agent-7", parent_chain="main")
    title = turn(3, (8,), (31,), [USER], said("A title"), purpose=Purpose.SIDE)
    stray = turn(4, (7,), (33,), [USER], said("A test"), chain="stray", purpose=Purpose.STRAY)
    await run.add(1.0, (first, second, inside, title, stray))
    (line,), _ = await run.export("atif")

    assert [(one["source"], one["message"]) for one in line["steps"]] == [
        ("system", "Be brief."),
        ("user", "Fix it."),
        ("agent", ""),
        ("agent", "Done 20."),
    ]
    assert line["steps"][2]["tool_calls"] == [
        {"tool_call_id": "a1", "function_name": "bash", "arguments": {"command": "ls"}}
    ]
    assert line["steps"][2]["observation"] == {
        "results": [{"source_call_id": "a1", "content": "x.py"}]
    }
    assert line["steps"][3]["metrics"]["completion_token_ids"] == [20]
    assert (line["schema_version"], line["extra"]["reward"]) == ("ATIF-v1.7", 1.0)
    (within,) = line["subagent_trajectories"]
    assert [one["message"] for one in within["steps"]] == ["Fix it.", "Found."]
    _accepted_by_harbor(line)


# --- hub ---------------------------------------------------------------------------------------


async def test_a_run_is_a_dataset_folder(run: Run, tmp_path: Path) -> None:
    """The library opens both tables by the card; tools of any shape are text."""
    import datasets

    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"x": [1, "a"]}}}]
    first, second = two_turns(20)
    await run.add(1.0, (first.model_copy(update={"tools": json.dumps(tools)}), second))
    await run.add(None, two_turns(30), sample_index=1)
    folder = tmp_path / "folder"
    await write_folder(run.store, "r", folder)

    def opened(name: str) -> Any:
        return datasets.load_dataset(str(folder), name, split="train", cache_dir=str(tmp_path))

    rollouts, sft = await asyncio.to_thread(lambda: (opened("rollouts"), opened("sft")))
    assert rollouts["reward"][:] == [1.0, None]
    assert rollouts["failure"][1] == "sandbox: gone"
    assert json.loads(sft["tools"][0]) == tools
    assert sft["messages"][0][-1]["content"] == "Done 20."
    assert "2 rollouts of mini_swe_agent" in (folder / "README.md").read_text()


def _accepted_by_harbor(line: dict[str, Any]) -> None:
    """Validate with Harbor's own models, if installed: Harbor needs a later Python."""
    if importlib.util.find_spec("harbor") is not None:
        models = importlib.import_module("harbor.models.trajectories")
        models.Trajectory.model_validate(line)


async def test_sft_trains_each_answer_once(run: Run) -> None:
    """A branch, a sub-agent and a compaction each start a new line. Answers that another line
    trains, or that the policy did not give, have weight 0. Side requests have no line."""
    branch = turn(2, (1, 2, 10, 11, 4), (30,), [result("a1", "y.py")], said("B."), parent=0)
    foreign = turn(3, (7,), (31,), [USER, said("Not ours."), USER], said("C."), chain="sub")
    side = turn(4, (8,), (32,), [USER], said("A title"), purpose=Purpose.SIDE)
    await run.add(1.0, (*two_turns(20), branch, foreign, side))
    lines, _ = await run.export("sft")
    weights = [
        [m.get("weight", 1) for m in line["messages"] if m["role"] == "assistant"] for line in lines
    ]

    assert weights == [[1, 1], [0, 1], [0, 1]]
    assert [line["chain"] for line in lines] == ["main", "main", "sub"]


async def test_sft_leaves_unused_answers_out(run: Run) -> None:
    """An answer that the agent did not use is not a demonstration."""
    dropped = turn(2, (1, 2), (33,), [SYSTEM, USER], said("Dropped."), unused=True)
    await run.add(1.0, (*two_turns(20), dropped))
    messages, _ = await run.export("sft")
    rows, _ = await run.export("sft-tokens")

    assert (len(messages), len(rows)) == (1, 1)


async def test_an_empty_answer_is_empty(run: Run) -> None:
    """The placeholder that an agent gets for an empty answer is not the model's answer."""
    answer = said("(no visible output)") | {"placeholder": True, "parent_echo_changes": ["x"]}
    await run.add(1.0, (turn(0, (1,), (2,), [USER], answer),))
    (line,), _ = await run.export("sft")

    assert line["messages"][-1] == said("")


async def test_sft_tokens_are_as_recorded(run: Run) -> None:
    """One row per segment: the recorded ids, and labels on sampled tokens only."""
    await run.add(1.0, two_turns(20))
    (row,), _ = await run.export("sft-tokens")

    assert row["input_ids"] == [1, 2, 10, 11, 3, 20]
    assert row["labels"] == [-100, -100, 10, 11, -100, 20]
    assert row["assistant_masks"] == [0, 0, 1, 1, 0, 1]
    assert (row["reward"], row["segment_kind"], row["num_segments"]) == (1.0, "final", 1)


async def test_sft_tokens_as_parquet(run: Run, tmp_path: Path) -> None:
    """The same rows as arrays."""
    await run.add(1.0, two_turns(20))
    report = await export_run(run.store, "r", "sft-tokens", tmp_path / "sft.parquet")
    (row,) = pq.read_table(report.path).to_pylist()

    assert (row["input_ids"][-1], row["labels"][0], row["assistant_masks"][-1]) == (20, -100, 1)


async def test_a_hosted_demonstration_has_messages_only(run: Run) -> None:
    """Without token ids, `sft` has the text and `sft-tokens` reports that it has none."""
    hosted = turn(0, (), (), [USER], said("Done."), trainable=False)
    await run.add(1.0, (hosted,))
    lines, _ = await run.export("sft")
    rows, report = await run.export("sft-tokens")

    assert [m["content"] for m in lines[0]["messages"]] == ["Fix it.", "Done."]
    assert (rows, report.omitted[0].reason) == ([], "nothing to train on: no turn with token ids")


# --- rejection sampling ----------------------------------------------------------------------


@pytest.mark.parametrize("format", ["sft", "sft-tokens"])
async def test_best_of_n(format: Format, run: Run) -> None:
    """The best of each instance, the shorter among equals; none below the minimum reward."""
    longer = (
        *two_turns(21),
        turn(2, (1, 2, 10, 11, 3, 21, 5), (6, 7), [USER], said("!"), parent=1),
    )
    await run.add(0.5, two_turns(20), 0)
    await run.add(1.0, longer, 1)
    await run.add(1.0, two_turns(22), 2)
    await run.add(0.5, two_turns(23), 0, instance="flask-2")
    lines, report = await run.export(format, best=1, min_reward=1.0)

    assert [(line["instance_id"], line["sample_index"]) for line in lines] == [("click-1", 2)]
    assert [(one.sample_index, one.reason) for one in report.omitted] == [
        (0, "its reward is 0.5, below 1"),
        (1, "not in the best 1 of its instance"),
        (0, "its reward is 0.5, below 1"),
    ]


async def test_a_selection_is_for_sft(run: Run) -> None:
    """A group for a baseline must not lose its failures."""
    await run.add(1.0, two_turns(20))

    with pytest.raises(ConfigurationError, match="work with sft and sft-tokens, not with slime"):
        await run.export("slime", best=1)


# --- preferences -----------------------------------------------------------------------------


async def test_the_fixed_is_preferred_to_the_failed(run: Run) -> None:
    """Two rollouts share their turns up to the first with different answers."""
    await run.add(0.0, two_turns(20, "a"), 0)
    await run.add(1.0, two_turns(21, "b"), 1, named_rewards={"tidy": 0.5})
    (row,), _ = await run.export("preferences")

    assert row["prompt"] == [SYSTEM, USER, call("b1"), result("b1", "x.py")]
    assert (row["chosen"], row["rejected"]) == ([said("Done 21.")], [said("Done 20.")])
    assert row["prompt_ids"] == [1, 2, 10, 11, 3]
    assert (row["chosen_ids"], row["chosen_mask"]) == ([21], [1])
    assert (row["rejected_ids"], row["rejected_mask"]) == ([20], [1])
    assert (row["chosen_sample"], row["rejected_sample"]) == (1, 0)
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.0)
    assert (row["chosen_named_rewards"], row["rejected_named_rewards"]) == ('{"tidy": 0.5}', "")


async def test_what_the_environment_said_is_masked(run: Run) -> None:
    """From the first different turn on, only sampled tokens count."""
    other = (turn(0, (1, 2), (12,), [SYSTEM, USER], said("I give up.")),)
    await run.add(1.0, two_turns(20), 0)
    await run.add(0.0, other, 1)
    (row,), _ = await run.export("preferences")

    assert row["prompt_ids"] == [1, 2]
    assert (row["chosen_ids"], row["chosen_mask"]) == ([10, 11, 3, 20], [1, 1, 0, 1])
    assert row["rejected_ids"] == [12]


async def test_pairs_use_each_rollout_once(run: Run) -> None:
    """The best with the worst, the second best with the second worst; equal rewards make no pair."""
    for sample, reward in enumerate((0.0, 1.0, 0.5, 0.25, None)):
        await run.add(reward, two_turns(20 + sample), sample)
    await run.add(1.0, two_turns(20), 0, instance="flask-2")
    await run.add(1.0, two_turns(21), 1, instance="flask-2")
    rows, report = await run.export("preferences")

    assert [(row["chosen_sample"], row["rejected_sample"]) for row in rows] == [(1, 0), (2, 3)]
    assert [(one.instance_id, one.reason) for one in report.omitted] == [
        ("flask-2", "no two of its 2 graded rollouts differ in reward")
    ]


async def test_rollouts_with_different_prompts_are_no_pair(run: Run) -> None:
    """A preference compares two answers to one prompt."""
    await run.add(1.0, two_turns(20), 0)
    await run.add(0.0, (turn(0, (9,), (12,), [USER], said("No.")),), 1)
    rows, report = await run.export("preferences")

    assert rows == []
    assert report.omitted[0].reason == "its first prompt is not the same as in sample 0"


def test_the_command_takes_the_best(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`perdure export RUN -f sft-tokens --best 1` lists the omitted rollouts."""
    asyncio.run(run.add(1.0, two_turns(20), 0))
    asyncio.run(run.add(0.0, two_turns(21), 1))
    monkeypatch.setenv("PERDURE_STORE", str(run.store.root))
    monkeypatch.chdir(tmp_path)
    status = invoke(["export", "r", "-f", "sft-tokens", "--best", "1"])
    printed = capsys.readouterr()

    assert (status, printed.out) == (0, "1 written to r.sft-tokens.jsonl\n")
    assert "left out  click-1 #1: not in the best 1 of its instance" in printed.err
