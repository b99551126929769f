"""A scripted engine in its own process that logs a line per request and chunk, so that counts survive it.

python -m benchmarks.preemption.engine --port 0 --log engine.log --scripts scripts.json
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.requests import Request

from perdure.testing.scripted_engine import CHUNK, CacheModel, ScriptedEngine


class LoggedEngine(ScriptedEngine):
    """Writes `request_id arrived`, then `request_id time tokens` for each chunk sent."""

    def __init__(self, log: Path, scripts: dict[str, Any], **options: Any) -> None:
        super().__init__(scripts, **options)
        self._log = log.open("ab", buffering=0)

    async def _stream(self, request: Request, job: Any) -> AsyncIterator[bytes]:
        name, left = request.headers["x-request-id"], len(job.token_ids)
        self._log.write(f"{name} {time.time()} 0\n".encode())
        async for event in super()._stream(request, job):
            if left:
                self._log.write(f"{name} {time.time()} {min(CHUNK, left)}\n".encode())
                left -= min(CHUNK, left)
            yield event


async def _run(options: argparse.Namespace) -> None:
    engine = LoggedEngine(
        options.log,
        json.loads(options.scripts.read_text()),
        port=options.port,
        chunk_delay_s=CHUNK / options.tokens_per_s,
        cache=CacheModel(block=16, prefill_per_s=options.prefill_per_s),
    )
    async with engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()  # until it is killed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemption.engine")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--tokens-per-s", type=float, default=50.0)
    parser.add_argument("--prefill-per-s", type=float, default=30_000.0)
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
