"""Scripted engines on several ports of one process, as many as the sessions need.

A gateway gives an engine at most 128 agents; further agents wait. Here no agent may wait, because we
measure the gateway and not its queue.

    python -m benchmarks.gateway_load.load_engines --count 14 --scripts scripts.json --latency 1.0
"""

import argparse
import asyncio
import contextlib
import json
import math
from pathlib import Path

from perdure.engines.pool.engine_capacity import LEAST_AGENTS
from perdure.testing.scripted_engine import CacheModel, ScriptedEngine

AGENTS = LEAST_AGENTS * 3 // 4
"""Sessions per engine. This is below its first limit, because direct calls count as load too."""
KV_TOKENS = 1 << 23
"""Twice as many tokens as 128 contexts of 30k tokens need."""


def needed(sessions: int) -> int:
    """The number of engines that this many sessions need."""
    return max(1, math.ceil(sessions / AGENTS))


async def _run(options: argparse.Namespace) -> None:
    scripts = json.loads(options.scripts.read_text())
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            ScriptedEngine(scripts, latency_s=options.latency, cache=CacheModel(KV_TOKENS))
            for _ in range(options.count)
        ]
        for engine in engines:
            await stack.enter_async_context(engine)
        print(",".join(engine.url for engine in engines), flush=True)
        await asyncio.Event().wait()  # until it is killed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_load.load_engines")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--latency", type=float, required=True, help="seconds per completion")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
