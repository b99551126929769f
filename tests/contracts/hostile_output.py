"""Every reader of bytes that come out of a sandbox, and bytes made to cost it as much as possible.

A new reader gets a line in `readers()`. `test_every_reader.py` tests all of them.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st

from perdure.agents.base import Agent, Evidence
from perdure.errors import InstanceError
from perdure.graders.artifact_transfer import outside_artifacts
from perdure.graders.diff import diff_capture, git_diff_parser
from perdure.graders.diff.git_diff_parser import MalformedDiff
from perdure.graders.diff.patch_filter import filter_patch
from perdure.graders.forged_results import instrument_command
from perdure.graders.gold_and_base_check import parse_passed_tests
from perdure.graders.hidden_test_run import TestRun
from perdure.graders.protocols import status_map, test_lists
from perdure.graders.protocols.reward_file import parse_reward_file
from perdure.graders.protocols.test_lists import SuiteRun
from perdure.graders.reports import junit_statuses
from perdure.graders.reports.junit_statuses import UnusableJunit
from perdure.graders.reports.log_parsers import LogParser
from perdure.graders.twins.failure_locations import Place, behaviours
from perdure.graders.verdict_rules import last_line
from perdure.limited_process import Unparsable
from perdure.rollouts import agent_output
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.testing.grader_contract import tiny_instance
from perdure.types import AgentEnd
from perdure.variant_registry import AGENTS, load

Reader = Callable[[bytes], object]

_EXITED = ExecStatus(ExecState.EXITED, 1)
_INSTANCE = tiny_instance(pass_to_pass=("t[a", *(f"tests/test_a.py::test_{n}" for n in range(50))))
_PLACES = [Place("a/x", "test_a", 1, 9), Place("a/x", "test_a__t1", 11, 19)]
REFUSALS = (MalformedDiff, UnusableJunit, InstanceError, Unparsable)
"""Errors that readers raise on purpose, for the caller to handle."""


def readers() -> dict[str, Reader]:
    """Name -> reader. Agents come from their own table, so none can be missing.

    swebench's log parsers are left out: they are not linear, and only process limits end them.
    """
    found: dict[str, Reader] = {
        "diff": git_diff_parser.parse,
        "diff for the filter": lambda data: filter_patch(data, _INSTANCE),
        "diff for the capture": diff_capture._without_gitlinks,
        "record of the capture": lambda data: diff_capture._read_record(data, "name"),
        "junit": junit_statuses.parse_junit,
        "log": LogParser().statuses,
        "verdict by log and junit": _judged,
        "calibration by log and junit": _calibrated,
        "failures of twins": lambda data: behaviours(_suite(data), _PLACES),
        "verdict by a map of statuses": lambda data: status_map.judge(
            _suite(data), {"test_add": "PASSED", "t[a": "FAILED"}
        ),
        "reward file": parse_reward_file,
        "diff next to artifacts": lambda data: outside_artifacts(data, "/testbed", ["/testbed/b"]),
        "last line of the tests": lambda data: last_line(TestRun(_EXITED, data)),
        "last words of git": lambda data: TestRun(_EXITED, data).refusal_text,
        "last line of the agent": lambda data: agent_output.detail(
            AgentEnd.CRASHED, _evidence(data)
        ),
    }
    for name in AGENTS:
        found[f"end of {name}"] = partial(_classified, load("agent", AGENTS, name)())
    return found


def _evidence(data: bytes, agent: Agent | None = None) -> Evidence:
    files = dict.fromkeys(agent.artifacts if agent else (), data)
    return Evidence(_EXITED, data, data, files, turns=1)


def _classified(agent: Agent, data: bytes) -> AgentEnd:
    return agent.classify(_evidence(data, agent))


def _suite(data: bytes) -> SuiteRun:
    _, canary = instrument_command(_INSTANCE.grading, "/tmp/x")
    return SuiteRun(TestRun(_EXITED, data, data), canary, writes_junit=True)


def _judged(data: bytes) -> object:
    return test_lists.judge(_suite(data), _INSTANCE.grading)


def _calibrated(data: bytes) -> object:
    return parse_passed_tests(_suite(data), "x")


PIECES = [
    b"\n", b"\n\n", b" ", b"\t", b"\r", b"\0", b"\xff", b"\xc3\xa9", b"a", b"0", b"_", b"::", b"a::", b"x b/", b" b/", b"b/",
    b"PASSED", b"FAILED ", b"PASSED a\n", b" PASSED", b"[ 5%]", b" [", b"[1] ", b"] - ", b"SKIPPED [1] ", b"\x1b[", b"\x1b[32m",
    b" ... ", b" ... ok\n", b"ok\n", b"FAIL: a\n", b" ... Testing against Django installed in ", b" silenced).\nok\n",
    b" ... Internal Server Error: /", b" ... System check identified no issues (0 silenced)\nok\n", b"test_a ok\n", b"_ ", b" _", b".py:",
    b"diff --git a/x b/x\n", b'diff --git "a/', b'"', b"\\", b"\\303", b"new file mode 120000\n", b"index 1234567..1234567\n", b"--- a/x\n", b"+++ b/x\n",
    b"@@ -1 +1 @@\n", b"@@ -1,999999999999 +1 @@\n", b"-a\n", b"+a\n", b"+", b"GIT binary patch\n", b"literal 1\n", b"IcmZPo000310RR91\n",
    b"<?xml version='1.0' encoding='utf-8'?>", b"<a>", b"</a>", b"<testcase classname='a' name='t'>", b"<testcase/>", b"<error/>", b"<!--", b"-->", b"<![CDATA[", b"&lt;", b" a='1'", b"<a ",
    b"[", b"]", b"{", b"}", b'{"type":"result"}\n', b'{"a":', b'"a",', b"1,", b"1e9,", b"-", b"9", b'{"info":{"exit_status":', b'{"messages":[',
]  # fmt: skip
"""Parts of the formats. Costly input repeats a few of them."""

SHAPES = st.tuples(
    st.lists(st.sampled_from(PIECES), max_size=3).map(b"".join),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join),
    st.lists(st.sampled_from(PIECES), max_size=2).map(b"".join),
)
"""A beginning, what is repeated, an end."""


def grown(shape: tuple[bytes, bytes, bytes], size: int) -> bytes:
    """About `size` bytes of a shape."""
    head, body, tail = shape
    return head + body * (size // len(body) + 1) + tail


def cpu_of(read: Reader, data: bytes) -> float:
    """Seconds of CPU time of one reading."""
    started = time.process_time()
    tried(read, data)
    return time.process_time() - started


def tried(read: Reader, data: bytes) -> Any:
    """The result, or the refusal."""
    try:
        return read(data)
    except REFUSALS as refusal:
        return refusal
