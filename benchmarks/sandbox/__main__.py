"""Measures how long a sandbox takes: boot to first exec, exec, a 16 MB file, kill; alone and many at once.

    python -m benchmarks.sandbox [--providers NAMES] [--parallel COUNTS] [--rounds N] [--json]
                                 [--sidecar IMAGE]

Within each round, each provider and its plain tool do the same work alternately. The plain tools are
`bwrap` with the same flags running `true`, the `podman` and `docker` command lines, and the E2B and
Daytona SDKs. For the SDKs, both sides use the same double, whose sandboxes also run on this host.
`x plain` is our overhead. With `--sidecar IMAGE`, both sides are our sandboxes of an image that is here,
and only the first has a sidecar with a health check: `x plain` is what a compose task costs.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sandbox.sandbox_runners import (
    BOOT,
    EXEC,
    FILE,
    KILL,
    STEPS,
    Pair,
    Side,
    Unavailable,
    pair,
)
from benchmarks.scratch_folder import scratch_folder

PROVIDERS = ("bubblewrap", "podman", "docker", "e2b", "daytona")
AIM_MS = {BOOT: 30.0, EXEC: 8.0}
"""Targets in ms, for one bubblewrap sandbox at a time."""
FILE_BYTES = 16 << 20
MOST_FILES = 32
"""The largest number at once, because each file is in this host's memory."""

Row = dict[str, Any]


async def main() -> None:
    options = _options()
    rows: list[Row] = []
    with scratch_folder("pd-", keep=False) as folder:
        file = folder / "file"
        file.write_bytes(os.urandom(FILE_BYTES))
        if not options.json:
            print(_HEAD)
        for name in options.providers:
            try:
                async with pair(name, folder / name, options.sidecar) as sides:
                    for count in options.parallel:
                        bench = Bench(sides, file)
                        await bench.rounds(count, max(1, options.rounds // count))
                        rows += bench.rows(name, count)
                        if not options.json:
                            _print(rows[-len(STEPS) :])
            except Unavailable as error:
                print(f"{name}: not measured: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps({"load": os.getloadavg(), "rows": rows}))


class Bench:
    """The times of one pair for one number of sandboxes. Only one side runs at a time."""

    def __init__(self, sides: Pair, file: Path) -> None:
        self._sides, self._file = sides, file
        self._times: dict[Side, dict[str, list[float]]] = {
            side: {step: [] for step in side.steps} for side in sides
        }
        self.failed: dict[Side, list[BaseException]] = {side: [] for side in sides}

    async def rounds(self, count: int, rounds: int) -> None:
        for number in range(rounds):
            for side in self._sides if number % 2 else reversed(self._sides):
                await self._round(side, count)

    async def _round(self, side: Side, count: int) -> None:
        boxes = await self._timed(side, BOOT, [side.boot() for _ in range(count)])
        await self._timed(side, EXEC, [side.exec(box) for box in boxes])
        if FILE in side.steps:
            await self._timed(side, FILE, [side.put(box, self._file) for box in boxes[:MOST_FILES]])
        await self._timed(side, KILL, [side.kill(box) for box in boxes])

    async def _timed(self, side: Side, step: str, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        """Start all at once; return the results of those that succeed."""

        async def one(call: Awaitable[Any]) -> Any:
            start = time.perf_counter()
            done = await call
            if step in side.steps:
                self._times[side][step].append((time.perf_counter() - start) * 1e3)
            return done

        found = await asyncio.gather(*map(one, calls), return_exceptions=True)
        self.failed[side] += [error for error in found if isinstance(error, BaseException)]
        return [done for done in found if not isinstance(done, BaseException)]

    def rows(self, provider: str, count: int) -> list[Row]:
        """One row per step: our time, the plain tool's time if it has that step, and their ratio."""
        for side, errors in self.failed.items():
            if errors:
                print(f"{side.name}, {count}: {len(errors)} failed: {errors[0]}", file=sys.stderr)
        ours, plain = (self._times[side] for side in self._sides)
        return [
            {
                "provider": provider,
                "at_once": count,
                "step": step,
                "n": len(ours[step]),
                **_summary("", ours[step]),
                **_summary("plain_", plain.get(step, [])),
            }
            for step in STEPS
        ]


def _summary(prefix: str, times: Sequence[float]) -> dict[str, float | None]:
    if not times:
        return {f"{prefix}p50": None, f"{prefix}p95": None}
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return {f"{prefix}p50": round(statistics.median(ordered), 2), f"{prefix}p95": round(p95, 2)}


_HEAD = (
    "| provider | at once | step | n | p50, ms | p95, ms | plain p50 | plain p95 | x plain | aim |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def _print(rows: Sequence[Row]) -> None:
    for row in rows:
        both = row["p50"] is not None and row["plain_p50"] is not None
        ratio = f"{row['p50'] / row['plain_p50']:.2f}" if both else ""
        alone = row["provider"] == "bubblewrap" and row["at_once"] == 1
        aim = f"< {AIM_MS[row['step']]:.0f}" if alone and row["step"] in AIM_MS else ""
        times = (row[name] for name in ("p50", "p95", "plain_p50", "plain_p95"))
        cells = [row["provider"], row["at_once"], row["step"], row["n"], *map(_ms, times)]
        print("|", *(f"{cell} |" for cell in [*cells, ratio, aim]), flush=True)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox")
    parser.add_argument(
        "--providers",
        type=lambda text: text.split(","),
        default=["bubblewrap"],
        help=f"comma-separated, from {','.join(PROVIDERS)}",
    )
    parser.add_argument(
        "--parallel", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32]
    )
    parser.add_argument("--rounds", type=int, default=128, help="total sandboxes per side")
    parser.add_argument("--sidecar", default="", help="an image for podman and docker")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
