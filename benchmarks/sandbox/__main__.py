"""How long a sandbox takes: boot to first exec, exec, kill; alone and 32 at a time.

    python -m benchmarks.sandbox [--rounds N] [--json]

The baseline, in the same run and interleaved, is plain `bwrap` with the same flags running `true`:
namespaces and binds, but no overlay, no limits, no result that outlives its caller.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.bubblewrap import BubblewrapProvider, BubblewrapSandbox
from perdure.sandboxes.keeper import DEVICES
from perdure.sandboxes.process import ProcessId, ended
from perdure.sandboxes.procfs import started_at

AT_ONCE = (1, 32)
AIM_MS = {"boot to first exec": 30.0, "exec": 8.0}

Times = dict[str, list[float]]


async def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        bench = Bench(Path(folder))
        await bench.warm_up()
        measured = {count: await bench.rounds(count, arguments.rounds) for count in AT_ONCE}
    rows = [
        _row(count, step, times) for count in AT_ONCE for step, times in measured[count].items()
    ]
    if arguments.json:
        print(json.dumps({"rows": rows, "enforced": bench.enforced}))
    else:
        _print_table(rows, bench.enforced)


class Bench:
    """One home with one small tree; every sandbox is a fresh identity."""

    def __init__(self, folder: Path) -> None:
        tree = folder / "tree"
        tree.mkdir()
        (tree / "file").write_text("base\n")
        self.provider = BubblewrapProvider(folder / "home")
        if missing := self.provider.check():
            sys.exit(missing[0])
        labels = {"run": "bench", "rollout": "bench", "attempt": "1"}
        self.spec = SandboxSpec(workdir="/testbed", tree=tree, labels=labels)
        self.enforced: dict[str, str] = {}
        self.plain: list[str] = []
        self._count = 0

    async def warm_up(self) -> None:
        box = await self._boot()
        assert isinstance(box, BubblewrapSandbox)
        self.enforced = dict(box.enforced)
        self.plain = _plain_bwrap(self.provider.command(self.spec, box.box), box.box.path)
        await box.kill()

    async def rounds(self, at_once: int, rounds: int) -> Times:
        """`rounds` measurements of each step and of the baseline, in turns."""
        times: Times = {"plain bwrap": [], "boot to first exec": [], "exec": [], "kill": []}
        for _ in range(max(1, rounds // at_once)):
            times["plain bwrap"] += await _timed([self._plain] * at_once)
            boxes: list[Sandbox] = []
            times["boot to first exec"] += await _timed([self._readying(boxes)] * at_once)
            times["exec"] += await _timed([_executing(box) for box in boxes])
            times["kill"] += await _timed([box.kill for box in boxes])
        return times

    async def _plain(self) -> None:
        pid = os.posix_spawn(self.plain[0], self.plain, {})
        await ended(ProcessId(pid, started_at(pid)), 60)
        if os.waitpid(pid, 0)[1] != 0:
            raise RuntimeError("plain bwrap failed: its flags no longer run without a keeper")

    def _readying(self, boxes: list[Sandbox]) -> Callable[[], Awaitable[None]]:
        async def ready() -> None:
            box = await self._boot()
            await box.exec(["true"], check=True)
            boxes.append(box)

        return ready

    async def _boot(self) -> Sandbox:
        self._count += 1
        return await self.provider.create(self.spec, f"bench-{self._count}")


def _executing(box: Sandbox) -> Callable[[], Awaitable[object]]:
    return lambda: box.exec(["true"], check=True)


async def _timed(steps: Sequence[Callable[[], Awaitable[object]]]) -> list[float]:
    """Milliseconds of each step, all started at once."""

    async def one(step: Callable[[], Awaitable[object]]) -> float:
        start = time.perf_counter()
        await step()
        return (time.perf_counter() - start) * 1e3

    return await asyncio.gather(*map(one, steps))


def _plain_bwrap(argv: Sequence[str], box: Path) -> list[str]:
    """The flags the sandbox was booted with, over plain folders, to run `true`."""
    flags = list(argv[: argv.index("--")])
    for flag in ("--info-fd", "--seccomp"):  # descriptors that a keeper would hold
        at = flags.index(flag)
        del flags[at : at + 2]
    plain = box.parent.parent / "plain"
    for name in ("tmp", "home", "shm", "tree", "dev"):
        (plain / name).mkdir(parents=True)
    for name in DEVICES:
        (plain / "dev" / name).symlink_to(f"/dev/{name}")
    return [*(flag.replace(str(box / "disk"), str(plain)) for flag in flags), "--", "/usr/bin/true"]


def _row(count: int, step: str, times: list[float]) -> dict[str, float | int | str]:
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return {
        "at_once": count,
        "step": step,
        "n": len(times),
        "p50_ms": round(statistics.median(times), 2),
        "p95_ms": round(p95, 2),
    }


def _print_table(rows: list[dict[str, float | int | str]], enforced: dict[str, str]) -> None:
    print(
        f"{'at once':>7}  {'step':20} {'n':>5} {'p50 ms':>8} {'p95 ms':>8} {'x plain':>8}  aim p50"
    )
    plain = {row["at_once"]: float(row["p50_ms"]) for row in rows if row["step"] == "plain bwrap"}
    for row in rows:
        ratio = float(row["p50_ms"]) / plain[row["at_once"]]
        aim = AIM_MS.get(str(row["step"])) if row["at_once"] == 1 else None
        print(
            f"{row['at_once']:>7}  {row['step']:20} {row['n']:>5} {row['p50_ms']:>8.2f}"
            f" {row['p95_ms']:>8.2f} {ratio:>8.2f}  {f'< {aim:.0f}' if aim else ''}"
        )
    print("limits: " + ", ".join(f"{limit} by {how}" for limit, how in enforced.items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=128, help="measurements of each step")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
