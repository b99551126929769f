"""Parsers of logs: Perdure's own, and swebench's 57."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.errors import InstanceError, MissingDependency
from perdure.graders.forged_results import instrument_command
from perdure.graders.hidden_test_run import TestRun
from perdure.graders.protocols.test_lists import SuiteRun, judge
from perdure.graders.reports.junit_statuses import parse_junit
from perdure.graders.reports.log_parsers import LogParser, _published, parser_of, published_names
from perdure.graders.verdict_rules import status_of
from perdure.limited_process import Unparsable, read
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.testing.grader_contract import tiny_instance
from perdure.types import Grading, Outcome, TestStatus

PASSED, FAILED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR
SKIPPED, XFAIL = TestStatus.SKIPPED, TestStatus.XFAIL

PYTEST_LOG = b"""
=========================== short test summary info ============================
\x1b[32mPASSED\x1b[0m tests/a.py::test_one
PASSED tests/a.py::test_two[a - b c]
FAILED tests/a.py::test_three - AssertionError: PASSED tests/a.py::test_x
FAILED tests/a.py::test_four[x - y] - assert 1 == 2
XFAIL tests/a.py::test_five - known
SKIPPED [2] tests/a.py:12: no network
ERROR tests/a.py::test_one - teardown failed
PASSED tests/a.py::test_six[/home/me/deep/file.txt]
caf\xe9 PASSED
2 failed, 3 passed in 0.01s
"""


def test_reads_a_pytest_summary() -> None:
    """Ids keep spaces and dashes in brackets and lose messages; the worse status counts."""
    assert LogParser().statuses(PYTEST_LOG) == {
        "tests/a.py::test_one": ERROR,
        "tests/a.py::test_two[a - b c]": PASSED,
        "tests/a.py::test_three": FAILED,
        "tests/a.py::test_four[x - y]": FAILED,
        "tests/a.py::test_five": XFAIL,
        "tests/a.py::test_six[/home/me/deep/file.txt]": PASSED,
    }


SUBTESTS = """\
def test_a(subtests):
    for i in range(3):
        with subtests.test(msg="case [a) .py:: b", i=i):
            assert i != 1


class T(unittest.TestCase):
    def test_b(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 2)

    def test_c(self):
        with self.subTest(i=1):
            pass
"""


@pytest.mark.parametrize("parser", ["pytest", "parse_log_pytest", "parse_log_pytest_v2"])
def test_a_failed_subtest_is_a_failure_and_no_forgery(parser: str, tmp_path: Path) -> None:
    """pytest's log says PASSED for the test of unittest, and its junit file says failed."""
    grading = Grading(
        test_cmd="pytest -rA tests/test_subtests.py",
        log_parser=parser,
        fail_to_pass=("tests/test_subtests.py::T::test_b", "tests/test_subtests.py::T::test_c"),
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_subtests.py").write_text(f"import unittest\n\n\n{SUBTESTS}")
    command, canary = instrument_command(grading, str(tmp_path))
    for path, content in command.extra_files.items():
        (tmp_path / path).write_bytes(content)
    shell = command.shell.replace("pytest", f"{sys.executable} -m pytest -p no:cacheprovider", 1)
    ran = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, check=False)
    junit = Path(command.junit_path).read_bytes()
    run = TestRun(ExecStatus(ExecState.EXITED, ran.returncode), ran.stdout, junit)
    verdict = judge(SuiteRun(run, canary, True, LogParser(parser)), grading)

    assert b"PASSED tests/test_subtests.py::T::test_b" in ran.stdout
    assert (verdict.outcome, verdict.rewards.f2p_fraction) == (Outcome.UNRESOLVED, 0.5)


SAMPLES: dict[str, tuple[bytes, dict[str, TestStatus]]] = {
    "parse_log_flask": (
        b"PASSED a.py::t[x y]\nSKIPPED [1] a.py:3: no\nERROR: pip\n",
        {"a.py::t[x": PASSED},
    ),
    "parse_log_requests": (b"PASSED a.py::t[/home/me/b.txt]\n", {"a.py::t[/b.txt]": PASSED}),
    "parse_log_sphinx": (b"\x1b[32mPASSED\x1b[0m a.py::t[x y]\n", {"a.py::t[x y]": PASSED}),
    "parse_log_seaborn": (b"FAILED a.py::t - no\n", {"a.py::t": FAILED}),
    "parse_log_matplotlib": (b"PASSED a.py::t[MouseButton.LEFT]\n", {"a.py::t[1]": PASSED}),
    "parse_log_sympy": (b"test_a ok\ntest_b F\n", {"test_a": PASSED, "test_b": FAILED}),
    "parse_log_django": (b"test_a (app.C) ... ok\n", {"test_a (app.C)": PASSED}),
    "parse_log_gotest": (b"--- PASS: TestA (0.00s)\n", {"TestA": PASSED}),
    "parse_log_cargo": (b"test a::b ... ok\n", {"a::b": PASSED}),
    "parse_log_jest": ("✓ adds (3 ms)\n✕ fails\n".encode(), {"adds": PASSED, "fails": FAILED}),
    "parse_log_maven": (b"+ mvnd -Dtest=A#b\n[INFO] BUILD SUCCESS\n", {"A#b": PASSED}),
    "parse_log_gradle_custom": (b"a.B > c PASSED\n", {"a.B > c": PASSED}),
    "parse_log_minitest": (b"A#test_b. = 0.00 s = .\n", {"A#test_b": PASSED}),
    "parse_log_redis": (b"[ok]: a (1 ms)\n[skip]: b\n", {"a": PASSED, "b": SKIPPED}),
    "parse_log_jq": (b"PASS: tests/a\nFAIL: tests/b\n", {"tests/a": PASSED, "tests/b": FAILED}),
    "parse_log_googletest": (b"[       OK ] A.b (0 ms)\n", {"A.b": PASSED}),
    "parse_log_eslint": (b"  1) a\n   b:\n\n   AssertionError\n", {"a b:": FAILED}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_reads_with_swebenchs_own_parser(name: str) -> None:
    """A published parser's name gives swebench's statuses for the same log."""
    log, expected = SAMPLES[name]

    assert LogParser(name).statuses(log) == expected


def test_knows_all_of_swebenchs_parsers() -> None:
    """Every parser of swebench 5 has its name here, and needs only the package itself."""
    assert len(published_names()) == 57


def test_a_parser_that_reads_by_instance_gets_its_id() -> None:
    """jekyll's instances have different runners; swebench distinguishes them by id."""
    instance = tiny_instance(log_parser="parse_log_jekyll")
    minitest = instance.model_copy(update={"instance_id": "jekyll__jekyll-9141"})

    assert parser_of(minitest).statuses(b"A#test_b. = 0.00 s = .\n") == {"A#test_b": PASSED}


def test_a_parser_that_reads_by_version_gets_it() -> None:
    """Later versions of Lighthouse print mocha's marks, which the earlier parser lacks."""
    instance = tiny_instance(log_parser="parse_log_lighthouse")
    later = instance.model_copy(update={"metadata": {"version": "10.0"}})
    log = "running 2 test files\n  suite\n    ✔ works\n1 passing\n".encode()

    assert list(parser_of(later).statuses(log).values()) == [PASSED]


def test_swebench_is_imported_without_its_dependencies() -> None:
    """Using a parser imports neither docker nor modal nor datasets."""
    program = (
        "import json, sys\nfrom perdure.graders.reports.log_parsers import LogParser\n"
        "LogParser('parse_log_jest').statuses(b'')\n"
        "print(json.dumps(sorted(set(sys.modules) & {'docker', 'modal', 'datasets', 'pandas'})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("there", [None, "4.1.0"])
def test_without_swebench_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, there: str | None
) -> None:
    """A published parser needs swebench 5; a row that names no parser does not."""

    def version(name: str) -> str:
        if there is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return there

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "swebench.harness.log_parsers", None)
    _published.cache_clear()
    with pytest.raises(
        MissingDependency, match=r"pip install .*--no-deps swebench==5\.0\.2 unidiff"
    ):
        parser_of(tiny_instance(log_parser="parse_log_flask"))

    assert parser_of(tiny_instance()).statuses(b"PASSED a::b\n") == {"a::b": PASSED}


def test_unknown_parser_lists_the_known() -> None:
    """A row with an unknown parser is refused, and the error lists the known ones."""
    with pytest.raises(InstanceError, match=r"parse_log_mocha.*pytest.*parse_log_ant.*eval_cmd"):
        parser_of(tiny_instance(log_parser="parse_log_mocha"))


@pytest.mark.parametrize("name", ["parse_log_flask", "parse_log_requests", "parse_log_sphinx"])
def test_junit_has_the_ids_of_the_log(name: str) -> None:
    """junit finds ids that a parser cut at a space or a path, with their worst result."""
    parser = LogParser(name)
    case = '<testcase classname="tests.a" name="{}">{}</testcase>'
    cases = [
        case.format("t[x y]", ""),
        case.format("t[x z]", "<failure/>"),
        case.format("t[/b/c]", ""),
    ]
    junit = parse_junit(
        f'<?xml version="1.0" encoding="utf-8"?><testsuite>{"".join(cases)}</testsuite>'.encode(),
        parser.rename,
    )
    log = b"PASSED tests/a.py::t[x y]\nPASSED tests/a.py::t[/b/c]\n"
    found = [junit.get(test) for test in parser.statuses(log)]

    assert found == [PASSED if name == "parse_log_sphinx" else FAILED, PASSED]


def suite_of(log: bytes, code: int, parser: str) -> SuiteRun:
    return SuiteRun(
        TestRun(ExecStatus(ExecState.EXITED, code), log), None, False, LogParser(parser)
    )


@pytest.mark.parametrize(
    ("log", "code", "outcome"),
    [
        (b"", 0, Outcome.UNRESOLVED),
        (b"Executed 0 of 0\n", 0, Outcome.UNRESOLVED),
        (b"12 specs, 0 failures\n", 0, Outcome.RESOLVED),
        (b"1) other\n12 specs, 1 failure\n", 1, Outcome.RESOLVED),
        (b"1) works\n12 specs, 1 failure\n", 1, Outcome.UNRESOLVED),
    ],
    ids=["silent", "none-ran", "clean", "another-fails", "it-fails"],
)
def test_fail_only_needs_a_sign_that_the_suite_ran(log: bytes, code: int, outcome: Outcome) -> None:
    """If only failures are printed, absent tests passed only if the suite says that it ran."""
    grading = Grading(eval_type="fail_only", log_parser="parse_log_marked", fail_to_pass=("works",))

    assert judge(suite_of(log, code, "parse_log_marked"), grading).outcome is outcome


def test_an_exit_code_that_no_failure_explains_is_not_believed() -> None:
    """swebench 5's rule for runs without a canary: printed passes, then exit code 1."""
    grading = Grading(log_parser="parse_log_gotest", fail_to_pass=("TestA",))
    judgement = judge(suite_of(b"--- PASS: TestA (0.00s)\n", 1, "parse_log_gotest"), grading)

    assert judgement.outcome is Outcome.UNRESOLVED
    assert judgement.reason == "exit code 1, although no test failed"


def test_a_listed_test_that_the_log_lacks_is_explained() -> None:
    """The reason has the names that the log does have, and its last line."""
    grading = Grading(log_parser="parse_log_gotest", fail_to_pass=("TestA",))
    log = b"--- FAIL: - TestA (0.00s)\nFAIL\ttoy\t0.1s\n"
    judgement = judge(suite_of(log, 1, "parse_log_gotest"), grading)

    assert judgement.outcome is Outcome.UNRESOLVED
    assert judgement.reason == (
        "FAIL_TO_PASS TestA MISSING; the log has 1 test, such as '- TestA'; its last line: "
        "FAIL\ttoy\t0.1s"
    )


def test_a_reason_of_hostile_names_is_short() -> None:
    """Code under test writes the names and the last line."""
    grading = Grading(log_parser="parse_log_gotest", fail_to_pass=("TestA",))
    log = b"".join(b"--- FAIL: %d%s (0.00s)\n" % (n, b"x" * 999) for n in range(99))
    log += b"FAIL " + b"y" * 9999
    judgement = judge(suite_of(log, 1, "parse_log_gotest"), grading)

    assert "99 tests" in judgement.reason
    assert len(judgement.reason) < 600


def test_other_runners_run_as_they_are() -> None:
    """If Perdure cannot add a test to a runner, the row's command is unchanged."""
    grading = Grading(test_cmd="go test -v ./...", log_parser="parse_log_gotest")
    guarded, canary = instrument_command(grading, "/tmp/x")

    assert (guarded.shell, guarded.junit_path, canary) == ("go test -v ./...", "", None)


def test_a_published_id_that_was_cut_is_found() -> None:
    """Ids of Verified that end at a space match the ids that swebench's parser cut there."""
    found = LogParser("parse_log_astropy").statuses(b"PASSED a.py::t[log(photon / s)]\n")

    assert status_of("a.py::t[log(photon", found) is PASSED


async def test_a_log_that_breaks_a_parser_is_a_verdict() -> None:
    """If a parser raises on a log, the error is Unparsable with the parser's name."""
    parser = LogParser("parse_log_prismjs")
    command = b"./node_modules/.bin/mocha tests/run.js --reporter json"
    with pytest.raises(Unparsable, match="parse_log_prismjs: KeyError"):
        await read(parser.statuses, command + b"\n{")
