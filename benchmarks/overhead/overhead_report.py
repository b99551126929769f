"""Medians, ratios and the table. A ratio is taken within a round; the report has the ratios' median."""

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.overhead.overhead_runners import Sample

HEAD = (
    "side | N | right | wall s | rollouts/min | the same, with start | CPU s/rollout |"
    " the same, with start | endpoint CPU s/rollout"
)


def line(sample: Sample) -> str:
    """Print one sample as progress."""
    per = (sample.cpu + sample.grading_cpu) / sample.rollouts
    return (
        f"{sample.side:<22} N={sample.rollouts:<4} right={sample.right:<4} wall={sample.wall:6.2f}"
        f" +grading={sample.grading_wall:5.2f} cpu/rollout={per:.3f} start={sample.start_wall:.2f}"
        f" window={sample.window:.2f}"
    )


@dataclass(frozen=True)
class Figures:
    """One sample in comparable terms. Rates are graded rollouts per minute. A difference of two runs is NaN
    if the run of one rollout took longer."""

    rate: float
    """The rate without one-time costs: Perdure's with a running stack, a peer's without its start."""
    rate_with_start: float
    cpu: float
    cpu_with_start: float


@dataclass(frozen=True)
class Report:
    samples: Sequence[Sample]
    skipped: Sequence[str]

    def document(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "skipped": list(self.skipped),
            "samples": [asdict(sample) for sample in self.samples],
            "medians": {
                f"{side} N={size}": asdict(self._median(side, size)) for side, size in self._cells()
            },
        }

    def text(self) -> str:
        """The Markdown table of docs/benchmarks.md."""
        parts = [machine(), "", *self._table(), ""]
        parts += [*self._ratios(), "", *self._splits()]
        parts += [f"Skipped: {reason}" for reason in self.skipped]
        return "\n".join(parts)

    def _cells(self) -> list[tuple[str, int]]:
        """All sides and sizes, except for the size that only measures the start."""
        seen = dict.fromkeys((s.side, s.rollouts) for s in self.samples)
        return [cell for cell in seen if cell[1] > 1]

    def _of(self, side: str, size: int) -> list[Sample]:
        return [s for s in self.samples if s.side == side and s.rollouts == size]

    def _figures(self, sample: Sample) -> Figures:
        once = self._of(sample.side, 1)
        is_service = sample.start_wall > 0
        start_wall = sample.start_wall if is_service else _median(once, lambda s: s.wall)
        start_cpu = sample.start_cpu if is_service else _median(once, lambda s: s.cpu)
        wall = sample.wall + sample.grading_wall + (sample.start_wall if is_service else 0)
        cpu = sample.cpu + sample.grading_cpu + (sample.start_cpu if is_service else 0)
        n = sample.rollouts
        return Figures(
            rate=60 * n / (wall - start_wall) if wall > start_wall else math.nan,
            rate_with_start=60 * n / wall,
            cpu=(cpu - start_cpu) / n if cpu > start_cpu else math.nan,
            cpu_with_start=cpu / n,
        )

    def _median(self, side: str, size: int) -> Figures:
        found = [self._figures(sample) for sample in self._of(side, size)]
        return Figures(*(_known(values) for values in zip(*map(_values, found), strict=True)))

    def _table(self) -> list[str]:
        rows = [f"| {HEAD} |", "|" + "---|" * (HEAD.count("|") + 1)]
        for side, size in self._cells():
            samples, found = self._of(side, size), self._median(side, size)
            right = min(sample.right for sample in samples)
            wall = _median(samples, lambda s: s.wall + s.grading_wall)
            endpoint = _median(samples, lambda s: s.endpoint_cpu) / size
            rows.append(
                f"| {side} | {size} | {right} | {wall:.1f} | **{_shown(found.rate, 0)}** |"
                f" {found.rate_with_start:.0f} | **{_shown(found.cpu, 3)}** |"
                f" {found.cpu_with_start:.3f} | {endpoint:.4f} |"
            )
        return rows

    def _ratios(self) -> list[str]:
        """Our figure over each peer's, in the same round."""
        lines = []
        for ours, size in self._cells():
            if not ours.startswith("Perdure"):
                continue
            for peer, other in self._cells():
                if peer.startswith("Perdure") or other != size:
                    continue
                rate = self._ratio(ours, peer, size, lambda f: f.rate_with_start)
                warm = self._ratio(ours, peer, size, lambda f: f.rate)
                cpu = self._ratio(ours, peer, size, lambda f: f.cpu)
                lines.append(
                    f"- {ours}, N = {size}, to {peer}: {_shown(warm, 2)}x the rate"
                    f" ({_shown(rate, 2)}x with both starts), {_shown(cpu, 2)}x the CPU"
                )
        return lines

    def _ratio(self, ours: str, peer: str, size: int, of: Callable[[Figures], float]) -> float:
        pairs = zip(self._of(ours, size), self._of(peer, size), strict=False)
        return _known([of(self._figures(a)) / of(self._figures(b)) for a, b in pairs])

    def _splits(self) -> list[str]:
        """The cost of a Perdure rollout by part, and its size in the store."""
        rows = []
        for side, size in self._cells():
            samples = [s for s in self._of(side, size) if s.split]
            if not samples:
                continue
            parts = {
                part: 1000 * median(s.split[part] for s in samples) / size
                for part in samples[0].split
            }
            shown = ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
            rows.append(f"- {side}, N = {size}, CPU ms a rollout: {shown}")
            objects = _median(samples, lambda s: s.objects) / size
            kilobytes = _median(samples, lambda s: s.bytes) / size / 1000
            rows.append(f"  kept in the store: {objects:.1f} objects, {kilobytes:.1f} KB a rollout")
        return rows


def machine() -> str:
    """The machine, in one line."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()},"
        f" load average {load:.1f} at the end"
    )


def _median(samples: Sequence[Sample], of: Callable[[Sample], float]) -> float:
    return median([of(sample) for sample in samples]) if samples else 0.0


def _known(values: Sequence[float]) -> float:
    """The median of those that are numbers; NaN if none is."""
    numbers = [value for value in values if not math.isnan(value)]
    return median(numbers) if numbers else math.nan


def _shown(value: float, digits: int) -> str:
    return "?" if math.isnan(value) else f"{value:.{digits}f}"


def _values(figures: Figures) -> tuple[float, ...]:
    return (figures.rate, figures.rate_with_start, figures.cpu, figures.cpu_with_start)
