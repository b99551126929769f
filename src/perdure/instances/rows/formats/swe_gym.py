"""SWE-Gym rows: SWE-bench's schema with lowercase ids and its own images.

Some derived sets contain the scripts. The published set names a repository and a version, as
SWE-bench's schema 4 does.

The publisher's fork of swebench 2 also counts a skipped FAIL_TO_PASS test as passed; Perdure does not.
"""

import re

from perdure.instances.rows import image_rules, published_scripts
from perdure.instances.rows.formats import swebench, swebench_version_specs
from perdure.instances.rows.row_fields import Row
from perdure.types import Instance

TEST_CMDS = {
    "bokeh/bokeh": "pytest -rA -n0",
    "conan-io/conan": "pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA  --color=no",
    "facebookresearch/hydra": "pytest -rA --tb=long",
    "getmoto/moto": "pytest -n0 -rA",
    "iterative/dvc": "pytest -rA",
    "modin-project/modin": "pytest -n0 -rA",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "project-monai/monai": "pytest -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "python/mypy": "pytest -n0 -rA",
}
"""Repository in lowercase -> the test command in the publisher's fork."""
PREPARES = {
    "conan-io/conan": "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)",
    "pandas-dev/pandas": "python -m pip install -ve . --no-build-isolation -Ceditable-verbose=true",
}
"""Steps before the tests: conan is not installed, pandas must compile changed files."""
PARSERS = {"pydantic/pydantic": "parse_log_pytest_v2"}
"""pydantic's pytest plugin replaces the summary, so only the lines of `-vv` have results."""


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    parser = row.optional_text("log_parser") or PARSERS.get(_repository(row))
    fields = {
        **row.fields,
        "test_cmd": row.optional_text("test_cmd") or _command(row),
        "data_source": row.optional_text("data_source", "swe-gym"),
        "image": row.optional_text("image") or image_rules.swe_gym(row),
        **({"log_parser": parser} if parser else {}),
    }
    return swebench.to_instance(Row(row.number, fields), dataset)


def is_published(row: Row) -> bool:
    """Whether the row is of the published set, which no field marks."""
    ready = ("eval_script", "test_cmd", "eval_cmd", "source")
    return _repository(row) in TEST_CMDS and not any(map(row.has, ready))


def _repository(row: Row) -> str:
    return row.optional_text("repo").lower()


def _command(row: Row) -> str:
    """The commands of both scripts, without the steps that the grader does itself."""
    if not row.has("test_script") and _repository(row) in TEST_CMDS:
        return _published_command(row)
    script = row.text("test_script", "add it, or the command that runs the tests as `test_cmd`")
    command = published_scripts.command(row.optional_text("setup_script"), script)
    if not any(
        not published_scripts.ENTERS.match(line)
        for line in published_scripts.command("", script).splitlines()
    ):
        raise row.wrong("test_script", "it runs no test command; give `test_cmd`")
    return command


def _published_command(row: Row) -> str:
    """The publisher's command for the test patch's files; for mypy, for its `[case NAME]`s."""
    repository = _repository(row)
    tests = [TEST_CMDS[repository], *swebench_version_specs.test_files(row)]
    if repository == "python/mypy":
        if re.fullmatch(r"1\.(7|8|9|1\d)", row.optional_text("version")):
            tests[0] = "pytest -rA"
        patch = row.patch("test_patch").decode("utf-8", "surrogateescape")
        if cases := re.findall(r"\[case ([^\]]+)\]", patch):
            tests[1:] = [f'-k "{" or ".join(cases)}"']
    before = "\n".join([*swebench_version_specs.ENTER, PREPARES.get(repository, "")])
    return published_scripts.command(before, " ".join(tests))
