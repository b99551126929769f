"""Multi-SWE-bench rows: one pull request, with the results of three test stages.

The grader runs only the last stage. The row's results of the first two stages decide which tests
must pass there, and which may not fail.
"""

from collections.abc import Mapping
from typing import Any

from perdure.instances.rows import image_rules
from perdure.instances.rows.formats import swebench
from perdure.instances.rows.row_fields import Row
from perdure.types import Grading, Instance, slugify

FIXED = ("f2p_tests", "s2p_tests", "n2p_tests")
KEPT = "p2p_tests"
STAGES = ("run_result", "test_patch_result")
FIX_AND_TESTS = ("/home/fix.patch", "/home/test.patch")
"""Both diffs are in the image; its scripts apply them."""
COMMAND = """\
git() {
  case " $* " in *" apply "*" /home/fix.patch "*) ;; *) command git "$@" ;; esac
}
. /home/fix-run.sh"""
"""The publisher's command for the third stage. The grader has already applied both diffs, so this
makes the script's `git apply` of them do nothing."""


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    owner = row.text("org", "name the owner of the repository")
    name = row.text("repo", "name the repository without its owner")
    number = row.fields.get("number")
    if not isinstance(number, int):
        raise row.lacks("number", "give the number of the pull request")
    fields = row.replaced(workdir=row.optional_text("workdir", f"/home/{name}"))
    environment = swebench.environment_of(fields, image_of)
    hidden = () if row.has("source") else FIX_AND_TESTS
    base = row.mapping("base").get("sha")
    return Instance(
        instance_id=slugify(f"{owner}__{name}-{number}"),
        dataset=dataset,
        data_source=row.optional_text("data_source", "multi-swe-bench"),
        repo=f"{owner}/{name}",
        base_commit=base if isinstance(base, str) else None,
        problem_statement=_statement(row),
        source=swebench.source_of(fields, image_of),
        environment=environment.model_copy(update={"remove": hidden}),
        grading=_grading(row, owner, name),
        gold_patch=row.patch("fix_patch", "add the reference solution, as a unified diff"),
        metadata=row.kept("lang", "difficulty"),
    )


def image_of(row: Row) -> str | None:
    return image_rules.image_of(row) or image_rules.multi_swe(row)


def _statement(row: Row) -> str:
    """The issues that the pull request resolves, or its own title and body."""
    issues = row.fields.get("resolved_issues") or [row.fields]
    if not isinstance(issues, list) or not all(isinstance(issue, Mapping) for issue in issues):
        raise row.wrong("resolved_issues", "give a list of issues with `title` and `body`")
    texts = [f"{issue.get('title') or ''}\n\n{issue.get('body') or ''}".strip() for issue in issues]
    said = "\n\n".join(text for text in texts if text)
    if not said:
        raise row.lacks("resolved_issues", "add the issue that the agent is given")
    return said


def _grading(row: Row, owner: str, name: str) -> Grading:
    fixed = [test for field in FIXED for test in row.mapping(field)]
    if not fixed:
        raise row.lacks("f2p_tests", f"no test is fixed: {', '.join(FIXED)} are all empty")
    kept = list(row.mapping(KEPT))
    before, with_tests = (_stage(row, field) for field in STAGES)
    had_passed = {test for test, status in with_tests.items() if status == "PASS"}
    had_passed |= {
        test
        for test, status in before.items()
        if status == "PASS" and with_tests.get(test, "SKIP") == "SKIP"
    }
    variant = row.optional_text("number_interval")
    if tag := row.optional_text("tag"):
        variant = variant or f"{name}_{tag.replace('.', '_')}"
    return Grading(
        protocol="multi_swe",
        test_patch=row.patch("test_patch", "add the diff that adds the hidden tests"),
        test_cmd=row.optional_text("test_cmd", COMMAND),
        log_parser=f"{owner}/{variant or name}",
        fail_to_pass=tuple(fixed),
        pass_to_pass=tuple(kept),
        must_not_fail=tuple(sorted(had_passed - {*fixed, *kept})),
    )


def _stage(row: Row, field: str) -> dict[str, str]:
    """Test -> PASS, FAIL or SKIP."""
    result: dict[str, Any] = row.mapping(field)
    if not result:
        raise row.lacks(field, "add that stage's results: tests that passed then must not fail")
    names = {"passed_tests": "PASS", "failed_tests": "FAIL", "skipped_tests": "SKIP"}
    found: dict[str, str] = {}
    for part, status in names.items():
        tests = result.get(part) or []
        if not isinstance(tests, list):
            raise row.wrong(field, f"`{part}` is not a list of tests")
        found |= dict.fromkeys(map(str, tests), status)
    return found
