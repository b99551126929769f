"""Scale-SWE rows, flat or inside slime's `remote_env_info`. They have a script with the tests to
fix; full rows also have the lists.

With lists, the grader does as the publisher does: it applies the test patch, adds the script as one
of the tests, and runs every listed file. A script alone is graded by its exit code.
"""

import shlex

from perdure.instances.rows.content_diffs import added_file
from perdure.instances.rows.formats import swebench
from perdure.instances.rows.image_rules import image_of
from perdure.instances.rows.row_fields import Row
from perdure.types import Grading, Instance

SCRIPT_PATH = "test_fail_to_pass.py"


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    return Instance(
        instance_id=row.text("instance_id", "add a unique name"),
        dataset=dataset,
        data_source=row.optional_text("data_source", "scale-swe"),
        repo=row.optional_text("repo"),
        base_commit=row.optional_text("parent_commit") or row.optional_text("base_commit") or None,
        problem_statement=row.text("problem_statement", "add the text that the agent is given"),
        source=swebench.source_of(row, image_of),
        environment=swebench.environment_of(row, image_of),
        grading=grading_of(row),
        gold_patch=row.patch("patch", "add the reference solution, as a unified diff"),
    )


def grading_of(row: Row) -> Grading:
    """Grade by the lists if the row has them, otherwise by the script's exit code."""
    fail_to_pass, pass_to_pass = row.strings("FAIL_TO_PASS"), row.strings("PASS_TO_PASS")
    tests = row.patch("f2p_patch") + _script(row)
    if not tests:
        raise row.lacks("f2p_script", "add the hidden tests, there or as a diff in `f2p_patch`")
    if not fail_to_pass and not pass_to_pass:
        return _exit_code(row, tests)
    if not fail_to_pass:
        raise row.lacks(
            "FAIL_TO_PASS", "list the tests that the fix makes pass, as PASS_TO_PASS does"
        )
    return Grading(
        test_patch=tests,
        test_cmd=row.optional_text("test_cmd") or _command(row, (*fail_to_pass, *pass_to_pass)),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        pre_commands=row.lines("pre_commands"),
    )


def _script(row: Row) -> bytes:
    """A diff that adds the script. Older slime puts the script into the command, but Linux limits
    an argument to 128 KiB."""
    script = row.optional_text("f2p_script")
    return added_file(SCRIPT_PATH, script.encode("utf-8", "surrogateescape")) if script else b""


def _exit_code(row: Row, tests: bytes) -> Grading:
    if not row.has("f2p_script"):
        raise row.lacks("FAIL_TO_PASS", "list the tests that the fix makes pass")
    return Grading(
        protocol="eval_cmd",
        eval_cmd=f"python {SCRIPT_PATH}",
        test_patch=tests,
        pre_commands=row.lines("pre_commands"),
    )


def _command(row: Row, tests: tuple[str, ...]) -> str:
    """The command that runs all files of the lists, because ids could exceed its length."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    if odd := [file for file in files if not file.endswith(".py")]:
        problem = (
            f"{odd[0]!r} is not a pytest id: give a `test_cmd` that runs the tests of both lists"
        )
        raise row.wrong("FAIL_TO_PASS", problem)
    return f"python -m pytest -rA {shlex.join(files)}"
