"""SWE-bench Pro rows: separate scripts, lists as Python literals, tests only for the grader."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.instances.calibration_record import Calibration, digest_of, joined
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_import import import_rows
from perdure.storage.local_store import LocalStore
from perdure.types import CalibrationState, Instance, SourceKind, Twin, TwinDraw
from tests.checkout_paths import ROOT
from tests.unit.instances.made_rows import PARSER, write_scripts

REAL = ROOT.parent / "shared" / "data" / "tasks" / "swebench_pro_rows.jsonl"
BASE, FIX = "a" * 40, "f" * 40
ROW: dict[str, Any] = {
    "repo": "o/r",
    "instance_id": "instance_o__r-1",
    "base_commit": BASE,
    "patch": "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "",
    "problem_statement": "It breaks.",
    "requirements": "- It must not.",
    "interface": "Name: fix",
    "fail_to_pass": "['test_a', \"test 'b'\"]",
    "pass_to_pass": "[]",
    "before_repo_set_cmd": f"git reset --hard {BASE}\ngit clean -fd \ngit checkout {BASE} \n"
    f"git checkout {FIX} -- tests/test_a.py 'tests/[x].py'",
    "selected_test_files_to_run": '["tests/test_a.py", "tests/[x].py"]',
    "dockerhub_tag": "o.r-1",
}


def read(folder: Path, **changes: Any) -> Instance:
    return to_instance({**ROW, **changes}, "pro", 3, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_scripts(tmp_path, "instance_o__r-1")
    return tmp_path


def test_a_row(folder: Path) -> None:
    """Image, lists, scripts and the statement with its requirements are the publisher's."""
    instance = read(folder)
    grading = instance.grading

    assert instance.environment.image == "docker.io/jefzda/sweap-images:o.r-1"
    assert (instance.environment.workdir, instance.source.kind) == ("/app", SourceKind.IMAGE)
    assert (grading.protocol, grading.fail_to_pass) == ("swepro", ("test_a", "test 'b'"))
    assert grading.parser is not None
    assert grading.parser.arguments == "tests/test_a.py,tests/[x].py"
    assert grading.parser.program == PARSER
    assert instance.problem_statement == (
        "It breaks.\n\nRequirements:\n- It must not.\n\nNew interfaces:\nName: fix"
    )


def test_only_the_grader_gets_the_tests(folder: Path) -> None:
    """The last line of before_repo_set_cmd adds tests in the grader's sandbox only."""
    grading = read(folder).grading

    assert grading.pre_commands == (
        *(f"git reset --hard {BASE}", "git clean -fd ", f"git checkout {BASE} "),
    )
    assert grading.tests_from is not None
    assert grading.tests_from.model_dump() == {
        "commit": FIX,
        "paths": ("tests/test_a.py", "tests/[x].py"),
    }
    assert grading.patch_exclude == ("tests/test_a.py", "tests/[[]x].py")


def test_a_tree_gets_its_tests_from_the_test_patch(folder: Path) -> None:
    """A row with a `source` has no later commit, so `test_patch` adds the tests."""
    source = {"kind": "directory", "path": "/tree"}
    grading = read(folder, source=source, test_patch=ROW["patch"]).grading

    assert grading.test_patch == ROW["patch"].encode()
    assert (grading.tests_from, grading.pre_commands) == (None, ())


def test_with_twins_an_images_tests_come_from_the_test_patch(folder: Path) -> None:
    """Twins are lines of it; files of a later commit would restore every original."""
    row = read(folder, test_patch=ROW["patch"])
    twin = Twin(tests=("test_a",), path="m.py", line=1, before=b"b", after=b"c", rule="literal")
    record = Calibration(
        instance=row.ref,
        instance_sha256=digest_of(row),
        sandbox="podman",
        state=CalibrationState.PROVED,
        runs=3,
        fail_to_pass=("test_a",),
        twin_draws=(TwinDraw(runs=((twin,),)),),
    )

    assert joined(row, record).grading.tests_from is None
    assert joined(row, record.model_copy(update={"twin_draws": ()})).grading.tests_from is not None
    assert joined(row, record).grading.test_patch == ROW["patch"].encode()


def test_slimes_swepro_object(folder: Path) -> None:
    """`metadata.swepro` is read the same way; its scripts have paths, its lists are lists."""
    scripts = folder / "run_scripts" / "instance_o__r-1"
    swepro = {
        "before_repo_set_cmd": ROW["before_repo_set_cmd"],
        "run_script_path": str(scripts / "run_script.sh"),
        "parser_script_path": str(scripts / "parser.py"),
        "selected_test_files": ["tests/test_a.py"],
        "fail_to_pass": ["test_a"],
        "pass_to_pass": ["test_b"],
    }
    metadata = {"image": "i:1", "workdir": "/app", "swepro": swepro, "pre_commands": "git gc"}
    row = {"prompt": "Fix it.", "label": "one", "metadata": metadata}
    grading = to_instance(row, "d", 1).grading

    assert (grading.protocol, grading.pass_to_pass) == ("swepro", ("test_b",))
    assert grading.pre_commands[-1] == "git gc"
    assert grading.parser is not None
    assert grading.parser.arguments == "tests/test_a.py"


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"before_repo_set_cmd": "git reset --hard x"}, "bad `before_repo_set_cmd`", "last line"),
        ({"fail_to_pass": "[]"}, "lacks `fail_to_pass`", "list the tests"),
        ({"fail_to_pass": "__import__('os')"}, "bad `fail_to_pass`", "give a list"),
        ({"base_commit": ""}, "lacks `base_commit`", "starts from"),
        ({"dockerhub_tag": ""}, "lacks `dockerhub_tag`", "`image`"),
        ({"instance_id": "other"}, "lacks `run_script_path`", "`run_scripts` next to the rows"),
    ],
)
def test_errors(folder: Path, changes: dict[str, Any], field: str, fix: str) -> None:
    """Every error names row, field and fix."""
    with pytest.raises(InstanceError) as caught:
        read(folder, **changes)

    assert str(caught.value).startswith("row 3")
    assert field in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.skipif(not REAL.is_file(), reason="the real rows are not here")
async def test_real_rows(tmp_path: Path) -> None:
    """Published rows import if their scripts and image tags exist; otherwise the error says so."""
    rows = [json.loads(line) for line in REAL.read_text().splitlines()]
    for row in rows:
        write_scripts(tmp_path, row["instance_id"])
    file = tmp_path / "pro.jsonl"
    file.write_text("".join(json.dumps({**row, "dockerhub_tag": "t"}) + "\n" for row in rows))

    report = await import_rows(LocalStore(tmp_path / "store"), file)
    without = await import_rows(LocalStore(tmp_path / "other"), REAL)

    assert (len(report.refs), report.problems) == (len(rows), [])
    assert len(without.problems) == len(rows)
