"""Patches from other programs: all forms that SWE-bench and mini-swe-agent write, and clear
refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import AgentRun
from perdure.rollouts.predictions import Prediction, place, read_predictions
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import PatchRef, RunRequest

DIFF = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\r\n"
ENTRY = {"instance_id": "a-1", "model_name_or_path": "m", "model_patch": DIFF}
READ = Prediction("a-1", 0, DIFF.encode(), "m")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", json.dumps([ENTRY])),
        ("lines.jsonl", f"\n{json.dumps(ENTRY)}\n\n"),
        ("preds.json", json.dumps({"a-1": ENTRY})),
        ("short.json", json.dumps({"a-1": {"model_name_or_path": "m", "model_patch": DIFF}})),
        ("one.json", json.dumps(ENTRY)),
        (
            "a-1.traj.json",
            json.dumps(
                {
                    "info": {"submission": DIFF, "config": {"model": {"model_name": "m"}}},
                    "messages": [],
                }
            ),
        ),
    ],
)
def test_each_form_gives_the_same_prediction(tmp_path: Path, name: str, text: str) -> None:
    """Patches are read byte for byte, with the name of the model."""
    (tmp_path / name).write_text(text)

    assert read_predictions(tmp_path / name) == [READ]


def test_a_folder_of_trajectories_is_read(tmp_path: Path) -> None:
    """There is one trajectory per instance, and one without a submission has an empty patch."""
    for name, info in {"a-1": {"submission": DIFF}, "b-2": {"exit_status": "Timeout"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.traj.json").write_text(json.dumps({"info": info}))

    found = read_predictions(tmp_path)

    assert [(p.instance_id, p.patch) for p in found] == [("a-1", DIFF.encode()), ("b-2", b"")]


def test_a_folder_with_a_list_is_read_by_it(tmp_path: Path) -> None:
    """mini-swe-agent writes both a list and trajectories, and each patch counts once."""
    (tmp_path / "a-1.traj.json").write_text(json.dumps({"info": {"submission": DIFF}}))
    (tmp_path / "preds.json").write_text(json.dumps({"a-1": ENTRY}))

    assert read_predictions(tmp_path) == [READ]


def test_several_patches_of_an_instance_are_its_samples(tmp_path: Path) -> None:
    """Samples are numbered in the order of the file."""
    other = {**ENTRY, "model_patch": None}
    (tmp_path / "p.jsonl").write_text(f"{json.dumps(ENTRY)}\n{json.dumps(other)}\n")

    found = read_predictions(tmp_path / "p.jsonl")

    assert [(p.sample_index, p.patch) for p in found] == [(0, DIFF.encode()), (1, b"")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_patch": ""}\n', r"line 1: 'model_patch' is not a prediction"),
        ('{"instance_id": "a", "model_patch": 3}\n', r"line 1: `model_patch` must be text or null"),
        ('{"instance_id": ""}\n', r"line 1 lacks `instance_id`: it names the instance"),
        ("{\n", r"line 1 is not valid JSON"),
        ("3\n", r"line 1 is not a prediction: give objects with `instance_id`"),
        ("\n", r"p.jsonl has no predictions"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The message has the line, the field and the fix."""
    (tmp_path / "p.jsonl").write_text(text)

    with pytest.raises(ConfigurationError, match=message):
        read_predictions(tmp_path / "p.jsonl")


@pytest.mark.parametrize("there", [True, False])
def test_what_has_no_predictions_is_refused(tmp_path: Path, there: bool) -> None:
    """This covers an empty folder, and a path that does not exist."""
    path = tmp_path if there else tmp_path / "absent.json"

    with pytest.raises(
        ConfigurationError, match="neither preds.json" if there else "no predictions"
    ):
        read_predictions(path)


RUN = RunRequest(
    run_id="r", instances=("toy/a-1",), rollout={"agent": "predictions", "start_at": "grade"}
)


async def placed(store: LocalStore, patch: bytes) -> None:
    await place(store, RUN, {"a-1": "toy/a-1"}, [Prediction("a-1", 0, patch, "gpt-x")])


async def test_a_prediction_is_placed_as_a_captured_patch(tmp_path: Path) -> None:
    """The grading finds the same bytes and a finished agent, and placing a prediction twice changes
    nothing."""
    store = LocalStore(tmp_path)
    for _ in range(2):
        await placed(store, DIFF.encode())

    folder = store_keys.attempt(RUN.rollout_request("toy/a-1"), 1)
    patch = await stage_checkpoints.read(store, f"{folder}/patch.json", PatchRef)
    agent = await stage_checkpoints.read(store, f"{folder}/agent.json", AgentRun)
    assert patch is not None
    assert (await store.get(patch.key)).data == DIFF.encode()
    assert (patch.files, patch.empty, agent and agent.broke) == (1, False, "")
    assert agent is not None
    assert agent.model == "gpt-x"  # several models of one file keep their names


async def test_a_run_keeps_its_patch(tmp_path: Path) -> None:
    """Other patches under the same run id are refused, because they would be graded as the old
    ones."""
    store = LocalStore(tmp_path)
    await placed(store, DIFF.encode())

    with pytest.raises(ConfigurationError, match=r"run r has another patch for a-1 #0"):
        await placed(store, b"")


def test_the_name_of_given_patches_runs_no_agent() -> None:
    """The message of `perdure run --agent predictions` says which command to use."""
    fields: dict[str, Any] = {**RUN.model_dump(), "rollout": {"agent": "predictions"}}

    with pytest.raises(ValueError, match="perdure grade SOURCE --predictions"):
        RunRequest(**fields).rollout_request("toy/a-1")
