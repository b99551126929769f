"""R2E-Gym rows: they give the status of every test after the fix, and contain the tests.

The image has the tests, their results and the fix, also inside the repository. All of these are
removed, and the hidden tests come from the row.
"""

import json
import re
from typing import Any

from perdure.instances.rows import image_rules
from perdure.instances.rows.content_diffs import added_file, difference, is_inside
from perdure.instances.rows.formats import swebench
from perdure.instances.rows.row_fields import Row
from perdure.types import Grading, Instance, slugify

TESTS = "r2e_tests"
WARNINGS = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning'"
PYTEST = f".venv/bin/python -W ignore -m pytest -rA {TESTS}"
OWN_RUNNER = re.compile(r"^tornado$|^pillow$.*\bunittest\b", re.DOTALL | re.MULTILINE)
"""Matches repositories with their own test runner: tornado, and pillow with unittest."""
SHOWN = (
    "run_tests.sh",
    "syn_issue.json",
    "expected_test_output.json",
    "execution_result.json",
    "parsed_commit.json",
    "modified_files.json",
    "modified_entities.json",
    TESTS,
)
"""Files that the publisher's own harness hides from the agent: its SKIP_FILES."""
KEEP_UNTRACKED = (
    "git ls-files -o --exclude-standard --directory --no-empty-directory "
    "| sed 's,^,/,' >>.git/info/exclude"
)
"""Keeps untracked files of the image, such as its environment, out of the agent's diff."""


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    repo, commit = _identity(row)
    workdir = row.optional_text("workdir", "/testbed")
    fields = row.replaced(workdir=workdir)
    environment = swebench.environment_of(fields, image_of)
    in_tree = row.has("source")
    hidden = (f"/{TESTS}", *(f"{workdir}/{name}" for name in SHOWN))
    return Instance(
        instance_id=row.optional_text("instance_id") or slugify(f"{repo}__{commit[:12]}"),
        dataset=dataset,
        data_source=row.optional_text("data_source", "r2e-gym"),
        repo=repo,
        problem_statement=_issue(row),
        source=swebench.source_of(fields, image_of),
        environment=environment.model_copy(update={"remove": () if in_tree else hidden}),
        grading=_grading(row, repo, in_tree),
        gold_patch=_gold(row),
        metadata={"commit_hash": commit},
    )


def image_of(row: Row) -> str | None:
    return image_rules.image_of(row) or image_rules.r2e_gym(row)


def _identity(row: Row) -> tuple[str, str]:
    fix = "the instance id is made from `repo_name` and `commit_hash`"
    return row.text("repo_name", fix), row.text("commit_hash", fix)


def _issue(row: Row) -> str:
    text = row.text("problem_statement", "add the text that the agent is given")
    inside = text.partition("[ISSUE]")[2].partition("[/ISSUE]")[0]
    return (inside or text).strip()


def _grading(row: Row, repo: str, in_tree: bool) -> Grading:
    expected = {
        _key(name): str(status) for name, status in row.mapping("expected_output_json").items()
    }
    if not expected:
        raise row.lacks("expected_output_json", "give the status of each test after the fix")
    tests = _tests(row)
    return Grading(
        protocol="status_map",
        test_patch=tests,
        test_cmd=row.optional_text("test_cmd") or _command(row, repo, tests),
        log_parser="pytest",
        expected=expected,
        pre_commands=() if in_tree else (KEEP_UNTRACKED,),
    )


def _command(row: Row, repo: str, tests: bytes) -> str:
    """The command in the image's `run_tests.sh`."""
    if OWN_RUNNER.search(f"{repo}\n{tests.decode('utf-8', 'replace')}"):
        fix = f"{repo} has its own test runner, so give a command that runs pytest"
        raise row.lacks("test_cmd", fix)
    if repo == "orange3":
        return f"QT_QPA_PLATFORM=minimal {WARNINGS} xvfb-run --auto-servernum {PYTEST}"
    return f"{WARNINGS} {PYTEST}"


def _key(name: str) -> str:
    """Remove colors and messages, as the publisher's reader of results does."""
    return name.replace("\x1b[0m", "").replace("\x1b[1m", "").split(" - ")[0]


def _tests(row: Row) -> bytes:
    content = row.mapping("execution_result_content")
    names, codes = content.get("test_file_names"), content.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or not names:
        fix = "it needs `test_file_names` and `test_file_codes`, the hidden tests"
        raise row.lacks("execution_result_content", fix)
    if len(names) != len(codes) or not all(isinstance(code, str) for code in codes):
        fix = "`test_file_codes` must have one text for each of `test_file_names`"
        raise row.wrong("execution_result_content", fix)
    files = zip(names, codes, strict=True)
    return b"".join(_test_file(row, name, code) for name, code in files)


def _test_file(row: Row, name: Any, code: str) -> bytes:
    if not is_inside(name):
        raise row.wrong("execution_result_content", f"{name!r} is not a file name below {TESTS}")
    return added_file(f"{TESTS}/{name}", code.encode("utf-8", "surrogateescape"))


def _gold(row: Row) -> bytes:
    """The fix without its tests, made from the file contents before and after it."""
    try:
        changes = json.loads(row.text("parsed_commit_content", "add the fix"))["file_diffs"]
        files = [
            (change["header"]["file"]["path"], change["header"].get("misc_line") or "", change)
            for change in changes
            if not change.get("is_binary_file")
        ]
        before = {
            path: change["old_file_content"]
            for path, note, change in files
            if not _is_test(path) and not note.startswith("new file")
        }
        after = {
            path: change["new_file_content"]
            for path, note, change in files
            if not _is_test(path) and not note.startswith("deleted file")
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"its `file_diffs` do not have the publisher's form ({error!r})"
        raise row.wrong("parsed_commit_content", problem) from error
    if outside := [path for path in {*before, *after} if not is_inside(path)]:
        raise row.wrong("parsed_commit_content", f"{outside[0]!r} is outside the repository")
    return difference(before, after)


def _is_test(path: str) -> bool:
    """Whether a path is a test, by the publisher's rule."""
    *folders, name = path.split("/")
    among = {"tests", "Tests", "test", "Test"} & {*folders, name}
    return name.startswith("test_") or path.endswith("_test.py") or bool(among)
