"""SWE-bench rows, schemas 4.x and 5.x, and rows whose base tree is a released sdist.

Other formats use its functions for a tree's source and environment.
"""

import re

from pydantic import ValidationError

from perdure.instances.rows import published_scripts
from perdure.instances.rows.formats import swebench_version_specs
from perdure.instances.rows.image_rules import Rule, image_of
from perdure.instances.rows.row_fields import Row
from perdure.types import Environment, Grading, Instance, Source, SourceKind

NEEDED_BY_KIND = {
    SourceKind.PYPI_SDIST: "requirement",
    SourceKind.BLOB: "key",
    SourceKind.DIRECTORY: "path",
    SourceKind.GIT: "url",
}
PATCH_FIX = "add the reference solution, as a unified diff"


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    if swebench_version_specs.is_schema_4(row) and not row.has("eval_cmd"):
        row = Row(row.number, {**row.fields, **swebench_version_specs.fields_of(row)})
    return Instance(
        instance_id=row.text("instance_id", "add a unique name, such as owner__repo-1"),
        dataset=dataset,
        data_source=row.optional_text("data_source", "swebench"),
        repo=row.optional_text("repo"),
        base_commit=row.optional_text("base_commit") or None,
        problem_statement=row.text("problem_statement", "add the text that the agent is given"),
        source=source_of(row, image_of),
        environment=environment_of(row, image_of),
        grading=eval_cmd_grading(row) if row.has("eval_cmd") else lists_grading(row),
        gold_patch=row.patch("patch", None if row.has("artifacts") else PATCH_FIX),
        gold_script={"solve.sh": row.optional_text("solution").encode()}
        if row.has("solution")
        else {},
        artifacts=dict.fromkeys(artifact_paths(row), ()),
        created_at=row.optional_text("created_at") or None,
        metadata=row.kept("version", "difficulty", "environment_setup_commit"),
    )


def source_of(row: Row, image_of: Rule) -> Source:
    """The row's own `source`; without it, the tree in its image."""
    given = row.mapping("source")
    if not given:
        if not image_of(row):
            raise row.lacks("source", "say where the base tree comes from, or give an `image`")
        return Source(kind=SourceKind.IMAGE)
    try:
        source = Source.model_validate(given)
    except ValidationError as error:
        raise row.invalid(error, "source") from error
    needed = NEEDED_BY_KIND.get(source.kind)
    if needed and not getattr(source, needed):
        raise row.lacks(
            f"source.{needed}", f"add it; a source of kind {source.kind.value} needs it"
        )
    if source.requirement and "==" not in source.requirement:
        pinned = f"pin {source.requirement!r}: write name==version"
        raise row.wrong("source.requirement", pinned)
    return source


def artifact_paths(row: Row) -> tuple[str, ...]:
    """Files and folders that the agent makes, in addition to or instead of a diff."""
    paths = row.lines("artifacts")
    for path in paths:
        if not is_artifact_path(path):
            raise row.wrong("artifacts", f"write absolute paths below /, not {path!r}")
    return paths


def is_artifact_path(path: str) -> bool:
    return path.startswith("/") and bool(path.strip("/")) and ".." not in path.split("/")


def environment_of(row: Row, image_of: Rule) -> Environment:
    """The environment of the tree; it names an image only if the tree comes from that image."""
    python, workdir = row.optional_text("python", "3.11"), row.optional_text("workdir", "/testbed")
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", python):
        raise row.wrong("python", f"write a version such as 3.11, not {python!r}")
    if not workdir.startswith("/"):
        raise row.wrong("workdir", f"write an absolute path, not {workdir!r}")
    if any("files" in one for one in row.mapping("sidecars").values() if isinstance(one, dict)):
        raise row.wrong("sidecars", "give files of this host in an image")
    fields = {
        "image": None if row.has("source") else image_of(row),
        "python": python,
        "install": row.lines("install"),
        "env": {key: str(value) for key, value in row.mapping("env").items()},
        "workdir": workdir,
        "sidecars": row.mapping("sidecars"),
    }
    try:
        return Environment.model_validate(fields)
    except ValidationError as error:
        raise row.invalid(error) from error


def lists_grading(row: Row) -> Grading:
    """Grade by FAIL_TO_PASS and PASS_TO_PASS, over one test command."""
    fields = {
        "test_patch": row.patch("test_patch", "add the diff that adds the hidden tests"),
        "test_cmd": test_command(row),
        "log_parser": row.optional_text("log_parser", "pytest"),
        "eval_type": row.optional_text("eval_type", "pass_and_fail"),
        "fail_to_pass": row.strings("FAIL_TO_PASS"),
        "pass_to_pass": row.strings("PASS_TO_PASS"),
    }
    if not fields["fail_to_pass"]:
        raise row.lacks("FAIL_TO_PASS", "list the tests that the fix makes pass")
    try:
        return Grading.model_validate(fields)
    except ValidationError as error:
        raise row.invalid(error) from error


def eval_cmd_grading(row: Row) -> Grading:
    """Grade by one command's exit code."""
    return Grading(
        protocol="eval_cmd",
        eval_cmd=row.text("eval_cmd", "add the command whose exit code 0 means solved"),
        test_patch=row.patch("test_patch"),
        pre_commands=row.lines("pre_commands"),
    )


def test_command(row: Row) -> str:
    """`test_cmd`, or the commands before and between the markers of a 5.x `eval_script`."""
    if row.has("test_cmd"):
        return row.text("test_cmd", "")
    script = row.optional_text("eval_script")
    if not script:
        raise row.lacks(
            "test_cmd",
            "add the command that runs the tests, or `eval_script` from the 5.x rows of the dataset",
        )
    parts = published_scripts.marked(script)
    if parts is None:
        raise row.wrong(
            "eval_script",
            f"it has no {published_scripts.START!r} and {published_scripts.END!r} markers; give `test_cmd`",
        )
    return published_scripts.command(*parts)
