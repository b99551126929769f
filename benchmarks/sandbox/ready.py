"""How long a rollout waits for its sandbox: booted on demand, or taken from the ready ones.

    python -m benchmarks.sandbox.ready [--rounds N] [--provider bubblewrap|e2b] [--json]

Both take turns in one run. `e2b` is the real SDK against the double, whose sandboxes run on this host.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from perdure import registry
from perdure.rollouts.sandbox.ready import ReadySandboxes, Unmetered
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.settings.tree import Settings
from perdure.storage.local import LocalStore

READY = 2


async def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        async with _service(arguments.provider, Path(folder)):
            times = await _measure(arguments.provider, Path(folder), arguments.rounds)
    rows = [{"sandbox": name, **_summary(found)} for name, found in times.items()]
    if arguments.json:
        print(json.dumps({"provider": arguments.provider, "rows": rows}))
        return
    for row in rows:
        print(
            f"{arguments.provider:11} {row['sandbox']:6} p50 {row['p50']:8} ms  p95 {row['p95']:8} ms"
        )


async def _measure(name: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    tree = folder / "tree"
    tree.mkdir()
    (tree / "file").write_text("base\n")
    home = folder / "home"
    provider: SandboxProvider = registry.load("sandbox", registry.SANDBOXES, name)(
        Settings(home=home)
    )
    spec = SandboxSpec("/testbed", tree=tree, labels={"run": "bench", "rollout": "bench"})
    ready = ReadySandboxes(
        Settings(home=home, sandbox={"ready": READY}), LocalStore(str(home / "store")), {}
    )
    times: dict[str, list[float]] = {"booted": [], "ready": []}
    free = Unmetered()
    try:
        for number in range(rounds):
            ready.refill(provider, spec, free)
            await ready.filled()
            started = time.perf_counter()
            box = await provider.create(spec, f"bench-{number}")
            times["booted"].append((time.perf_counter() - started) * 1e3)
            started = time.perf_counter()
            taken = await ready.take(provider, spec, f"bench-{number}", f"taking-{number}")
            times["ready"].append((time.perf_counter() - started) * 1e3)
            assert taken is not None
            await asyncio.gather(box.kill(), taken.kill())
    finally:
        await ready.close()
    return times


@contextlib.asynccontextmanager
async def _service(name: str, folder: Path) -> AsyncIterator[None]:
    if name != "e2b":
        yield
        return
    from perdure.testing.e2b_server import serving

    async with serving(folder / "server") as (server, url):
        os.environ |= {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": "e2b_0"}
        try:
            yield
        finally:
            for record in server.sandboxes.all():
                await server.guests.kill(record["id"])


def _summary(times: list[float]) -> dict[str, float]:
    ranked = sorted(times)
    return {
        "p50": round(statistics.median(ranked), 1),
        "p95": round(ranked[min(len(ranked) - 1, int(len(ranked) * 0.95))], 1),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--provider", default="bubblewrap", choices=("bubblewrap", "e2b"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
