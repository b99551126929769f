"""Every container gives rows exactly as they were written."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from perdure.errors import ConfigurationError
from perdure.instances.rows.row_readers import NumberedRow, read_rows

ROWS = [
    {"instance_id": "a", "patch": "+x = 1\r\n-y\r\n", "FAIL_TO_PASS": ["t::a"]},
    {"instance_id": "b", "patch": "no end of line \u2028 here", "FAIL_TO_PASS": ["t::b"]},
]
NUMBERED = [NumberedRow(1, ROWS[0]), NumberedRow(2, ROWS[1])]


def test_jsonl_keeps_crlf(tmp_path: Path) -> None:
    """Line endings in a JSONL string survive, including Unicode ones."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS))

    assert list(read_rows(path)) == NUMBERED


def test_jsonl_numbers_are_lines(tmp_path: Path) -> None:
    """A blank line is no row but counts, so that the number is the line in an editor."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(ROWS[0]) + "\n")

    assert [row.number for row in read_rows(path)] == [2]


def test_bad_line_does_not_hide_the_next(tmp_path: Path) -> None:
    """A line that is not JSON becomes its own problem, and reading continues."""
    path = tmp_path / "rows.jsonl"
    path.write_text("{oops\n" + json.dumps(ROWS[1]) + "\n[1]\n")
    broken, whole, other = read_rows(path)

    assert broken.problem.startswith("row 1 is not valid JSON")
    assert whole.fields == ROWS[1]
    assert other.problem == "row 3 is not an object but list"


def test_parquet_reads_like_jsonl(tmp_path: Path) -> None:
    """Parquet gives the same rows as JSONL."""
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)

    assert list(read_rows(path)) == NUMBERED


@pytest.mark.parametrize("document", [ROWS, ROWS[0]], ids=["list", "one object"])
def test_json_holds_one_row_or_a_list(tmp_path: Path, document: object) -> None:
    """A .json file is a list of rows or a single row."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(document))

    assert next(iter(read_rows(path))) == NUMBERED[0]


def test_hub_name_is_read_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`owner/name:split` goes to Hugging Face's library, which also reads local folders."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "dev.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: dev\n    path: dev.jsonl\n---\n"
    )
    monkeypatch.chdir(tmp_path)

    assert list(read_rows("owner/name:dev")) == NUMBERED


def test_a_folder_with_one_slash_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tasks/mine` looks like owner/name, but it exists, so its only split is read."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "tasks" / "mine"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    monkeypatch.chdir(tmp_path)

    assert list(read_rows("tasks/mine")) == NUMBERED


def test_a_folder_of_several_splits_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a split `test`, the reader does not guess."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text(json.dumps(ROWS[0]))

    with pytest.raises(ConfigurationError, match=rf"{tmp_path}:train.*name one of them"):
        list(read_rows(tmp_path))


@pytest.mark.parametrize("source", ["nowhere.jsonl", "a/b/c", "no such thing"])
def test_unknown_source_says_what_is_possible(source: str) -> None:
    """The error for a source that is no file and no hub name lists the valid forms."""
    with pytest.raises(ConfigurationError, match=r"\.jsonl, \.json or \.parquet.*owner/name"):
        read_rows(source)
