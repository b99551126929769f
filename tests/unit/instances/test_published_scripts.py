"""A published script becomes a command with its preparation and its tests."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.instances.rows import published_scripts
from perdure.instances.rows.row_conversion import to_instance
from tests.checkout_paths import ROOT

TASKS = ROOT.parent / "shared" / "data" / "tasks"

# In the layout of `make_eval_script_list_common` and `..._py` of swebench 4.1.0.
MADE = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff 0123456789012345678901234567890123456789
source /opt/miniconda3/bin/activate
conda activate testbed
cat > config.json <<'EOF'
{"a": 1}

git status
EOF
make build
rm -f build.lock
git checkout 0123456789012345678901234567890123456789 tests/a.test
rm -f tests/a.test
git apply --verbose --reject - <<'EOF_114329324912'
diff --git a/tests/a.test b/tests/a.test
--- /dev/null
+++ b/tests/a.test
+make harm
EOF_114329324912
: '>>>>> Start Test Output'
make first
make second
SWEBENCH_TEST_EXIT_CODE=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"
git checkout 0123456789012345678901234567890123456789 tests/a.test
"""


def test_keeps_what_the_tests_need_and_leaves_out_the_graders_work() -> None:
    """Builds and here-documents stay; patches, resets, markers and repeats are dropped."""
    parts = published_scripts.marked(MADE)

    assert parts is not None
    assert published_scripts.command(*parts).splitlines() == [
        "set -uxo pipefail",
        "source /opt/miniconda3/bin/activate",
        "conda activate testbed",
        "cd /testbed",
        "cat > config.json <<'EOF'",
        '{"a": 1}',
        "",
        "git status",
        "EOF",
        "make build",
        "rm -f build.lock",
        "make first",
        "make second",
    ]


def test_a_published_install_does_not_wait_for_an_index() -> None:
    """The sandbox has no network, so pip fails at once and the tests still run."""
    command = published_scripts.command(
        "set -uxo pipefail\npip install --no-such-option .", "echo $PIP_NO_INDEX"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)

    assert done.stdout.splitlines()[-1:] == [b"1"]


def rows(file: str) -> list[dict[str, Any]]:
    if not (TASKS / file).is_file():
        pytest.skip("the real rows are not here")
    return [json.loads(line) for line in (TASKS / file).read_text().splitlines()]


def test_real_rows_of_schema_4_run_what_schema_5_publishes() -> None:
    """Without schema 5's fields, a real row gets the command and parser that 5 gives it."""
    for row in rows("swebench_rows.jsonl"):
        later = to_instance(row, "d", 1).grading
        earlier = {
            name: row[name]
            for name in row
            if name not in ("eval_script", "log_parser", "eval_type")
        }

        assert to_instance(earlier, "d", 1).grading == later


def test_real_scripts_lose_no_line_but_the_graders() -> None:
    """The command has a real eval_script's install and test lines, and applies no patch."""
    for row in rows("swebench_rows.jsonl"):
        command = to_instance(row, "d", 1).grading.test_cmd or ""

        assert "pip install" in command
        assert "git " not in command
        assert row["eval_script"].count(command.splitlines()[-1]) == 1


def test_real_swe_gym_rows_run_setup_and_tests() -> None:
    """setup_script's preparation precedes test_script's command; its patch is dropped."""
    commands = [
        to_instance(row, "d", 1).grading.test_cmd or "" for row in rows("swe_gym_rows.jsonl")
    ]

    assert all("pip install" in command and "git apply" not in command for command in commands)
    assert "rm -rf ~/.config/dask" in commands[2]
    assert commands[2].endswith("\npytest -n0 -rA  --color=no dask/array/tests/test_masked.py")


def test_real_swe_gym_rows_without_scripts_run_the_same_tests() -> None:
    """Without scripts, the repository's command and the test patch give the same line."""
    for row in rows("swe_gym_rows.jsonl"):
        published = {name: row[name] for name in row if not name.endswith("_script")}
        instance = to_instance(published, "d", 1)

        assert instance.data_source == "swe-gym"
        assert (instance.grading.test_cmd or "").splitlines()[-1] == row[
            "test_script"
        ].splitlines()[-1]


@pytest.mark.parametrize(
    ("repo", "version", "lines"),
    [
        ("python/mypy", "0.990", ["pytest -n0 -rA tests/a/tests.py"]),
        ("python/mypy", "1.9", ["pytest -rA tests/a/tests.py"]),
        ("Project-MONAI/MONAI", "1.0", ["pytest -rA tests/a/tests.py"]),
        ("conan-io/conan", "2.0", ["export PYTHONPATH=${PYTHONPATH:-}:$(pwd)", "pytest -n0 -rA tests/a/tests.py"]),
    ],
)  # fmt: skip
def test_swe_gym_rows_as_published(repo: str, version: str, lines: list[str]) -> None:
    """A made row of the published set, recognized by its repository."""
    command = to_instance(schema_4(repo, version), "d", 1).grading.test_cmd or ""

    assert command.splitlines()[4:] == lines


@pytest.mark.parametrize(
    ("repo", "version", "line"),
    [
        ("django/django", "1.9", "./tests/runtests.py --verbosity 2 a.tests"),
        ("django/django", "1.6", "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 a.tests"),
        ("django/django", "3.1", "export LANG=en_US.UTF-8"),
        ("django/django", "5.0", "python -m pip install -e ."),
        ("astropy/astropy", "1.3", "pytest -rA -vv -o console_output_style=classic --tb=no tests/a/tests.py"),
        ("matplotlib/matplotlib", "3.8", 'python -m pip install --no-build-isolation -e ".[dev]"'),
        ("matplotlib/matplotlib", "2.1", "python setup.py build; python setup.py install"),
        ("mwaskom/seaborn", "0.11", "python -m pip install -e ."),
    ],
)  # fmt: skip
def test_versions_that_differ_in_schema_4(repo: str, version: str, line: str) -> None:
    """Special cases of swebench 4.1.0 for one version; django's tests are modules below tests/."""
    assert (
        line in (to_instance(schema_4(repo, version), "d", 1).grading.test_cmd or "").splitlines()
    )


def test_schema_4_of_another_repository_needs_schema_5() -> None:
    """Multilingual rows without eval_script are refused with row, field and fix."""
    with pytest.raises(
        InstanceError, match="row 17 lacks `eval_script`: for gin-gonic/gin take the row"
    ):
        to_instance(schema_4("gin-gonic/gin", "1805"), "d", 17)


def schema_4(repo: str, version: str) -> dict[str, Any]:
    patch = "diff --git a/tests/a/tests.py b/tests/a/tests.py\n--- a/tests/a/tests.py\n+++ b/tests/a/tests.py\n@@ -1 +1 @@\n-a\n+b\n"
    return {
        "instance_id": "made__row-1",
        "repo": repo,
        "version": version,
        "problem_statement": "It breaks.",
        "patch": patch,
        "test_patch": patch,
        "FAIL_TO_PASS": ["t"],
        "PASS_TO_PASS": [],
    }


def test_multilingual_row_of_schema_5(tmp_path: Path) -> None:
    """A made row in Multilingual's layout: real lists, another language's parser, a build."""
    row = {
        **schema_4("gin-gonic/gin", "1805"),
        "eval_script": MADE,
        "log_parser": "parse_log_gotest",
        "eval_type": "pass_and_fail",
        "image": "docker.io/swebench/sweb.eval.x86_64.gin-gonic_1776_gin-1805:latest",
    }
    instance = to_instance(row, "d", 1)

    assert instance.grading.log_parser == "parse_log_gotest"
    assert instance.environment.image == row["image"]
    assert (instance.grading.test_cmd or "").endswith("make first\nmake second")
