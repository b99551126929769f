"""SWE-smith rows: `patch` makes the bug, so its reverse is the reference solution.

The publisher's mirror has a branch for each row: the image's tree with the bug, without the files of
FAIL_TO_PASS. Here both sandboxes make that tree from the image, without network access. Before the
tests, the grader restores the files of both lists from the image.
"""

import glob
import shlex

from perdure.errors import InstanceError
from perdure.instances.rows import image_rules
from perdure.instances.rows.formats import swebench
from perdure.instances.rows.reversed_diff import Irreversible, reversed_diff
from perdure.instances.rows.row_fields import Row
from perdure.types import (
    CommittedTests,
    Environment,
    Grading,
    Instance,
    Source,
    SourceKind,
)

TEST_CMD = "pytest --disable-warnings --color=no --tb=no --verbose"
"""From `PythonProfile` in swesmith 0.0.9; its parser reads the same ids as Perdure's."""
CONDA = "source /opt/miniconda3/bin/activate && conda activate testbed"
MARK = "PERDURE_END_OF_BUG"
LONGEST_PATCH = 96 << 10
"""Limit in bytes: the patch is part of one shell argument, which Linux limits to 128 KiB."""
GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.autocrlf=false"


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    bug = row.patch("patch", "add the diff that makes the bug")
    hidden, both = _test_files(row, "FAIL_TO_PASS"), _test_files(row, "PASS_TO_PASS")
    both = sorted({*hidden, *both})
    environment = swebench.environment_of(row, _image_of)
    if environment.image is None:
        raise row.lacks("image_name", "name the image that holds the tree")
    return Instance(
        instance_id=row.text("instance_id", "add it: <owner>__<repo>.<sha8>.<kind of bug>"),
        dataset=dataset,
        data_source=row.optional_text("data_source", "swe-smith"),
        repo=row.optional_text("repo"),
        problem_statement=row.text("problem_statement", "add the text that the agent is given"),
        source=Source(kind=SourceKind.IMAGE),
        environment=_without(environment, hidden),
        grading=Grading(
            test_cmd=row.optional_text("test_cmd") or _command(both),
            fail_to_pass=row.strings("FAIL_TO_PASS"),
            pass_to_pass=row.strings("PASS_TO_PASS"),
            pre_commands=_makes_bug(row, bug),
            tests_from=CommittedTests(commit="HEAD", paths=tuple(both)),
            patch_exclude=tuple(glob.escape(path) for path in both),
        ),
        gold_patch=_gold(row, bug),
        created_at=row.optional_text("created_at") or None,
        metadata=row.kept("base_commit"),
    )


def _image_of(row: Row) -> str | None:
    """The image's full name. Rows omit the registry and the owner."""
    given = image_rules.given(row)
    return given if given and "/" in given else image_rules.swe_smith(row)


def _without(environment: Environment, hidden: list[str]) -> Environment:
    paths = tuple(f"{environment.workdir}/{path}" for path in hidden)
    return environment.model_copy(update={"remove": paths})


def _test_files(row: Row, name: str) -> list[str]:
    """The files that contain a list's tests."""
    tests = row.strings(name)
    if name == "FAIL_TO_PASS" and not tests:
        raise row.lacks(name, "list the tests that the fix makes pass")
    files = sorted({test.partition("::")[0] for test in tests})
    for file in files:
        if not file.endswith(".py") or file.startswith("/") or ".." in file.split("/"):
            raise row.wrong(
                name,
                f"{file!r} is not a Python file: Perdure supports only SWE-smith's Python rows",
            )
    return files


def _command(files: list[str]) -> str:
    return f"{CONDA} && {TEST_CMD} {shlex.join(files)}"


def _makes_bug(row: Row, bug: bytes) -> tuple[str, ...]:
    """Idempotent shell lines that commit the bug and the removal of the hidden tests."""
    try:
        text = bug.decode()
    except UnicodeDecodeError as error:
        raise row.wrong("patch", f"it is not UTF-8: {error}") from error
    if len(bug) > LONGEST_PATCH or MARK in text:
        raise row.wrong("patch", f"it has {len(bug)} bytes; the limit is {LONGEST_PATCH}")
    commit = "-c user.name=perdure -c user.email=perdure@localhost commit -qam base --no-verify"
    return (
        "bug=$(mktemp)",
        f"cat >\"$bug\" <<'{MARK}'\n{text.removesuffix(chr(10))}\n{MARK}",
        f"{GIT} update-index -q --refresh || true",
        f'{GIT} apply --reverse --check "$bug" 2>/dev/null || '
        f'{GIT} apply --index --whitespace=nowarn "$bug"',
        'rm -f "$bug"',
        f"{GIT} diff --quiet HEAD || {GIT} {commit}",
    )


def _gold(row: Row, bug: bytes) -> bytes:
    try:
        return reversed_diff(bug)
    except Irreversible as error:
        raise _not_a_bug(row, error) from error


def _not_a_bug(row: Row, error: Irreversible) -> InstanceError:
    return row.wrong("patch", f"it must be reversible, to make the reference solution: {error}")
