"""The table and the picture of an endurance run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.endurance.endurance_checks import Ended, Sample

THOUSAND = 1000
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "perdure", "font.size": 9}


@dataclass(frozen=True)
class Outcome:
    rollouts: int
    graded: int
    """Rollouts with reward 1. Each counts once."""
    wall_s: float
    cpu_s: float
    client_deaths: int
    """How often `perdure run` ended before its run without being killed."""
    calls: int
    """Model calls that reached the engine. `needed`: calls that a run without kills needs."""
    needed: int
    again_s: float
    """Seconds of the repeated command. `again_calls`: its model calls."""
    again_calls: int
    kills: Sequence[tuple[float, str]]
    """Seconds since the start, and the kind, of each kill."""
    samples: Sequence[Sample]
    ended: Ended

    @property
    def right(self) -> bool:
        faults = self.client_deaths, self.again_calls, self.ended.sandboxes
        return self.graded == self.rollouts and not any(faults)

    def document(self) -> dict[str, Any]:
        return asdict(self)


def text(found: Outcome) -> str:
    kinds = {what for _, what in found.kills}
    kills = ", ".join(f"{what} {sum(w == what for _, w in found.kills)}" for what in sorted(kinds))
    ended = found.ended
    each = found.rollouts
    lines = [
        f"{found.graded} of {each} rollouts are graded, in {found.wall_s / 60:.0f} min: "
        f"{each * 60 / found.wall_s:.0f} a minute, {found.cpu_s / each:.2f} CPU s each.",
        f"{len(found.kills)} kills: {kills}. The client ended by itself {found.client_deaths} times.",
        f"{found.calls} model calls for {found.needed}: {found.calls - found.needed} bought again.",
        f"The same command once more: {found.again_s:.1f} s, {found.again_calls} model calls.",
        f"Living sandboxes at the end: {ended.sandboxes}.",
        "",
        "| MB | first thousand: median, most | last thousand |",
        "|---|---|---|",
        *_memory(found),
        "",
        "| workflow | how many | most events | largest history, KB |",
        "|---|---|---|---|",
        *(
            f"| {kind} | {count} | {events} | {size / 1000:.0f} |"
            for kind, (count, events, size) in sorted(ended.histories.items())
        ),
        "",
        f"Largest payload: {ended.largest_payload / 1000:.1f} KB. Temporal's database: "
        f"{ended.server_mb * 1000 / each:.0f} KB a rollout. "
        f"Store: {ended.objects / each:.1f} objects, {ended.stored / 1000 / each:.0f} KB a rollout.",
        f"`perdure status RUN`: {_status(found)}.",
    ]
    return "\n".join(lines)


def _memory(found: Outcome) -> list[str]:
    first = [s for s in found.samples if 0 <= s.done <= THOUSAND]
    last = [s for s in found.samples if s.done >= found.rollouts - THOUSAND]
    names = sorted({name for sample in found.samples for name in sample.rss})
    return [f"| {name} | {_middle(first, name)} | {_middle(last, name)} |" for name in names]


def _middle(samples: Sequence[Sample], name: str) -> str:
    seen = [sample.rss[name] for sample in samples if name in sample.rss]
    return f"{median(seen):.0f}, {max(seen):.0f}" if seen else "-"


def _status(found: Outcome) -> str:
    took = [sample.status_s for sample in found.samples if sample.done >= 0]
    if not took:
        return "never answered"
    return f"median {median(took):.1f} s, longest {max(took):.1f} s, {len(took)} times"


def draw(found: Outcome, svg: Path) -> None:
    """Plot rollouts, memory and the server's database over time, with marks for kills."""
    alive = [sample for sample in found.samples if sample.done >= 0]
    names = sorted({name for sample in alive for name in sample.rss})
    with mpl.rc_context(STYLE):
        figure, (done, memory, disk) = plt.subplots(3, 1, figsize=(7, 7), sharex=True)
        done.plot([s.at_s / 60 for s in alive], [s.done for s in alive])
        done.set_ylabel("rollouts graded")
        for at_s, what in found.kills:
            done.axvline(at_s / 60, color="#c94f4f" if what == "everything" else "#cccccc", lw=0.5)
        for name in names:
            points = [(s.at_s / 60, s.rss[name]) for s in alive if name in s.rss]
            memory.plot(*zip(*points, strict=True), label=name, lw=1)
        memory.set_ylabel("resident MB")
        memory.legend(frameon=False, ncols=3, fontsize=7)
        disk.plot([s.at_s / 60 for s in alive], [s.server_mb for s in alive])
        disk.set_ylabel("Temporal's database, MB")
        disk.set_xlabel("minutes")
        figure.savefig(svg, format="svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
