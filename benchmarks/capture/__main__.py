"""What share of the sampled tokens is trained, and in how many samples, compared with slime.

    python -m benchmarks.capture [RECORDING.json ...] [--slime CHECKOUT] [--live RUN ...] [--json]

Recorded Claude Code sessions go through both gateways with the same answers, sampled token for
token. `--live` adds the episodes of a run in the store that the settings name, of any agent.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.capture.ours import captured
from benchmarks.capture.slime import Slime
from benchmarks.peers.environments import Unavailable
from perdure.episodes.accounting import TrajectoryCounts, count_trajectory
from perdure.episodes.episode_store import read_run
from perdure.episodes.segments import cut
from perdure.settings.tree import Settings
from perdure.storage.base import open_store
from perdure.types import Turn

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".perdure" / "bench" / "environments"
RECORDINGS = ROOT.parent / "shared" / "data" / "trajectories" / "claude_code"

Row = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    recordings = arguments.recordings or sorted(RECORDINGS.glob("*.json"))
    if not recordings and not arguments.live:
        sys.exit("no recordings: name their files, or a run of this store with --live RUN")
    rows = [_ours(recording) for recording in recordings]
    rows += [row for run_id in arguments.live for row in asyncio.run(_live(run_id))]
    try:
        slime = Slime(ENVIRONMENTS, arguments.slime)
        rows += [_row(one.stem, "slime", slime.captured(one)) for one in recordings]
    except Unavailable as error:
        print(f"skipped: {error}")
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows)


def _ours(recording: Path) -> Row:
    with tempfile.TemporaryDirectory(prefix="pd-") as home:
        turns = asyncio.run(captured(recording, Path(home)))
    return _row(recording.stem, "Perdure", _counts(count_trajectory(turns, cut(turns))), turns)


async def _live(run_id: str) -> list[Row]:
    """Every rollout of a run, by real agents."""
    episodes = await read_run(open_store(Settings()), run_id)
    return [
        _row(f"{e.agent} {e.instance_id} #{e.sample_index}", "Perdure", _counts(e.trajectory))
        for e in episodes
        if e.trainable
    ]


def _counts(counts: TrajectoryCounts) -> dict[str, int]:
    return {
        "sampled": counts.sampled_tokens,
        "trained": counts.trained_tokens,
        "samples": sum(counts.segments.values()),
        "tokens": counts.training_tokens,
    }


def _row(session: str, side: str, counts: dict[str, int], turns: Sequence[Turn] = ()) -> Row:
    return {"session": session, "side": side, "turns": len(turns) or None, **counts}


def _print(rows: Sequence[Row]) -> None:
    print("| session | side | trained / sampled | share | samples | training tokens |")
    print("|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda r: (r["session"], r["side"])):
        share = row["trained"] / row["sampled"] if row["sampled"] else 0.0
        print(
            f"| {row['session']} | {row['side']} | {row['trained']} / {row['sampled']} "
            f"| {share:.0%} | {row['samples']} | {row['tokens']:,} |"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture")
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--slime", type=Path, help="a checkout of slime's repository")
    parser.add_argument("--live", action="append", default=[], metavar="RUN")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
