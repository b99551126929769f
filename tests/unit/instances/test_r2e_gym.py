"""R2E-Gym rows in the publisher's layout: tests and fix come from the row and stay hidden."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.graders.protocols.status_map import compared
from perdure.graders.reports.log_parsers import LogParser
from perdure.instances.rows.row_conversion import to_instance
from perdure.types import Instance, Outcome, TestStatus
from tests.checkout_paths import ROOT
from tests.unit.instances.made_rows import EXPECTED, NEW, OLD, TEST, r2e_row

REAL = ROOT.parent / "shared" / "data" / "tasks" / "r2e_test_output.txt"


def read(**changes: Any) -> Instance:
    return to_instance(r2e_row(**changes), "r2e", 5)


def test_a_row() -> None:
    """The id is derived, the statement is the text in [ISSUE], every expected status is kept."""
    instance = read()

    assert instance.instance_id == "calc__bbbbbbbbbbbb"
    assert instance.problem_statement == "add() subtracts."
    assert (instance.grading.protocol, instance.grading.expected) == ("status_map", EXPECTED)
    assert instance.grading.test_cmd is not None
    assert instance.grading.test_cmd.endswith(".venv/bin/python -W ignore -m pytest -rA r2e_tests")


def test_the_image_keeps_no_tests() -> None:
    """The tests, their results and the fix are removed from all their places in the image."""
    removed = read().environment.remove

    assert {"/r2e_tests", "/testbed/r2e_tests", "/testbed/parsed_commit.json"} <= set(removed)


def test_tests_and_fix_apply(tmp_path: Path) -> None:
    """The hidden tests and the fix without its tests are git diffs of exactly the row's contents."""
    instance = read()
    (tmp_path / "calc.py").write_text(OLD)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for diff in (instance.gold_patch, instance.grading.test_patch):
        subprocess.run(["git", "apply"], cwd=tmp_path, input=diff, check=True)

    assert (tmp_path / "calc.py").read_text() == NEW
    assert (tmp_path / "r2e_tests/test_1.py").read_text() == TEST
    assert (tmp_path / "r2e_tests/__init__.py").read_bytes() == b""
    assert not (tmp_path / "tests").exists()


@pytest.mark.skipif(not REAL.exists(), reason="the task data is not beside the checkout")
def test_a_published_log_has_the_status_of_each_key() -> None:
    """A key has class, test and parameters, but neither the file nor a failure's message."""
    suite = "TestMultiIndexBasic"
    passed = ("multiindex_perf_warn", "multiindex_contains_dropped", "multi_nan_indexing")
    params = ("data0-True", "data1-True", "data2-False")
    expected = dict.fromkeys((f"{suite}.test_{name}" for name in passed), TestStatus.PASSED)
    for each in params:
        name = f"{suite}.test_multiindex_is_homogeneous_type[{each}]"
        expected[name] = TestStatus.PASSED
    expected[f"{suite}.test_indexing_over_hashtable_size_cutoff"] = TestStatus.PASSED
    expected[f"{suite}.test_contains"] = TestStatus.FAILED
    found = LogParser("pytest").statuses(REAL.read_bytes())

    assert compared(found, expected).outcome is Outcome.RESOLVED


def test_colours_and_messages_are_no_part_of_a_key() -> None:
    """Keys equal those of the publisher's reader of results."""
    expected = json.dumps({"\x1b[1mTestAdd.test_sum\x1b[0m - AssertionError: x": "FAILED"})

    assert read(expected_output_json=expected).grading.expected == {"TestAdd.test_sum": "FAILED"}


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"repo_name": ""}, "lacks `repo_name`", "`commit_hash`"),
        ({"expected_output_json": "{}"}, "lacks `expected_output_json`", "after the fix"),
        ({"execution_result_content": "{}"}, "lacks `execution_result_content`", "hidden tests"),
        ({"parsed_commit_content": "{}"}, "bad `parsed_commit_content`", "`file_diffs`"),
        ({"repo_name": "tornado"}, "lacks `test_cmd`", "runs pytest"),
        (
            {"execution_result_content": {"test_file_names": ["../x"], "test_file_codes": [""]}},
            "bad `execution_result_content`",
            "below r2e_tests",
        ),
    ],
)
def test_errors(changes: dict[str, Any], field: str, fix: str) -> None:
    """Every error names row, field and fix."""
    with pytest.raises(InstanceError) as caught:
        read(**changes)

    assert str(caught.value).startswith("row 5")
    assert field in str(caught.value)
    assert fix in str(caught.value)
