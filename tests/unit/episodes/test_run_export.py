"""Exports of a run are complete and unchanged; omitted rollouts are listed."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from perdure.agents.locked_version import locked_version
from perdure.episodes.episode import AttemptSummary, EpisodeParts
from perdure.episodes.hub_dataset import write_folder
from perdure.episodes.run_export import Format, Rules, export_run
from perdure.episodes.trajectory_segments import cut
from perdure.errors import Boundary, ConfigurationError, NotFound, StoreUnavailable
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Failure,
    Grade,
    Outcome,
    PatchRef,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
)
from tests.stored_episodes import store_episode

TURNS = (
    Turn(
        index=0,
        prompt_ids=(1,),
        completion_ids=(2, 3),
        logprobs=(-0.5, -0.25),
        asked_model="policy",
        model="policy-7b",
    ),
)
CRLF = b"diff --git a/x b/x\n@@ -1 +1 @@\n-a\r\n+\xc3\xa9\r\n"
LATIN = b"diff --git a/x b/x\n@@ -1 +1 @@\n-a\n+\xe9\n"


class Run:
    """A run in a store, rollout by rollout."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store

    async def add(
        self, instance: str, sample_index: int = 0, patch: bytes | None = b"", **fields: Any
    ) -> None:
        """Add a graded rollout with this patch, or a failed one if the patch is None."""
        request = RolloutRequest(
            run_id="r", instance=f"tests/{instance}", sample_index=sample_index, model="as-asked"
        )
        folder = f"runs/r/rollouts/{instance}/{sample_index}/attempts/1"
        graded = patch is not None
        parts = EpisodeParts(
            request=request,
            status=RolloutStatus.GRADED if graded else RolloutStatus.FAILED,
            failure=None
            if graded
            else Failure(boundary=Boundary.AGENT, type="AgentError", message="crashed"),
            grade=Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0)) if graded else None,
            patch=PatchRef(key=f"{folder}/patch.diff", sha256="", size=len(patch), empty=not patch)
            if patch is not None
            else None,
            attempts=(AttemptSummary(attempt=1),),
            started_at=0.0,
            finished_at=1.0,
            turns=fields.get("turns", TURNS),
        )
        if patch:
            await self.store.put(f"{folder}/patch.diff", patch)
        segments = cut(parts.turns)
        await store_episode(self.store, parts, segments)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(LocalStore(tmp_path / "store"))


async def test_preds_have_the_form_of_the_harness(run: Run, tmp_path: Path) -> None:
    """One entry per instance with the three known fields; the patch keeps CRLF."""
    await run.add("click-1", patch=CRLF)
    report = await export_run(run.store, "r", "preds", tmp_path / "preds.json")

    assert json.loads(report.path.read_bytes()) == {
        "click-1": {
            "model_name_or_path": "mini_swe_agent-policy-7b",
            "instance_id": "click-1",
            "model_patch": CRLF.decode(),
        }
    }
    assert (report.written, report.omitted) == (1, ())


async def test_preds_take_the_first_graded_sample(run: Run, tmp_path: Path) -> None:
    """A failed sample does not represent an instance that has a graded one."""
    await run.add("click-1", 0, patch=None)
    await run.add("click-1", 1, patch=b"first\n")
    await run.add("click-1", 2, patch=b"second\n")
    report = await export_run(run.store, "r", "preds", tmp_path / "preds.json")

    assert json.loads(report.path.read_bytes())["click-1"]["model_patch"] == "first\n"


async def test_preds_name_what_they_leave_out(run: Run, tmp_path: Path) -> None:
    """Failed instances and patches that are not text are listed, not written as empty patches."""
    await run.add("attrs-1", patch=None)
    await run.add("click-1", patch=LATIN)
    report = await export_run(run.store, "r", "preds", tmp_path / "preds.json")

    assert not report.path.exists()
    assert [(left.instance_id, left.reason.split(";")[0]) for left in report.omitted] == [
        ("attrs-1", "no graded sample (failed)"),
        ("click-1", f"its patch is not UTF-8 at byte {LATIN.index(0xE9)}"),
    ]


async def test_empty_patch_is_a_prediction(run: Run, tmp_path: Path) -> None:
    """An agent that changed nothing predicted an empty patch."""
    await run.add("click-1", patch=b"")
    report = await export_run(run.store, "r", "preds", tmp_path / "preds.json")

    assert json.loads(report.path.read_bytes())["click-1"]["model_patch"] == ""


async def test_preds_all_has_every_graded_sample(run: Run, tmp_path: Path) -> None:
    """One line per graded sample; the others are listed."""
    await run.add("click-1", 0, patch=b"zero\n")
    await run.add("click-1", 1, patch=None)
    await run.add("click-1", 2, patch=b"two\n")
    report = await export_run(run.store, "r", "preds-all", tmp_path / "preds.jsonl")
    lines = [json.loads(line) for line in report.path.read_bytes().splitlines()]

    assert [line["model_patch"] for line in lines] == ["zero\n", "two\n"]
    assert [left.sample_index for left in report.omitted] == [1]


async def test_episodes_are_one_table(run: Run, tmp_path: Path) -> None:
    """One parquet file has the rows of every rollout, failed ones with reward null."""
    await run.add("click-1", 0, patch=b"x\n")
    await run.add("click-1", 1, patch=None, turns=())
    report = await export_run(run.store, "r", "episodes", tmp_path / "deep" / "run.parquet")
    found = pq.read_table(report.path).to_pylist()

    assert [(row["sample_index"], row["reward"], row["response_ids"]) for row in found] == [
        (0, 1.0, [2, 3]),
        (1, None, []),
    ]


async def test_jsonl_has_one_line_a_rollout(run: Run, tmp_path: Path) -> None:
    """One line per readable episode, failed ones included."""
    await run.add("click-1", 0)
    await run.add("click-1", 1, patch=None)
    report = await export_run(run.store, "r", "jsonl", tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in report.path.read_bytes().splitlines()]

    assert [(line["status"], line["reward"]) for line in lines] == [
        ("graded", 1.0),
        ("failed", None),
    ]


async def test_failed_export_leaves_the_old_file(run: Run, tmp_path: Path) -> None:
    """The file gets its name once it is complete; no other file is left."""
    out = tmp_path / "out" / "run.parquet"
    out.parent.mkdir()
    out.write_bytes(b"old")
    await run.add("click-1")
    tokens = run.store.root / "runs/r/rollouts/click-1/0/episode.parquet"
    tokens.unlink()
    tokens.symlink_to(tokens)  # unreadable, as on a broken disk

    with pytest.raises(StoreUnavailable):
        await export_run(run.store, "r", "episodes", out)
    assert [path.read_bytes() for path in out.parent.iterdir()] == [b"old"]


async def test_absent_run_is_not_an_empty_file(run: Run, tmp_path: Path) -> None:
    """The error for a misspelled run names it."""
    with pytest.raises(NotFound, match="'nope'"):
        await export_run(run.store, "nope", "preds", tmp_path / "preds.json")


async def test_unknown_format_lists_the_known(run: Run, tmp_path: Path) -> None:
    """The error for a misspelled format lists the known ones."""
    unknown: Format = "pred"  # type: ignore[assignment]  # as a person might type it

    with pytest.raises(
        ConfigurationError, match="preds, preds-all, episodes, jsonl, atif, sft, preferences"
    ):
        await export_run(run.store, "r", unknown, tmp_path / "preds.json")


GARBLED = {
    "torn": (b'{"run_id": "r", "inst', "Invalid JSON"),
    "another form": (b'{"run_id": "r"}', "`group_id`: Field required"),
    "no text": (b"\xff\xfe\x00", "Invalid JSON"),
}


@pytest.mark.parametrize("data", GARBLED)
async def test_an_unreadable_episode_is_named_and_the_rest_is_written(
    data: str, run: Run, tmp_path: Path
) -> None:
    """A damaged episode.json costs one line, not the whole export."""
    await run.add("click-1", patch=CRLF)
    await run.add("flask-2", patch=CRLF)
    key = "runs/r/rollouts/flask-2/0/episode.json"
    await run.store.put(key, GARBLED[data][0])

    report = await export_run(run.store, "r", "preds", tmp_path / "preds.json")

    (omitted,) = report.omitted
    assert (report.written, omitted.instance_id, omitted.damaged) == (1, "flask-2", True)
    assert omitted.reason.startswith(f"{key} is unreadable: {GARBLED[data][1]}")
    assert "\n" not in omitted.reason


@pytest.mark.parametrize("data", [None, b"PAR1 torn"], ids=["gone", "torn"])
async def test_damaged_tokens_are_named_and_the_rest_is_written(
    data: bytes | None, run: Run, tmp_path: Path
) -> None:
    """Missing or damaged token arrays are reported; other rollouts are exported."""
    await run.add("click-1")
    await run.add("flask-2")
    key = "runs/r/rollouts/flask-2/0/episode.parquet"
    await (run.store.put(key, data) if data else run.store.delete(key))

    report = await export_run(run.store, "r", "episodes", tmp_path / "run.parquet")

    assert [(o.instance_id, o.damaged) for o in report.omitted] == [("flask-2", True)]
    assert pq.read_table(report.path)["instance_id"].to_pylist() == ["click-1"]


async def test_a_failed_rollout_is_no_damage(run: Run, tmp_path: Path) -> None:
    """Omitted failed rollouts are listed and do not make the export fail."""
    await run.add("click-1", patch=None)
    report = await export_run(run.store, "r", "preds", tmp_path / "preds.json")

    assert [one.damaged for one in report.omitted] == [False]


async def test_samples_of_all_predictions_can_be_told_apart(run: Run, tmp_path: Path) -> None:
    """By their index: instance and model are equal."""
    for sample in range(2):
        await run.add("click-1", sample, patch=CRLF)
    report = await export_run(run.store, "r", "preds-all", tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in report.path.read_text().splitlines()]

    assert [one["sample_index"] for one in lines] == [0, 1]


async def test_slimes_file_leaves_out_rollouts_of_a_hosted_api(run: Run, tmp_path: Path) -> None:
    """They have no token ids, and a file of placeholders would look like data."""
    hosted = Turn(index=0, trainable=False, model="gpt-x")
    await run.add("click-1", patch=CRLF, turns=(hosted,))
    report = await export_run(run.store, "r", "slime", tmp_path / "slime.jsonl")

    assert report.written == 0
    assert "no turn with token ids" in report.omitted[0].reason


async def test_a_reward_share_goes_with_segments(run: Run, tmp_path: Path) -> None:
    """Predictions have no reward to share, so the option is refused."""
    await run.add("click-1", patch=CRLF)

    with pytest.raises(
        ConfigurationError, match=r"--reward-share works with .*slime.*not with preds"
    ):
        await export_run(
            run.store, "r", "preds", tmp_path / "preds.json", Rules(reward_share="split")
        )


async def test_a_data_set_opens_without_the_name_of_a_config(run: Run, tmp_path: Path) -> None:
    """`load_dataset(FOLDER)` opens the rollouts, the card's default config."""
    await run.add("click-1", patch=CRLF)
    await write_folder(run.store, "r", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()

    assert card.count("default: true") == 1
    rollouts = card.index("config_name: rollouts")
    assert rollouts < card.index("default: true") < card.index("tags:")


async def test_a_data_set_without_a_conversation_has_no_earlier_one(
    run: Run, tmp_path: Path
) -> None:
    """The folder is one export and keeps no table of an earlier one."""
    await run.add("click-1", patch=None)
    stale = tmp_path / "out/data/sft.jsonl"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    await write_folder(run.store, "r", tmp_path / "out")

    assert [one.name for one in stale.parent.iterdir()] == ["rollouts.jsonl"]


@pytest.mark.parametrize("agent", ["mini_swe_agent", "openhands", "claude_code", "codex"])
def test_an_agents_version_is_that_of_its_lock(agent: str) -> None:
    """Exported trajectories have the agent's own version without its platform; `oracle` has none."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", locked_version(agent))
    assert locked_version("oracle") == ""
