"""Turns measurements into the reported figures."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Level:
    """Latencies of each round's calls in seconds, directly to the engine and through the gateway."""

    sessions: int
    rest_cpu: float
    """CPU seconds per second without calls, used by health checks."""
    direct: list[list[float]] = field(default_factory=list)
    through: list[list[float]] = field(default_factory=list)
    cpu_s_per_turn: list[float] = field(default_factory=list)
    """CPU above the CPU at rest."""
    yardstick_ms: list[float] = field(default_factory=list)

    def added(self, percent: int) -> list[float]:
        """Increase of a percentile in each round, in seconds."""
        pairs = zip(self.direct, self.through, strict=True)
        return [_percentile(t, percent) - _percentile(d, percent) for d, t in pairs]

    def line(self) -> dict[str, float]:
        return {
            "sessions": self.sessions,
            "direct_p50_ms": 1000 * statistics.median(_percentile(d, 50) for d in self.direct),
            "direct_p99_ms": 1000 * statistics.median(_percentile(d, 99) for d in self.direct),
            "added_p50_ms": 1000 * statistics.median(self.added(50)),
            "added_p99_ms": 1000 * statistics.median(self.added(99)),
            "ratio_p50": statistics.median(
                _percentile(t, 50) / _percentile(d, 50)
                for d, t in zip(self.direct, self.through, strict=True)
            ),
            "cpu_ms_per_turn": 1000 * statistics.median(self.cpu_s_per_turn),
            "turns_per_s_per_core": 1 / statistics.median(self.cpu_s_per_turn),
            "yardstick_ms": statistics.median(self.yardstick_ms),
            "of_yardstick": statistics.median(
                1000 * cpu / ms
                for cpu, ms in zip(self.cpu_s_per_turn, self.yardstick_ms, strict=True)
            ),
            "cpu_ms_per_s_at_rest": 1000 * self.rest_cpu,
        }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def memory_mb(pid: int) -> dict[str, int]:
    """Resident memory in MB: the current value and the peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
    return {name: int(fields[name].split()[0]) >> 10 for name in ("VmRSS", "VmHWM")}


COLUMNS = {
    "busy sessions": "{sessions}",
    "direct p50 / p99, ms": "{direct_p50_ms:,.0f} / {direct_p99_ms:,.0f}",
    "through the gateway": "{ratio_p50:.3f} x",
    "added p50, ms": "{added_p50_ms:.1f}",
    "added p99, ms": "{added_p99_ms:.1f}",
    "CPU a turn, ms": "{cpu_ms_per_turn:.1f}",
    "turns/s a core": "{turns_per_s_per_core:.0f}",
    "yardstick, ms": "{yardstick_ms:.1f}",
    "CPU a turn / yardstick": "{of_yardstick:.3f}",
    "CPU at rest, ms a second": "{cpu_ms_per_s_at_rest:.0f}",
}


def print_table(found: dict[str, Any]) -> None:
    if "s3" in found:
        print(f"\n{found['turns']} turns; the store's requests and objects:")
        for state, counts in found["s3"].items():
            asked = ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items()))
            print(f"- sessions {state}: {asked}")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for line in found["levels"]:
        print(f"| {' | '.join(column.format(**line) for column in COLUMNS.values())} |")
    memory, sessions = found["memory_mb"], f"{found['busy_sessions']} busy"
    print(
        f"\n{memory['VmRSS']} MB resident ({memory['VmHWM']} MB at most) with {sessions} sessions"
        f" and {found['idle_sessions']} idle ones of {found['idle_tokens']:,} tokens each;"
        f" {found['engines']} engines; load {found['load_average'][0]:.1f}"
    )
