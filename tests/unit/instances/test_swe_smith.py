"""SWE-smith rows: the bug, its reverse, and the hidden files."""

import json
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.instances.rows.reversed_diff import reversed_diff
from perdure.instances.rows.row_conversion import to_instance
from tests.checkout_paths import ROOT

REAL = ROOT.parent / "shared" / "data" / "tasks" / "swe_smith_row.json"
ROW: dict[str, Any] = {
    "instance_id": "owner__calc.01234567.lm_rewrite__abcd",
    "repo": "swesmith/owner__calc.01234567",
    "image_name": "swesmith.x86_64.owner__calc.01234567",
    "problem_statement": "It breaks.",
    "patch": "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": ["tests/a[b].py::t"],
    "PASS_TO_PASS": ["tests/c.py::t"],
}


@pytest.mark.skipif(not REAL.is_file(), reason="the real row is not here")
def test_a_real_row() -> None:
    """Its published image, its hidden files, and a reference solution that reverts its bug."""
    row = json.loads(REAL.read_text())
    instance = to_instance(row, "d", 1)
    SwebenchGrader().validate(instance)
    hidden = "/testbed/pandas/tests/indexing/test_datetime.py"

    assert instance.environment.image == (
        "docker.io/swebench/swesmith.x86_64.pandas-dev_1776_pandas.95280573:latest"
    )
    assert instance.environment.remove == (hidden,)
    assert reversed_diff(instance.gold_patch) == row["patch"].encode()
    assert (instance.grading.test_cmd or "").endswith(hidden.removeprefix("/testbed/"))


def test_files_of_both_lists_are_the_graders() -> None:
    """FAIL_TO_PASS files are hidden from the agent; its diff omits edits of both lists' files."""
    instance = to_instance(ROW, "d", 1)

    assert instance.environment.remove == ("/testbed/tests/a[b].py",)
    assert instance.grading.patch_exclude == ("tests/a[[]b].py", "tests/c.py")
    assert instance.grading.tests_from is not None
    assert instance.grading.tests_from.paths == ("tests/a[b].py", "tests/c.py")


BINARY = "diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch": ""}, "lacks `patch`: add the diff that makes the bug"),
        ({"patch": BINARY}, "has a bad `patch`: it must be reversible.*Binary files"),
        ({"patch": "+" * (97 << 10)}, "has a bad `patch`: it has 99328 bytes"),
        ({"FAIL_TO_PASS": ["TestAdd"]}, "has a bad `FAIL_TO_PASS`.*only SWE-smith's Python rows"),
        ({"FAIL_TO_PASS": []}, "lacks `FAIL_TO_PASS`"),
        ({"PASS_TO_PASS": ["../x.py::t"]}, "has a bad `PASS_TO_PASS`"),
        ({"problem_statement": ""}, "lacks `problem_statement`"),
        ({"image_name": None, "instance_id": "x"}, "lacks `image_name`"),
    ],
)
def test_error_names_row_field_and_fix(changes: dict[str, Any], said: str) -> None:
    """The error for a missing or bad field has its row, field and fix."""
    with pytest.raises(InstanceError, match=f"row 17 {said}"):
        to_instance({**ROW, **changes}, "d", 17)
