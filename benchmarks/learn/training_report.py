"""Tables and the picture of finished runs: `python -m benchmarks.learn.training_report RUNS_FOLDER [SVG]`.

RUNS_FOLDER holds `<name>/figures.json` of each run, or `<name>.json` as in the folder `results`.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

KEPT = Path(__file__).parent / "results"
WINDOW = 5
"""Steps at the beginning and the end whose rewards are averaged."""
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#999999",
    "#000000",
    "#8b5a2b",
)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 360, 46, 34, 14
LEGEND = 190

Run = Mapping[str, Any]


def read(folder: Path) -> list[Run]:
    """All runs with at least one step, by name."""
    files = sorted([*folder.glob("*/figures.json"), *folder.glob("*.json")])
    found = [json.loads(file.read_text()) for file in files]
    return [run for run in found if run["steps"]]


def steps_done(file: Path) -> int:
    return len(json.loads(file.read_text())["steps"]) if file.exists() else 0


def is_finished(file: Path, steps: int) -> bool:
    """Whether a run with this many steps has ended. A run without any reward ends early."""
    if not file.exists():
        return False
    run = json.loads(file.read_text())
    return bool(run["finished"]) and run["plan"]["steps"] >= steps


def keep(folder: Path, kept: Path, svg: Path) -> None:
    """Keep the figures of all finished runs in `results`, and draw their picture."""
    kept.mkdir(parents=True, exist_ok=True)
    for run in read(folder):
        if run["finished"]:
            text = json.dumps(run, indent=1)
            (kept / f"{run['plan']['name']}.json").write_text(f"{text}\n")
    svg.write_text(picture(read(kept)))


def resumed(file: Path) -> bool:
    return file.exists() and bool(json.loads(file.read_text())["resumed_at"])


# --- tables -----------------------------------------------------------------------------------


def table(runs: Sequence[Run]) -> str:
    head = "| run | steps | first step | first 5 | last 5 | held out, first to last |"
    lines = [head, "|---" * 6 + "|", *map(_rewards, runs), "", *costs(runs)]
    return "\n".join(lines)


def _rewards(run: Run) -> str:
    rewards = [step["reward"] for step in run["steps"]]
    held = " to ".join(f"{one['held_out']:.2f}" for one in run["evaluations"])
    first, last = fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])
    name = run["plan"]["name"] + ("" if run["finished"] else " (unfinished)")
    return f"| {name} | {len(rewards)} | {rewards[0]:.2f} | {first:.2f} | {last:.2f} | {held} |"


def costs(runs: Sequence[Run]) -> Iterable[str]:
    yield (
        "| run | minutes | s a step: rollouts, training, publishing | s a rollout: environment, model, "
        "waiting | sampled tokens a s | trainer's CPU ms an episode | largest gap | mean load |"
    )
    yield "|---" * 8 + "|"
    for run in runs:
        yield _costs(run)


def _costs(run: Run) -> str:
    steps = run["steps"]
    rollouts = sum(step["graded"] + step["ungraded"] for step in steps)
    clock = [fmean(step[name] for step in steps) for name in ("wait_s", "train_s", "publish_s")]
    names = ("environment", "engine", "waiting")
    parts = [sum(step[name] for step in steps) / rollouts for name in names]
    tokens = sum(step["sampled_tokens"] for step in steps) / sum(step["wait_s"] for step in steps)
    sdk = 1000 * sum(step["sdk_cpu_s"] for step in steps) / rollouts
    gap = max(step["grpo"].get("gap_max", 0.0) for step in steps)
    load = fmean(step["load"] for step in steps)
    return (
        f"| {run['plan']['name']} | {run['seconds'] / 60:.1f} | {_joined(clock)} | {_joined(parts)} "
        f"| {tokens:.0f} | {sdk:.1f} | {gap:.1e} | {load:.1f} |"
    )


def _joined(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


# --- picture ----------------------------------------------------------------------------------


def picture(runs: Sequence[Run]) -> str:
    """Reward of each batch, smoothed over three steps; circles: held out."""
    most = max(len(run["steps"]) for run in runs)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - LEGEND) * step / most

    def y(reward: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - reward)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_axes(x, y, most),
    ]
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{x(step + 1):.1f},{y(reward):.1f}" for step, reward in enumerate(_smooth(run))
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x(one["step"]):.1f}" cy="{y(one["held_out"]):.1f}" r="4" '
            f'fill="#fff" stroke="{colour}" stroke-width="2"/>'
            for one in run["evaluations"]
        ]
        level = TOP + 14 + 18 * number
        parts.append(
            f'<text x="{WIDTH - LEGEND + 14}" y="{level}" fill="{colour}">{run["plan"]["name"]}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(x: Any, y: Any, most: int) -> Iterable[str]:
    for tenth in range(0, 11, 2):
        level = y(tenth / 10)
        yield f'<line x1="{x(0)}" x2="{x(most)}" y1="{level}" y2="{level}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{level + 4}" text-anchor="end">{tenth / 10:.1f}</text>'
    for step in range(0, most + 1, 5):
        yield f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
    yield f'<text x="{x(most / 2)}" y="{HEIGHT - 2}" text-anchor="middle">step</text>'
    yield f'<text x="{LEFT + 6}" y="{TOP + 12}">reward; circles: held out</text>'


def _smooth(run: Run) -> list[float]:
    rewards = [step["reward"] for step in run["steps"]]
    return [fmean(rewards[max(0, at - 1) : at + 2]) for at in range(len(rewards))]


def main(folder: Path, svg: Path | None) -> None:
    runs = read(folder)
    print(table(runs))
    if svg is not None:
        svg.write_text(picture(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
