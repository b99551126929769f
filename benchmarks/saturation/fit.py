"""`python -m benchmarks.saturation.fit --url URL --worker PID`: fits the step times of a running
vLLM and writes the file that the benchmark reads.

It counts the CPU of the one-threaded worker process, so that other load on the host hardly matters. On
a quiet host that is the wall time without the server's time between steps. Decode: several streams at
once with cached prompts. Prefill: an uncached prompt, for one token. Start the engine with
`--max-model-len 32768` and one OMP thread.
"""

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product

import httpx

from benchmarks.measuring import own_seconds
from benchmarks.saturation.law import FITTED, Decode, Prefill, fitted
from perdure.engines.clients.vllm_control import Vitals, read_vitals

VOCABULARY = 140_000
BATCHES = (1, 8, 32)
CONTEXTS = (256, 4096)
LENGTHS = (512, 2048, 8192, 16_384)
TOKENS = 128
"""Tokens that each stream samples."""


class Measured:
    """One engine, called directly."""

    def __init__(self, url: str, worker: int, client: httpx.AsyncClient) -> None:
        self._url, self._worker, self._client = url, worker, client
        self._random = random.Random(
            time.time_ns()
        )  # so that no prompt is cached from an earlier fit

    async def decode(self, streams: int, context: int) -> Decode:
        prompts = [self._prompt(context) for _ in range(streams)]
        await asyncio.gather(*(self._ask(prompt, 1) for prompt in prompts))
        before, began = await self._vitals(), own_seconds(self._worker)
        await asyncio.gather(*(self._ask(prompt, TOKENS) for prompt in prompts))
        after, seconds = await self._vitals(), own_seconds(self._worker) - began
        steps = (after.steps or 0.0) - (before.steps or 0.0)
        sampled = (after.tokens or 0.0) - (before.tokens or 0.0)
        return Decode(sampled / steps, context + TOKENS // 2, seconds / steps)

    async def prefill(self, length: int) -> Prefill:
        prompt = self._prompt(length)
        began = own_seconds(self._worker)
        await self._ask(prompt, 1)
        return Prefill(length, own_seconds(self._worker) - began)

    async def _ask(self, prompt: list[int], tokens: int) -> None:
        sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 1}
        body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
        answer = await self._client.post(f"{self._url}/inference/v1/generate", json=body)
        answer.raise_for_status()

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(1000, VOCABULARY) for _ in range(length)]

    async def _vitals(self) -> Vitals:
        return read_vitals((await self._client.get(f"{self._url}/metrics")).text)

    async def kv_tokens(self) -> int | None:
        return (await self._vitals()).kv_tokens


async def measure(url: str, worker: int, rounds: int) -> dict[str, object]:
    """The fastest time of each point, because other load only adds, and the law fitted to them."""
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        engine = Measured(url, worker, client)
        await engine.decode(1, 256)  # an engine's first request is slow
        decodes, prefills = [], []
        for context, batch in product(CONTEXTS, BATCHES):
            found = [await engine.decode(batch, context) for _ in range(rounds)]
            decodes.append(min(found, key=lambda one: one.step_s))
        for length in LENGTHS:
            again = [await engine.prefill(length) for _ in range(rounds)]
            prefills.append(min(again, key=lambda one: one.seconds))
        return {
            "law": asdict(fitted(decodes, prefills)),
            "kv_tokens": await engine.kv_tokens(),
            "decodes": [one._asdict() for one in decodes],
            "prefills": [one._asdict() for one in prefills],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.saturation.fit", description=__doc__
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--worker", type=int, required=True, help="pid of VLLM::Worker")
    parser.add_argument(
        "--engine", required=True, help="which model, version and host, for the file"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = asyncio.run(measure(options.url, options.worker, options.rounds))
    told = {
        "engine": options.engine,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m benchmarks.saturation.fit --rounds {options.rounds} --url URL --worker PID",
        "host": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end",
    }
    FITTED.write_text(json.dumps({**told, **found}, indent=1) + "\n")
    print(FITTED.read_text())


if __name__ == "__main__":
    main()
