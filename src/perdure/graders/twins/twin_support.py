"""Which protocols can have twins or a canary test.

Twins need a protocol that gives the status of each test of a test patch. A canary test needs a
command to which Perdure can add a file.
"""

from collections.abc import Mapping
from types import MappingProxyType

from perdure.graders.diff.git_diff_parser import MalformedDiff, paths_of
from perdure.graders.reports.log_parsers import LogParser
from perdure.graders.twins.other_languages.languages import language_of
from perdure.types import Grading

POSSIBLE = frozenset(("swebench", "swepro", "multi_swe", "eval_cmd"))
_WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "reward_file": "its script writes a number, not a status per test",
        "status_map": "its hidden tests are whole files instead of a test patch",
    }
)
_NO_CANARY: Mapping[str, str] = MappingProxyType(
    {
        "eval_cmd": "its command gives one exit code",
        "reward_file": "its script decides what runs",
        "swepro": "its script decides what runs",
        "multi_swe": "its command is a script of its image",
    }
)


def why_no_canary(grading: Grading) -> str | None:
    """Why the run gets no canary test; None if it gets one."""
    if grading.protocol != "swebench":
        return _NO_CANARY.get(grading.protocol)
    if grading.canary or LogParser(grading.log_parser).runner:
        return None
    return "calibration has proven none for its test runner"


def why_no_twins(grading: Grading) -> str | None:
    """Why no test of the row can have a twin; None if calibration may find some."""
    if grading.protocol not in POSSIBLE:
        why = _WHY_NOT.get(grading.protocol, "its grader is not one of Perdure's")
        return f"rows of protocol {grading.protocol} have no twins: {why}"
    if grading.protocol == "swebench" and not grading.test_cmd:
        return "the row has no test command"
    if not grading.test_patch:
        return "the row has no test patch"
    return None if _is_known(grading.test_patch) else f"its hidden tests are not in {_KNOWN}"


_KNOWN = "Python, JavaScript, TypeScript, Go, Rust, Java or C"


def _is_known(test_patch: bytes) -> bool:
    try:
        paths = [path.decode("utf-8", "surrogateescape") for path in paths_of(test_patch)]
    except MalformedDiff:
        return True  # calibration reports the malformed diff
    return any(path.endswith(".py") or language_of(path) for path in paths)
