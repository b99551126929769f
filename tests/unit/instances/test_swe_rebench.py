"""SWE-rebench rows: a real one of version 2, and made ones of version 1 as in the publisher's fork."""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import InstanceError
from perdure.graders.protocols.row_parser import parse_output
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.instances.rows.row_conversion import to_instance
from perdure.limited_process import read
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import TestStatus
from tests.checkout_paths import ROOT

REAL = ROOT.parent / "shared" / "data" / "tasks" / "swe_rebench_row.json"
PATCH = "diff --git a/tests/t.py b/tests/t.py\n--- a/tests/t.py\n+++ b/tests/t.py\n@@ -1 +1 @@\n-a\n+b\n"
VERSION_1: dict[str, Any] = {
    "instance_id": "owner__name-12",
    "repo": "owner/name",
    "version": "0.1",
    "created_at": "2024-01-02 03:04:05",
    "problem_statement": "It breaks.",
    "patch": PATCH,
    "test_patch": PATCH,
    "FAIL_TO_PASS": ["tests/t.py::a"],
    "PASS_TO_PASS": [],
    "install_config": {
        "env_vars": {"A": "b c"},
        "install": "pip install -e .[dev]",
        "log_parser": "parse_log_pytest",
        "packages": "requirements.txt",
        "pip_packages": ["pytest"],
        "python": "3.9",
        "test_cmd": "pytest --no-header -rA --tb=line",
    },
}


@pytest.mark.skipif(not REAL.is_file(), reason="the real row is not here")
def test_a_real_row_of_version_2() -> None:
    """Its image, folder, command and parser; the lists grader accepts it."""
    instance = to_instance(json.loads(REAL.read_text())[0], "d", 1)
    SwebenchGrader().validate(instance)

    assert instance.environment.image == "docker.io/swerebenchv2/unidata-netcdf-c:1925-ad6bff3"
    assert instance.environment.workdir == "/netcdf-c"
    assert instance.grading.test_cmd == "set -uxo pipefail\nmake check"
    assert instance.grading.log_parser == "parse_log_jq"
    assert len(instance.grading.fail_to_pass) == 12


def test_version_1_runs_as_the_publishers_fork_does() -> None:
    """The environment, the variables, the install line, then the test files as arguments."""
    instance = to_instance(VERSION_1, "d", 1)
    SwebenchGrader().validate(instance)

    assert (instance.grading.test_cmd or "").splitlines()[2:] == [
        "source /opt/miniconda3/bin/activate",
        "conda activate testbed",
        "cd /testbed",
        "export A='b c'",
        "pip install -e .[dev]",
        "pytest --no-header -rA --tb=line tests/t.py",
    ]
    assert instance.environment.image == (
        "docker.io/swerebench/sweb.eval.x86_64.owner_1776_name-12:latest"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"test_cmd": ""}, "lacks `install_config.test_cmd`"),
        ({"log_parser": None}, "lacks `log_parser`"),
        ({"log_parsers": ["a", "b"]}, "`install_config.log_parsers`"),
        ({"services": ["redis"]}, "bad `install_config`: `services` is not a known field"),
    ],
)
def test_what_perdure_would_ignore_is_refused(changes: dict[str, Any], said: str) -> None:
    """The error names a missing field, and a field that Perdure does not use."""
    row = {**VERSION_1, "install_config": {**VERSION_1["install_config"], **changes}}
    with pytest.raises(InstanceError, match=f"row 9 .*{said}"):
        to_instance(row, "d", 9)


def test_a_parser_of_its_own_is_named() -> None:
    """Version 2 has parsers that swebench lacks; such a row is refused with the known ones."""
    config = {**VERSION_1["install_config"], "log_parser": "parse_log_js_4"}
    instance = to_instance({**VERSION_1, "install_config": config}, "d", 1)
    with pytest.raises(InstanceError, match="unknown `log_parser` 'parse_log_js_4'"):
        SwebenchGrader().validate(instance)


OWN_PARSERS = """\
from __future__ import annotations

from lib.agent.swe_constants import TestStatus


def parse_log_words(log: str) -> dict[str, str]:
    found = (line.rpartition(" ") for line in log.splitlines())
    return {test: TestStatus(status).value for test, _, status in found if status.isupper()}


NAME_TO_PARSER = {"parse_log_words": parse_log_words}
"""
VERSION_2: dict[str, Any] = {
    **{name: VERSION_1[name] for name in ("instance_id", "repo", "patch", "test_patch")},
    "problem_statement": "It breaks.",
    "language": "lua",
    "image_name": "i:1",
    "FAIL_TO_PASS": ["adds [1.34 ms]"],
    "PASS_TO_PASS": ["keeps (12ms)"],
    "install_config": {"test_cmd": ["make test"], "log_parser": "parse_log_words"},
}


async def test_the_publishers_own_parsers_beside_the_rows_read_the_log(tmp_path: Path) -> None:
    """Such a parser runs confined; durations in test names, which vary, are removed."""
    if missing := BubblewrapProvider(Settings(home=tmp_path / "home")).check():
        pytest.skip("; ".join(missing))
    (tmp_path / "log_parsers.py").write_text(OWN_PARSERS)
    grading = to_instance(VERSION_2, "d", 1, tmp_path).grading
    assert grading.parser is not None

    found = await read(
        parse_output, grading.parser.program, b"adds [7 ms] PASSED\n", b"keeps (1.5 s) FAILED\n"
    )

    assert (grading.fail_to_pass, grading.pass_to_pass) == (("adds",), ("keeps",))
    assert found == {"adds": TestStatus.PASSED, "keeps": TestStatus.FAILED}
    assert grading.parser.run == "set -uxo pipefail\nmake test"


def test_a_parser_that_the_publishers_file_lacks_is_named(tmp_path: Path) -> None:
    """It would fail in every grading."""
    (tmp_path / "log_parsers.py").write_text(OWN_PARSERS.replace("parse_log_words", "parse_log_w"))
    with pytest.raises(InstanceError, match=r"log_parser.*has no 'parse_log_words'"):
        to_instance(VERSION_2, "d", 1, tmp_path)


def test_python_rows_keep_their_guard(tmp_path: Path) -> None:
    """They keep the canary, junit and twins, which the publisher's parsers do not support."""
    (tmp_path / "log_parsers.py").write_text(OWN_PARSERS)
    config = {"test_cmd": "pytest -rA tests/t.py", "log_parser": "parse_log_pytest"}
    row = {**VERSION_2, "language": "python", "install_config": config}

    assert to_instance(row, "d", 1, tmp_path).grading.protocol == "swebench"
