"""Texts about calibration, shown next to an instance or its reward."""

from collections.abc import Mapping, Sequence

from perdure.cli.console import many
from perdure.instances.calibration_record import Calibration, Mark, quarantined
from perdure.types import CalibrationState, Grade, distinct_twins

NOT_CALIBRATED = "not calibrated"
SHOWN = 3


def label_mark(mark: Mark) -> str:
    """The text after a reference; empty if the row is proved."""
    if mark.state is CalibrationState.PROVED:
        return ""
    return f"  ({mark.state.value if mark.state else NOT_CALIBRATED})"


def label_records(records: Sequence[Calibration]) -> str:
    """`proved in bubblewrap (strong twins of 2 of 3 tests), quarantined in podman: <reason>`."""
    told = [f"{one.state.value} in {one.sandbox}{_strength(one)}" for one in records]
    return ", ".join(told) or NOT_CALIBRATED


def _strength(record: Calibration) -> str:
    if record.state is CalibrationState.QUARANTINED or record.twin_draws is None:
        return f": {record.reason}" if record.reason else ""
    strong = {t for twin in distinct_twins(record.twin_draws) if not twin.weak for t in twin.tests}
    tests = len(record.fail_to_pass) or 1  # a row graded by exit code has one
    return f" (strong twins of {len(strong)} of {many(tests, 'test')})"


def label_record(record: Calibration) -> str:
    """`proved in bubblewrap, 3 runs: 2 tests to fix, 40 to keep, 10 twins proven under 3 other
    correct fixes`."""
    begins = f"{record.state.value} in {record.sandbox}, {many(record.runs, 'run')}"
    if record.state is CalibrationState.QUARANTINED:
        return f"{begins}: {record.reason}"
    told = [
        f"{many(len(record.fail_to_pass), 'test')} to fix",
        f"{len(record.pass_to_pass)} to keep",
    ]
    if record.dropped:
        told.append(f"{len(record.dropped)} dropped as flaky")
    twins = distinct_twins(record.twin_draws or ())
    told.append(many(len(twins), "twin") + _other_fixes(record))
    if weak := {test for twin in twins if twin.weak for test in twin.tests}:
        told.append(f"{many(len(weak), 'test')} with weak ones only")
    if record.without_twin:
        told.append(f"{many(len(record.without_twin), 'test')} without one")
    return f"{begins}: {', '.join(told)}"


def _other_fixes(record: Calibration) -> str:
    count = len(record.variants)
    fixes = "fix" if count == 1 else "fixes"
    return f" proven under {count} other correct {fixes}" if record.twin_draws else ""


def label_grade(grade: Grade) -> str:
    """Empty if the row was proved."""
    if grade.calibration is CalibrationState.PROVED:
        return ""
    return f"row {grade.calibration.value if grade.calibration else NOT_CALIBRATED}"


def notes(dataset: str, sandbox: str, refs: Sequence[str], marks: Mapping[str, Mark]) -> list[str]:
    """Notes about `refs`, which run, and about the instances in `marks` that do not."""
    bad, run = quarantined(marks), set(refs)
    left_out = {ref: reason for ref, reason in bad.items() if ref not in run}
    played = {ref: reason for ref, reason in bad.items() if ref in run}
    lines = _few("left out, quarantined", left_out)
    lines += _few("quarantined, so its reward is meaningless", played)
    if unproved := sum(marks[ref].state is None for ref in refs):
        lines.append(
            f"{unproved} of {many(len(refs), 'instance')} not calibrated in {sandbox}: "
            f"check them with `perdure instances calibrate {dataset}`"
        )
    return lines


def _few(what: str, reasons: Mapping[str, str]) -> list[str]:
    lines = [f"{what}: {ref}: {reason}" for ref, reason in list(reasons.items())[:SHOWN]]
    more = len(reasons) - SHOWN
    return [*lines, f"{what}: {more} more"] if more > 0 else lines
