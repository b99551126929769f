"""SWE-bench Pro rows, and the `swepro` object of slime's rows.

The publisher keeps two scripts for each row outside it, in `run_scripts/<instance_id>/`. They are
read from `run_script_path` and `parser_script_path`, or from that folder next to the file of rows.
"""

import glob
import re
import shlex
from pathlib import Path

from perdure.instances.rows import image_rules
from perdure.instances.rows.formats import swebench
from perdure.instances.rows.row_fields import Row
from perdure.types import CommittedTests, Grading, Instance, OutputParser

WORKDIR = "/app"
CHECKOUT = re.compile(r"^git checkout (?P<commit>[0-9a-f]{7,40}) -- (?P<paths>.+)$")
SCRIPTS = {"run_script_path": "run_script.sh", "parser_script_path": "parser.py"}
TIMEOUT_S = 3600.0


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    fields = row.replaced(workdir=row.optional_text("workdir", WORKDIR))
    if not row.has("source") and not image_of(row):
        raise row.lacks(
            "dockerhub_tag", "add the publisher's tag of the row's image, or an `image`"
        )
    return Instance(
        instance_id=row.text("instance_id", "add a unique name"),
        dataset=dataset,
        data_source=row.optional_text("data_source", "swe-bench-pro"),
        repo=row.optional_text("repo"),
        base_commit=row.text("base_commit", "name the commit that the agent starts from"),
        problem_statement=_statement(row),
        source=swebench.source_of(fields, image_of),
        environment=swebench.environment_of(fields, image_of),
        grading=grading_of(fields),
        gold_patch=row.patch("patch", "add the reference solution, as a unified diff"),
        metadata=row.kept("repo_language", "issue_specificity", "issue_categories"),
    )


def image_of(row: Row) -> str | None:
    return image_rules.image_of(row) or image_rules.swe_bench_pro(row)


def grading_of(row: Row) -> Grading:
    """`before_repo_set_cmd` sets the tree to its base, and its last line adds the hidden tests.
    Only the grader's sandbox gets the tests."""
    *base_lines, last = row.lines("before_repo_set_cmd") or ("",)
    checkout = CHECKOUT.match(last.strip())
    if checkout is None:
        fix = "its last line must be `git checkout COMMIT -- TEST FILES`"
        raise row.wrong("before_repo_set_cmd", fix)
    paths = tuple(shlex.split(checkout["paths"]))
    in_tree = row.has("source")
    fail_to_pass = row.strings("fail_to_pass")
    if not fail_to_pass:
        raise row.lacks("fail_to_pass", "list the tests that the fix makes pass")
    return Grading(
        protocol="swepro",
        test_patch=row.patch("test_patch", "add the hidden tests" if in_tree else None),
        tests_from=None if in_tree else CommittedTests(commit=checkout["commit"], paths=paths),
        patch_exclude=tuple(glob.escape(path) for path in paths),
        pre_commands=() if in_tree else (*base_lines, *row.lines("pre_commands")),
        fail_to_pass=fail_to_pass,
        pass_to_pass=row.strings("pass_to_pass"),
        parser=_parser(row),
        timeout_s=TIMEOUT_S,
    )


def _statement(row: Row) -> str:
    """The problem, requirements and interface, as in the publisher's prompt."""
    parts = [row.text("problem_statement", "add the text that the agent is given")]
    for field, title in (("requirements", "Requirements"), ("interface", "New interfaces")):
        if text := row.optional_text(field):
            parts.append(f"{title}:\n{text}")
    return "\n\n".join(parts)


def _parser(row: Row) -> OutputParser:
    run, program = (_script(row, field) for field in SCRIPTS)
    name = "selected_test_files" if row.has("selected_test_files") else "selected_test_files_to_run"
    return OutputParser(run=run, program=program, arguments=",".join(row.strings(name)))


def _script(row: Row, field: str) -> str:
    path = row.optional_text(field)
    name = SCRIPTS[field]
    folder = Path("run_scripts") / row.optional_text("instance_id")
    file = row.beside(path or str(folder / name))
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fix = f"give the path of the publisher's {name}, or put its `run_scripts` next to the rows"
        raise row.lacks(field, f"{fix} ({error})") from error
