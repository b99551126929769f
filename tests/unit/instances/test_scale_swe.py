"""Scale-SWE rows, flat and in slime's metadata, in the publisher's layout: lists are never dropped."""

from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.instances.rows.row_conversion import to_instance
from perdure.types import Instance

PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n"
ROW: dict[str, Any] = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "parent_commit": "a" * 40,
    "image_url": "registry/o:1",
    "workdir": "/workspace/r",
    "pre_commands": "git checkout aaaa -f\\ngit clean -fd",
    "problem_statement": "It breaks.",
    "patch": PATCH,
    "f2p_patch": PATCH.replace("m.py", "tests/test_m.py"),
    "f2p_script": "import pytest, sys\nsys.exit(pytest.main([__file__]))\n",
    "FAIL_TO_PASS": ["test_fail_to_pass.py::test_a", "tests/test_m.py::test_b[x y]"],
    "PASS_TO_PASS": '["tests/test_m.py::test_c"]',
}


def read(**changes: Any) -> Instance:
    return to_instance({**ROW, **changes, "data_source": "scale-swe"}, "d", 7)


def slime(**changes: Any) -> Instance:
    inside = {key: value for key, value in {**ROW, **changes}.items() if key != "eval_cmd"}
    metadata = {key: changes[key] for key in ("eval_cmd",) if key in changes}
    row = {"prompt": "x", "label": "x", "metadata": {**metadata, "remote_env_info": inside}}
    return to_instance(row, "d", 7)


@pytest.mark.parametrize("made", [read, slime], ids=["flat", "slime"])
def test_lists_are_graded(made: Any) -> None:
    """One command runs the files of both lists; the script is one of them."""
    grading = made().grading

    assert (grading.protocol, len(grading.fail_to_pass), len(grading.pass_to_pass)) == (
        *("swebench", 2, 1),
    )
    assert grading.test_cmd == "python -m pytest -rA test_fail_to_pass.py tests/test_m.py"
    assert b"+++ b/test_fail_to_pass.py" in grading.test_patch
    assert b"+++ b/tests/test_m.py" in grading.test_patch
    assert grading.pre_commands == ("git checkout aaaa -f", "git clean -fd")


@pytest.mark.parametrize("made", [read, slime], ids=["flat", "slime"])
def test_a_script_alone_is_run(made: Any) -> None:
    """Without lists, the script's exit code is the verdict."""
    grading = made(FAIL_TO_PASS=[], PASS_TO_PASS=[]).grading

    assert (grading.protocol, grading.eval_cmd) == ("eval_cmd", "python test_fail_to_pass.py")


def test_a_flat_row_keeps_its_base() -> None:
    """`parent_commit` is the base; the row gives the image and the workdir."""
    instance = read()

    assert instance.base_commit == "a" * 40
    assert (instance.environment.image, instance.environment.workdir) == (
        *("registry/o:1", "/workspace/r"),
    )


@pytest.mark.parametrize(
    ("made", "changes", "field", "fix"),
    [
        (read, {"f2p_patch": "", "f2p_script": ""}, "lacks `f2p_script`", "`f2p_patch`"),
        (read, {"FAIL_TO_PASS": []}, "lacks `FAIL_TO_PASS`", "as PASS_TO_PASS does"),
        (read, {"FAIL_TO_PASS": ["test_a"]}, "bad `FAIL_TO_PASS`", "give a `test_cmd`"),
        (read, {"patch": ""}, "lacks `patch`", "unified diff"),
        (slime, {"eval_cmd": "pytest"}, "`eval_cmd` and test lists", "remove `eval_cmd`"),
    ],
    ids=["no tests", "no fixed tests", "no pytest ids", "no fix", "two graders"],
)
def test_errors(made: Any, changes: dict[str, Any], field: str, fix: str) -> None:
    """Every error names row, field and fix."""
    with pytest.raises(InstanceError) as caught:
        made(**changes)

    assert str(caught.value).startswith("row 7")
    assert field in str(caught.value)
    assert fix in str(caught.value)
