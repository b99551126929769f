"""Without a canary, Perdure's verdict equals the one that swebench 5 gives for the same log.

These tests omit one difference: with `fail_only` Perdure also counts ERROR, which no published parser of
such rows prints.
"""

import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from perdure.graders.hidden_test_run import TestRun
from perdure.graders.protocols.test_lists import SuiteRun, judge
from perdure.graders.reports.log_parsers import LogParser, published_names
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.types import Grading, Outcome

LINES = {
    "parse_log_gotest": ["--- PASS: a (0.00s)", "--- FAIL: a (0.00s)", "--- SKIP: a (0.00s)", "--- PASS: b (0.00s)", "--- FAIL: b (0.00s)", "--- SKIP: b (0.00s)", "ok", "# tests 0"],
    "parse_log_marked": ["1) a", "2) b", "3) c", "2 specs, 1 failure", "0 specs, 0 failures", "Error: x"],
    "parse_log_jest": ["✓ a", "✕ a", "○ a", "✓ b (3 ms)", "✕ b", "○ b", "Tests:  2 passed", "PASS x.js"],
    "parse_log_flask": ["PASSED a", "FAILED a - no", "SKIPPED a", "XFAIL a", "ERROR a", "PASSED b", "FAILED b", "SKIPPED b", "XFAIL b", "ERROR: pip"],
}  # fmt: skip


def swebenchs(parser: str, grading: Grading, log: str, code: int) -> bool:
    """The `resolved` of swebench's report on the same log, between its own markers."""
    assert parser in published_names()  # makes its package importable without containers
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    lists = list(grading.fail_to_pass), list(grading.pass_to_pass)
    spec = TestSpec("i-1", "", [], "", "", *lists, parser, grading.eval_type)
    prediction = {"instance_id": "i-1", "model_name_or_path": "m", "model_patch": "x"}
    with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
        file.write(
            f">>>>> Start Test Output\n{log}\n>>>>> End Test Output\n>>>>> Test Exit Code: {code}\n"
        )
        file.flush()
        report = get_eval_report(spec, prediction, str(Path(file.name)), True)
    return bool(report["i-1"]["resolved"])


@settings(max_examples=200, deadline=None)
@example(parser="parse_log_marked", lines=[], code=0, fail_only=True, p2p=True)
@given(
    parser=st.sampled_from(sorted(LINES)),
    lines=st.lists(st.integers(0, 20), max_size=6),
    code=st.sampled_from([0, 1]),
    fail_only=st.booleans(),
    p2p=st.booleans(),
)
def test_verdict_is_swebenchs(
    parser: str, lines: list[int], code: int, fail_only: bool, p2p: bool
) -> None:
    """For any log and exit code, a row that is resolved here is resolved there."""
    known = LINES[parser]
    log = "\n".join(known[line % len(known)] for line in lines)
    grading = Grading(
        log_parser=parser,
        eval_type="fail_only" if fail_only and parser != "parse_log_flask" else "pass_and_fail",
        test_patch=b"xfail",  # otherwise Perdure attributes an xfail to the code under test
        fail_to_pass=("a",),
        pass_to_pass=("b",) if p2p else (),
    )
    run = TestRun(ExecStatus(ExecState.EXITED, code), log.encode())
    judgement = judge(SuiteRun(run, None, False, LogParser(parser)), grading)

    assert (judgement.outcome is Outcome.RESOLVED) == swebenchs(parser, grading, log, code)
