"""Patches from other programs: all forms that SWE-bench and mini-swe-agent write, and clear
refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.rollouts.activity_messages import PageRequest, RolloutAgain
from perdure.rollouts.predictions import Prediction, are_uneven, place, read_predictions
from perdure.rollouts.retry_selection import planned_rollouts, select
from perdure.rollouts.run_pages import load_page
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import PlayAgain, RunRequest

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


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_only_a_newline_ends_an_entry(tmp_path: Path, separator: str) -> None:
    """JSON allows other line separators inside a string, and every writer but Python's default
    leaves them as they are."""
    patch = DIFF + f"+{separator}\n"
    line = json.dumps({**ENTRY, "model_patch": patch}, ensure_ascii=False)
    (tmp_path / "p.jsonl").write_bytes(f"{line}\r\n{line}\n".encode())

    found = read_predictions(tmp_path / "p.jsonl")

    assert [one.patch for one in found] == [patch.encode()] * 2


def test_an_entry_without_a_patch_changes_nothing(tmp_path: Path) -> None:
    """As in swebench, whose reports count such entries as empty patches."""
    entries = [ENTRY, {"instance_id": "b-2", "model_name_or_path": "m"}]
    entries.append({**ENTRY, "instance_id": "c-3", "model_patch": ""})
    (tmp_path / "p.json").write_text(json.dumps(entries))

    assert [p.patch for p in read_predictions(tmp_path / "p.json")] == [DIFF.encode(), b"", b""]


def test_one_model_of_several_is_chosen(tmp_path: Path) -> None:
    """Its samples are numbered without those of the others."""
    other = {**ENTRY, "model_name_or_path": "n", "model_patch": "n's"}
    (tmp_path / "p.json").write_text(json.dumps([ENTRY, other, {**other, "model_patch": None}]))

    with pytest.raises(ConfigurationError, match=r"2 models \(m, n\).*--model NAME"):
        read_predictions(tmp_path / "p.json")
    found = read_predictions(tmp_path / "p.json", "n")
    assert found == [Prediction("a-1", 0, b"n's", "n"), Prediction("a-1", 1, b"", "n")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_patch": ""}\n', r"line 1: 'model_patch' is not a prediction"),
        ('{"instance_id": "a", "model_patch": 3}\n', r"line 1: `model_patch` must be text or null"),
        (
            '{"instance_id": "", "patch": ""}\n',
            r"line 1 lacks `instance_id`: it names the instance",
        ),
        ('{"instance_id": "a"}\n', r"line 1 lacks `model_patch`, and so does every entry"),
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
    run_id="r",
    instances=("toy/a-1", "toy/b-2"),
    n_samples=2,
    listed=True,
    rollout={"agent": "predictions", "agent_options": {"predictions_sha256": "0"}},
)
REFS = {"a-1": "toy/a-1", "b-2": "toy/b-2"}


async def test_a_run_plays_the_samples_that_have_a_patch(tmp_path: Path) -> None:
    """An instance with fewer patches than another has fewer rollouts, also in a retry, and the store
    keeps each patch byte for byte. Placing them again changes nothing."""
    store = LocalStore(tmp_path)
    await store.put(store_keys.run_instances("r"), b'["toy/a-1", "toy/b-2"]')
    given = [Prediction("a-1", 0, DIFF.encode(), "m"), Prediction("b-2", 0, b"x", "m")]
    given.append(Prediction("a-1", 1, b"", "m"))
    for _ in range(2):
        await place(store, RUN, REFS, given)

    page = await load_page(store, PageRequest(run_id="r", start=0, stop=9, listed=True))
    names = [("toy/a-1", 0), ("toy/b-2", 0), ("toy/a-1", 1)]
    assert are_uneven(given)
    assert list(page.again) == [RolloutAgain(instance=i, sample_index=s, round=0) for i, s in names]
    assert await planned_rollouts(store, RUN) == 3
    again = await select(store, RUN, PlayAgain(round=1))
    assert [(one.instance, one.sample_index) for one in again] == names
    stored = await store.get(store_keys.prediction(RUN.rollout_request("toy/a-1", 0)))
    assert stored.data == DIFF.encode()


def test_even_numbers_need_no_list() -> None:
    """The usual file has one patch for each instance."""
    assert not are_uneven([Prediction(one, 0, b"", "m") for one in ("a-1", "b-2")])


async def test_a_run_keeps_its_patch(tmp_path: Path) -> None:
    """Other patches under the same run id are refused, because they would be graded as the old
    ones."""
    store = LocalStore(tmp_path)
    await place(store, RUN, REFS, [Prediction("a-1", 0, DIFF.encode(), "m")])

    with pytest.raises(ConfigurationError, match=r"run r has another patch for a-1 #0"):
        await place(store, RUN, REFS, [Prediction("a-1", 0, b"", "m")])


def test_the_name_of_given_patches_runs_no_agent() -> None:
    """The message of `perdure run --agent predictions` says which command to use."""
    fields: dict[str, Any] = {**RUN.model_dump(), "rollout": {"agent": "predictions"}}

    with pytest.raises(ValueError, match="perdure grade SOURCE --predictions"):
        RunRequest(**fields).rollout_request("toy/a-1")
