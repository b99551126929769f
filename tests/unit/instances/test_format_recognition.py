"""A row's fields decide its format; the error for an unknown one names the nearest."""

from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.instances.rows.format_recognition import FORMATS, recognised
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_fields import Row

SWEBENCH: dict[str, Any] = {
    "instance_id": "psf__requests-1",
    "repo": "psf/requests",
    "version": "2.27",
    "problem_statement": "It breaks.",
    "patch": "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": ["t.py::a"],
}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (SWEBENCH, "swebench"),
        ({**SWEBENCH, "patch": ""}, "swebench"),
        ({**SWEBENCH, "test_script": "pytest"}, "swe-gym"),
        ({"prompt": "p", "metadata": {"image": "i"}}, "slime"),
        ({**SWEBENCH, "metadata": {"eval_cmd": "make test"}}, "slime"),
        ({**SWEBENCH, "metadata": {"seen": 3}}, "swebench"),
        ({"instance_id": "a", "problem_statement": "p", "eval_cmd": "true"}, "swebench"),
    ],
)
def test_a_row_is_recognised_by_its_fields(fields: dict[str, Any], name: str) -> None:
    """A mark of one format decides; without one, the format with most of the row's fields."""
    assert recognised(Row(1, fields)) == name


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, r"format is unknown \(fields: none\)"),
        ({"question": "q", "answer": "a"}, r"`question`, `answer`.*nearest is SWE-bench.*lacks `instance"),
        ({"org": "o", "repo": "r", "number": 3, "body": "b"}, r"nearest is Multi-SWE-bench.*`fix_patch`"),
        (
            {**SWEBENCH, "install_config": {"a": 1}, "image_assets": {"b": 1}},
            "`image_assets` of SWE-bench Multimodal and `install_config` of SWE-rebench",
        ),
    ],
    ids=["empty", "another", "multi-swe", "two"],
)  # fmt: skip
def test_an_unknown_format_is_named_as_such(fields: dict[str, Any], said: str) -> None:
    """The error has the row's fields, the nearest format and the fields that it lacks."""
    with pytest.raises(InstanceError, match=f"row 4: .*{said}"):
        to_instance(fields, "d", 4)


MARKS = {mark: name for name, format_ in FORMATS.items() for mark in format_.marks}


@pytest.mark.parametrize("mark", sorted(MARKS))
def test_a_field_by_which_another_format_grades_is_refused(mark: str) -> None:
    """A SWE-bench row with a field that decides another format's verdict is refused."""
    row = {**SWEBENCH, "data_source": "swebench", mark: ["x"]}
    with pytest.raises(InstanceError, match=f"row 4: it has `{mark}`.*set `data_source` to"):
        to_instance(row, "d", 4)
