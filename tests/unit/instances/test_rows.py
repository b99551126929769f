"""Each public row format gives an instance, or one line with row, field and fix."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.instances import instance_catalog
from perdure.instances.rows.row_choice import Choice
from perdure.instances.rows.row_conversion import dataset_name, to_instance
from perdure.instances.rows.row_import import import_rows
from perdure.storage.local_store import LocalStore
from perdure.types import Instance, SimulatedUser, SourceKind
from tests.checkout_paths import ROOT

TASKS = ROOT.parent / "shared" / "data" / "tasks"
PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\r\n+b\r\n"
ROW: dict[str, Any] = {
    "instance_id": "psf__requests-1",
    "repo": "psf/requests",
    "problem_statement": "It breaks.",
    "patch": PATCH,
    "test_patch": PATCH,
    "FAIL_TO_PASS": ["tests/t.py::a"],
    "PASS_TO_PASS": [],
    "source": {"kind": "pypi-sdist", "requirement": "requests==2.27.0", "fetch": "ignored"},
    "python": "3.11",
    "install": ["uv venv $VENV", "uv pip install -e ."],
    "env": {"A": "1"},
    "test_cmd": "pytest -rA tests/t.py",
}
SLIME: dict[str, Any] = {
    "prompt": "Fix the thing.",
    "label": "thing 1",
    "metadata": {"image": "img:1", "workdir": "/workspace/thing", "eval_cmd": "pytest -x tests"},
}


def read(row: dict[str, Any], **changes: Any) -> Instance:
    return to_instance({**row, **changes}, "d", 17)


OWN: dict[str, Any] = {
    "instance_id": "a-1",
    "problem_statement": "Write out/a.",
    "source": {"kind": "empty"},
    "eval_cmd": "test -s out/a",
}


def test_a_row_whose_result_is_files() -> None:
    """It needs no `patch`; a row without artifacts does. The oracle runs its `solution`."""
    instance = read(OWN, artifacts=["/testbed/out"], solution="touch out/a")

    assert instance.artifacts == {"/testbed/out": ()}
    assert instance.gold_script == {"solve.sh": b"touch out/a"}
    with pytest.raises(InstanceError, match="row 17 lacks `patch`"):
        read(OWN)


@pytest.mark.parametrize("path", ["out", "/", "/testbed/../etc"])
def test_an_artifact_that_is_no_absolute_path_is_refused(path: str) -> None:
    """It would be looked for somewhere else in the grader's sandbox."""
    with pytest.raises(InstanceError, match="row 17 has a bad `artifacts`: write absolute paths"):
        read(OWN, artifacts=[path])


@pytest.mark.parametrize("encode", [dict, json.dumps])
def test_a_row_of_any_format_may_bring_its_user(encode: Callable[[Any], Any]) -> None:
    """As an object or as JSON. An error names the field of the user."""
    instance = read(ROW, simulated_user=encode({"messages": ["Now test it."], "model": None}))

    assert instance.user == SimulatedUser(messages=("Now test it.",))
    with pytest.raises(InstanceError, match=r"row 17 .*simulated_user\.message"):
        read(ROW, simulated_user={"message": "Now test it."})


def test_sdist_row() -> None:
    """A row with a source keeps everything that its tree and environment need."""
    instance = read(ROW)

    assert instance.source.requirement == "requests==2.27.0"
    assert instance.environment.install == ("uv venv $VENV", "uv pip install -e .")
    assert instance.environment.env == {"A": "1"}
    assert instance.environment.image is None
    assert instance.grading.test_cmd == "pytest -rA tests/t.py"
    assert instance.data_source == "swebench"


def test_patches_keep_crlf() -> None:
    """A patch has the row's exact bytes: CR LF stays CR LF."""
    instance = read(ROW)

    assert instance.gold_patch == instance.grading.test_patch == PATCH.encode()


@pytest.mark.parametrize(
    "form",
    [["t::a[x, 'y']", "t::b"], '["t::a[x, \'y\']", "t::b"]', "[\"t::a[x, 'y']\", 't::b']"],
    ids=["list", "JSON", "Python literal"],
)
def test_lists_in_every_form(form: Any) -> None:
    """Test lists are equal whether given as a list, as JSON text or as a Python literal."""
    assert read(ROW, FAIL_TO_PASS=form).grading.fail_to_pass == ("t::a[x, 'y']", "t::b")


def test_test_command_out_of_eval_script() -> None:
    """Without test_cmd, the command between eval_script's markers is used, in its environment."""
    script = (
        "#!/bin/bash\nset -uxo pipefail\nsource /opt/miniconda3/bin/activate\nconda activate testbed\n"
        ": '>>>>> Start Test Output'\nA='x' pytest -rA t.py\nSWEBENCH_TEST_EXIT_CODE=$?\n"
        ": '>>>>> End Test Output'\ngit checkout x\n"
    )
    command = read(ROW, test_cmd=None, eval_script=script).grading.test_cmd

    assert (command or "").splitlines() == [
        "set -uxo pipefail",
        "source /opt/miniconda3/bin/activate",
        "conda activate testbed",
        "A='x' pytest -rA t.py",
    ]


def test_plain_swebench_row_uses_the_published_image() -> None:
    """A row without a source uses the image that SWE-bench publishes for its id."""
    instance = read(ROW, source=None, version="2.27")

    assert instance.source.kind is SourceKind.IMAGE
    assert instance.environment.image == (
        "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1:latest"
    )


def test_data_source_is_kept_for_routing() -> None:
    """The row's own data_source selects the grader."""
    assert read(ROW, data_source="SWE-bench_Lite").data_source == "SWE-bench_Lite"


def test_slime_row() -> None:
    """slime's metadata gives image, workdir and an exit-code grader; `prompt` is the fallback text."""
    instance = read(SLIME)

    assert instance.instance_id == "thing-1"
    assert instance.problem_statement == "Fix the thing."
    assert (instance.environment.image, instance.environment.workdir) == (
        "img:1",
        "/workspace/thing",
    )
    assert (instance.grading.protocol, instance.grading.eval_cmd) == ("eval_cmd", "pytest -x tests")


def test_slime_flat_fields_win() -> None:
    """A field of metadata overrides remote_env_info; commands are split at literal newlines."""
    remote = {"image_url": "other:2", "image": "other:1", "pre_commands": "git a\\ngit b"}
    instance = read(SLIME, metadata={**SLIME["metadata"], "remote_env_info": remote})

    assert instance.environment.image == "img:1"
    assert instance.grading.pre_commands == ("git a", "git b")


@pytest.mark.parametrize("script", ["import sys\nsys.exit(0)\n", "print('caf\u00e9')\r\nx = 1"])
def test_slime_script_becomes_a_hidden_file(tmp_path: Path, script: str) -> None:
    """remote_env_info.f2p_script becomes a file with exactly its bytes, run by eval_cmd."""
    metadata = {"image": "i", "remote_env_info": {"f2p_script": script}}
    grading = read(SLIME, metadata=metadata).grading
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply"], cwd=tmp_path, input=grading.test_patch, check=True)

    assert grading.eval_cmd == "python test_fail_to_pass.py"
    assert (tmp_path / "test_fail_to_pass.py").read_bytes() == script.encode()


@pytest.mark.parametrize(
    ("row", "changes", "field", "fix"),
    [
        (ROW, {"patch": ""}, "lacks `patch`", "unified diff"),
        (ROW, {"instance_id": None}, "lacks `instance_id`", "a unique name"),
        (ROW, {"instance_id": "a b"}, "bad `instance_id`", "letters, digits"),
        (ROW, {"problem_statement": " "}, "lacks `problem_statement`", "agent is given"),
        (ROW, {"FAIL_TO_PASS": "[]"}, "lacks `FAIL_TO_PASS`", "list the tests"),
        (ROW, {"FAIL_TO_PASS": "t::a"}, "bad `FAIL_TO_PASS`", "give a list"),
        (ROW, {"PASS_TO_PASS": "__import__('os')"}, "bad `PASS_TO_PASS`", "give a list"),
        (ROW, {"test_cmd": ""}, "lacks `test_cmd`", "`eval_script`"),
        (ROW, {"test_cmd": "", "eval_script": "x"}, "bad `eval_script`", "give `test_cmd`"),
        (ROW, {"source": None, "version": None}, "lacks `source`", "`image`"),
        (ROW, {"source": {"kind": "ftp"}}, "bad `source.kind`", "pypi-sdist"),
        (ROW, {"source": {"kind": "blob"}}, "lacks `source.key`", "needs it"),
        (ROW, {"data_source": "swebnech"}, "bad `data_source`", "did you mean 'swebench'?"),
        (ROW, {"env": "x"}, "bad `env`", "object"),
        (ROW, {"eval_type": "maybe"}, "bad `eval_type`", "fail_only"),
        (ROW, {"patch": 3}, "bad `patch`", "give a string, not the number"),
        (
            SLIME,
            {"metadata": {"image": "i", "swepro": {"a": 1}}},
            "before_repo_set_cmd",
            "last line",
        ),
        (SLIME, {"metadata": {"image": "i"}}, "lacks `metadata.eval_cmd`", "exit code 0"),
        (SLIME, {"metadata": {"image": "i", "test_patch": "x"}}, "`test_patch`", "mismatch"),
        (SLIME, {"metadata": {"eval_cmd": "x"}}, "lacks `source`", "`image`"),
        (SLIME, {"label": ""}, "lacks `label`", "metadata.instance_id"),
    ],
)
def test_error_names_row_field_and_fix(
    row: dict[str, Any], changes: dict[str, Any], field: str, fix: str
) -> None:
    """Every error in a row is one line with its number, the field and the fix."""
    with pytest.raises(InstanceError) as caught:
        read(row, **changes)
    message = str(caught.value)

    assert message.startswith("row 17")
    assert field in message
    assert fix in message
    assert "\n" not in message


async def test_import_reports_every_bad_row(tmp_path: Path) -> None:
    """Good rows are kept, each bad one is reported, and the caller's check counts too."""
    rows = [ROW, {**ROW, "patch": ""}, ROW, {**ROW, "instance_id": "refused"}]
    path = tmp_path / "My rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")

    def validate(instance: Instance) -> None:
        if instance.instance_id == "refused":
            raise InstanceError("`log_parser` is unknown")

    store = LocalStore(tmp_path / "store")
    report = await import_rows(store, path, validate=validate)

    assert report.refs == ["My-rows/psf__requests-1"]
    assert await instance_catalog.refs(store, "My-rows") == report.refs
    assert [problem.split(":")[0] for problem in report.problems] == [
        "row 2 lacks `patch`",
        "row 3 repeats the `instance_id` 'psf__requests-1' of an earlier row",
        "row 4",
        "row 5 is not valid JSON",
    ]


async def test_import_stops_at_the_limit(tmp_path: Path) -> None:
    """`limit` is the number of rows to read."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**ROW, "instance_id": f"i{n}"}) + "\n" for n in range(3)))
    report = await import_rows(
        LocalStore(tmp_path / "store"), path, dataset="d", choice=Choice(limit=2)
    )

    assert report.refs == ["d/i0", "d/i1"]


@pytest.mark.parametrize(
    ("source", "name"), [("a/My rows.JSONL", "My-rows"), ("owner/name:dev", "name-dev")]
)
def test_dataset_is_named_after_its_source(source: str, name: str) -> None:
    """A file or hub name gives a dataset name that is safe in keys."""
    assert dataset_name(source) == name


@pytest.mark.skipif(not TASKS.is_dir(), reason="the real rows are not here")
@pytest.mark.parametrize(
    ("file", "good", "bad"),
    [
        ("swebench_sdist.jsonl", 7, 0),
        ("swebench_rows.jsonl", 13, 0),
        ("swe_gym_rows.jsonl", 3, 0),
        ("swe_smith_row.json", 1, 0),
        ("swe_rebench_row.json", 1, 0),
    ],
)
async def test_real_rows(tmp_path: Path, file: str, good: int, bad: int) -> None:
    """Real rows of supported formats import without errors; others are refused."""
    report = await import_rows(LocalStore(tmp_path), TASKS / file)

    assert (len(report.refs), len(report.problems)) == (good, bad)
