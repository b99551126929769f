"""Which protocols can have twins: those that give the status of each test of a test patch. Which have a
canary test: those whose command Perdure can tell to run one more file."""

from collections.abc import Mapping
from types import MappingProxyType

from perdure.types import Grading

POSSIBLE = frozenset(("swebench", "swepro"))
_WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "eval_cmd": "its command gives an exit code, and no status of a test",
        "reward_file": "its script writes a number, and no status of a test",
        "status_map": "its tests are files of the row, and no test patch says what they check",
        "multi_swe": "its tests are not in Python",
    }
)
_NO_CANARY: Mapping[str, str] = MappingProxyType(
    {
        "eval_cmd": "its command may run anything",
        "reward_file": "its script decides what runs",
        "swepro": "its script decides what runs",
        "multi_swe": "its command is a script of its image",
    }
)


def why_no_canary(grading: Grading) -> str | None:
    """Why no test that must fail is added to the run; None if one is."""
    return _NO_CANARY.get(grading.protocol)


def why_no_twins(grading: Grading) -> str | None:
    """Why no test of the row can have a twin; None if calibration may find some."""
    if grading.protocol not in POSSIBLE:
        why = _WHY_NOT.get(grading.protocol, "its grader is not Perdure's")
        return f"rows of protocol {grading.protocol} have no twins: {why}"
    if grading.protocol == "swebench" and not grading.test_cmd:
        return "the row has no test command"
    return None if grading.test_patch else "the row has no test patch"
