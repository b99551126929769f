"""A report as JSON: the same figures, with complete lists."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from perdure.reports.run_comparison import Comparison
from perdure.reports.run_report import Report


def document(reports: Sequence[Report], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The JSON. Missing numbers are null. An interval is `{mean, low, high, instances}`."""
    runs = [{**asdict(one), "sandbox_error_rate": one.sandbox_error_rate} for one in reports]
    found = {"schema_version": 1, "runs": runs, "comparisons": [asdict(one) for one in comparisons]}
    cleaned: dict[str, Any] = _plain(found)
    return cleaned


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
