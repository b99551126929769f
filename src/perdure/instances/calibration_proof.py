"""The result of a calibration. `perdure.graders.gold_and_base_check` runs one."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from perdure.sandboxes.base import Sandbox
from perdure.types import Instance

MakeSandbox = Callable[[str], Awaitable[Sandbox]]
"""Purpose (`gold-1`, `nop-1`, ...) -> a fresh sandbox of the instance, which the caller kills."""


@dataclass(frozen=True)
class CalibrationReport:
    """What calibration ran, and its results."""

    runs: int
    """Runs with the gold patch, and the same number of runs of the unpatched base."""
    fail_to_pass: int
    pass_to_pass: int
    unstable: tuple[str, ...] = ()
    """Tests left out because runs of the same tree disagreed."""
    dropped_paths: tuple[str, ...] = ()
    """Files of the gold patch that the filter drops before grading."""
    longest_run_s: float = 0.0
    without_twins: Mapping[str, str] = field(default_factory=dict)
    """FAIL_TO_PASS id -> why it has no twin, so that its grades are `unverified`."""
    variants: tuple[str, ...] = ()
    """Other correct fixes, made from gold, under which every twin failed too."""


@dataclass(frozen=True)
class Calibrated:
    """The instance with its lists computed (or proved), and the evidence."""

    instance: Instance
    report: CalibrationReport


Calibrate = Callable[[Instance, MakeSandbox], Awaitable[Calibrated]]
"""Runs gold and base of an instance. Raises: InstanceError when the instance is unfit."""
