"""Multi-SWE-bench rows in the publisher's layout: three stages become lists of tests."""

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.graders.protocols import multi_swe
from perdure.instances.rows.row_conversion import to_instance
from perdure.types import Instance, TestStatus

PATCH = "diff --git a/m.go b/m.go\n--- a/m.go\n+++ b/m.go\n@@ -1 +1 @@\n-a\n+b\n"
FAIL, PASS, NONE, SKIP = "FAIL", "PASS", "NONE", "SKIP"


def stages(run: str, test: str) -> dict[str, str]:
    return {"run": run, "test": test, "fix": PASS}


def result(passed: list[str], failed: list[str], skipped: list[str]) -> dict[str, Any]:
    return {"passed_tests": passed, "failed_tests": failed, "skipped_tests": skipped}


ROW: dict[str, Any] = {
    "org": "cli",
    "repo": "cli",
    "number": 10388,
    "base": {"label": "cli:trunk", "ref": "trunk", "sha": "a" * 40},
    "title": "Fix it",
    "body": "closes #1",
    "resolved_issues": [{"number": 1, "title": "It breaks", "body": "Often."}],
    "fix_patch": PATCH,
    "test_patch": PATCH.replace("m.go", "m_test.go"),
    "f2p_tests": {"TestA": stages(FAIL, FAIL)},
    "n2p_tests": {"TestNew": stages(NONE, NONE)},
    "s2p_tests": {},
    "p2p_tests": {"TestKept": stages(PASS, PASS)},
    "run_result": result(["TestKept", "TestGone", "TestLater"], ["TestA"], []),
    "test_patch_result": result(["TestKept", "TestFlaky"], ["TestA", "TestLater"], ["TestGone"]),
    "fix_patch_result": result(["TestA", "TestNew", "TestKept"], [], []),
}


def read(**changes: Any) -> Instance:
    return to_instance({**ROW, **changes}, "d", 9)


def test_a_row() -> None:
    """The id is derived, the issue is the task, and the image shows neither fix nor tests."""
    instance = read()

    assert instance.instance_id == "cli__cli-10388"
    assert instance.problem_statement == "It breaks\n\nOften."
    assert instance.base_commit == "a" * 40
    assert instance.environment.image == "docker.io/mswebench/cli_m_cli:pr-10388"
    assert instance.environment.workdir == "/home/cli"
    assert instance.environment.remove == ("/home/fix.patch", "/home/test.patch")


def test_stages_become_lists() -> None:
    """All fixed tests must pass; tests that passed before the fix may not fail after it."""
    grading = read().grading

    assert grading.fail_to_pass == ("TestA", "TestNew")
    assert grading.pass_to_pass == ("TestKept",)
    assert grading.must_not_fail == ("TestFlaky", "TestGone")


@pytest.mark.parametrize(
    ("changed", "resolved"),
    [
        ({}, True),
        ({"TestA": TestStatus.FAILED}, False),
        ({"TestNew": None}, False),
        ({"TestKept": None}, False),
        ({"TestFlaky": TestStatus.FAILED}, False),
        ({"TestLater": TestStatus.FAILED}, True),
        ({"TestOther": TestStatus.FAILED}, True),
    ],
)
def test_the_third_stage_decides(changed: dict[str, TestStatus | None], resolved: bool) -> None:
    """The publisher's four checks of a run of the third stage."""
    passed = dict.fromkeys(("TestA", "TestNew", "TestKept"), TestStatus.PASSED)
    found = {test: status for test, status in {**passed, **changed}.items() if status}

    assert (multi_swe.judge(found, read().grading).outcome == "resolved") is resolved


APPLY = "--whitespace=nowarn /home/test.patch /home/fix.patch"
STOPS = f"if ! git -C /home/cli apply {APPLY}; then\n  echo failed >&2\n  exit 1\nfi"


@pytest.mark.parametrize(
    "applies", [f"git apply {APPLY}", STOPS, STOPS.replace("-C /home/cli ", "")]
)
def test_the_publishers_script_runs_what_the_grader_has_patched(
    applies: str, tmp_path: Path
) -> None:
    """The script applies two diffs that the image no longer has, in any of the publisher's ways.
    Other git commands work."""
    (tmp_path / "cli").mkdir()
    script = f"#!/bin/bash\nset -e\ncd /home/cli\n{applies}\ngit --version\necho tests\nexit 3\n"
    (tmp_path / "fix-run.sh").write_text(script.replace("/home/", f"{tmp_path}/"))
    command = (read().grading.test_cmd or "").replace("/home/", f"{tmp_path}/")

    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    assert (done.stdout[:11], done.stdout[-6:], done.returncode) == ("git version", "tests\n", 3)


def test_a_run_without_results_is_unresolved() -> None:
    """A run without results does not count as a fix."""
    judgement = multi_swe.judge({}, read().grading, "build failed")

    assert (judgement.outcome, judgement.reason) == (
        *("unresolved", "the log has no test result: build failed"),
    )


@pytest.mark.skipif(
    importlib.util.find_spec("multi_swe_bench") is None,
    reason="the package multi-swe-bench is not installed",
)
def test_the_publishers_parser_reads_the_log() -> None:
    """The class that the package registers for the repository parses its log."""
    log = b"=== RUN TestA\n--- PASS: TestA (0.00s)\n--- FAIL: TestB (0.00s)\nFAIL\n"

    assert multi_swe.parsed("cli/cli", log) == {
        "TestA": TestStatus.PASSED,
        "TestB": TestStatus.FAILED,
    }


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"number": "1"}, "lacks `number`", "pull request"),
        ({"f2p_tests": {}, "n2p_tests": {}}, "lacks `f2p_tests`", "all empty"),
        ({"test_patch_result": None}, "lacks `test_patch_result`", "add that stage's results"),
        ({"run_result": {"passed_tests": "x"}}, "bad `run_result`", "not a list"),
        ({"resolved_issues": [], "title": "", "body": ""}, "lacks `resolved_issues`", "the issue"),
        ({"fix_patch": ""}, "lacks `fix_patch`", "unified diff"),
    ],
)
def test_errors(changes: dict[str, Any], field: str, fix: str) -> None:
    """Every error names row, field and fix."""
    with pytest.raises(InstanceError) as caught:
        read(**changes, data_source="multi-swe-bench")

    assert str(caught.value).startswith("row 9")
    assert field in str(caught.value)
    assert fix in str(caught.value)
