"""Measures the gateway's CPU per model call, with 2k to 128k tokens of history.

    python -m benchmarks.turn [--slime CHECKOUT] [--turns N] [--json]

One conversation grows turn by turn through every size, over HTTP, with an engine that answers at once.
The sides are Perdure with default settings, with its store in a folder, the same with an engine that
returns the experts of a mixture of experts, with its store in an in-memory S3 server, and slime's current
adapter in its own environment. Then come the prompt alone, bridged and
rendered in full, and the cost of a streamed token, by how many tokens an engine sends together. All use
the same tokenizer. `benchmarks.host_speed` shows how fast the host was.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx

from benchmarks import host_speed
from benchmarks.peers.peer_environments import Unavailable
from benchmarks.peers.slime import Slime
from benchmarks.turn import prompt_cost, stream_cost, turn_servers
from benchmarks.turn.instant_engine import LAYERS, TOP_K, InstantEngine, some_experts
from benchmarks.turn.prompt_cost import Costs
from benchmarks.turn.stream_cost import STREAMS, TOKENS_PER_S, Streamed
from benchmarks.turn.turn_agent import Agent
from perdure.engines.clients.token_endpoint import npy_of_experts
from perdure.episodes import turns_parquet
from perdure.types import RoutedExperts, Turn

SIZES = (2_000, 16_000, 64_000, 128_000)
FLAT, CHEAPER = 1.5, 30.0
"""The targets: at most this ratio of 128k to 16k; at least this ratio of full rendering to bridging."""

MOST_MS = 10.0
"""The target for a turn with the store in a folder, at every size."""
S3_LATENCY_S = 0.03

IN_S3 = "perdure, store in S3"
ROUTED = f"perdure, experts of {LAYERS} layers x {TOP_K}"
BRIDGED, FULL = "prompt alone, bridged", "prompt alone, in full"


async def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        async with InstantEngine() as engine:
            home = Path(folder)
            puts: Costs = {}
            yardsticks: Costs = {}
            side = turn_servers.perdure(home / "disk", engine.url)
            costs = {"perdure": await _grow(side, engine, options, yardsticks=yardsticks)}
            engine.routes = True
            side = turn_servers.perdure(home / "experts", engine.url)
            costs[ROUTED] = await _grow(side, engine, options)
            engine.routes = False
            with turn_servers.memory_s3(S3_LATENCY_S) as s3:
                side = turn_servers.perdure(home / "s3", engine.url, s3)
                costs[IN_S3] = await _grow(side, engine, options, s3=s3, puts=puts)
            try:
                peer = Slime(options.environments, options.slime)
                costs["slime"] = await _grow(turn_servers.slime(peer, engine.url), engine, options)
            except Unavailable as reason:
                print(f"slime: skipped, {reason}")
            bridged, rendered = await prompt_cost.measure(engine.ids, SIZES, options.turns)
        streamed = await stream_cost.measure(home / "streams", options.rounds)
    costs |= {BRIDGED: bridged, FULL: rendered}
    if options.json:
        print(
            json.dumps(
                {
                    "turns_ms": costs,
                    "puts": puts,
                    "token_us": streamed._asdict(),
                    "experts_bytes_per_1000_tokens": _experts_bytes(),
                    "yardstick_ms": yardsticks,
                }
            )
        )
    else:
        _print_table(costs, puts, yardsticks)
        _print_streamed(streamed)
        print(f"bytes of experts a 1,000 tokens: {_experts_bytes()}")


def _experts_bytes() -> dict[str, int]:
    """In an array, as vLLM sends them, as the journal keeps them, and in the file of a closed session."""
    rows = some_experts(1000)
    kept = RoutedExperts.of(rows, 0)
    turn = Turn(index=0, routed_experts=kept)
    stored = len(turns_parquet.encode([turn])) - len(turns_parquet.encode([Turn(index=0)]))
    sizes = {"array": rows.nbytes, "vllm": len(npy_of_experts(rows))}
    return sizes | {"journal": len(kept.model_dump(mode="json")["data"]), "turns_file": stored}


async def _grow(
    side: AbstractAsyncContextManager[turn_servers.Serving],
    engine: InstantEngine,
    options: argparse.Namespace,
    *,
    s3: turn_servers.MemoryS3 | None = None,
    puts: Costs | None = None,
    yardsticks: Costs | None = None,
) -> Costs:
    """Median CPU ms per turn of the server's processes, at each size. Fills `puts` with the PUTs per turn
    and `yardsticks` with the yardstick at the same time."""
    found: Costs = {}
    async with (
        side as serving,
        httpx.AsyncClient(base_url=serving.url, timeout=120, trust_env=False) as client,
    ):
        agent = Agent(client, serving.key)
        await agent.turn()
        for size in SIZES:
            while engine.prompt_tokens < size:
                await agent.turn()
            spent, speed, written = [], [], s3.puts() if s3 else 0
            for _ in range(options.turns):
                before = turn_servers.cpu_ms(serving.pid)
                await agent.turn(short=True)
                spent.append(turn_servers.cpu_ms(serving.pid) - before)
                speed.append(host_speed.measure())
            found[size] = statistics.median(spent)
            if yardsticks is not None:
                yardsticks[size] = statistics.median(speed)
            if s3 and puts is not None:
                puts[size] = (s3.puts() - written) / options.turns
    return found


def _print_table(costs: dict[str, Costs], puts: Costs, yardsticks: Costs) -> None:
    print("| CPU ms a turn, median | " + " | ".join(f"{s // 1000}k" for s in SIZES) + " |")
    print("|---|" + "---|" * len(SIZES))
    for side, row in costs.items():
        print(f"| {side} | " + " | ".join(f"{row[size]:.1f}" for size in SIZES) + " |")
    print("| PUTs a turn | " + " | ".join(f"{puts[size]:.1f}" for size in SIZES) + " |")
    beside = [yardsticks[size] for size in SIZES]
    print("| the yardstick beside perdure's | " + " | ".join(f"{ms:.1f}" for ms in beside) + " |")
    parts = [costs["perdure"][size] / yardsticks[size] for size in SIZES]
    print("| perdure / the yardstick | " + " | ".join(f"{part:.3f}" for part in parts) + " |")
    a_second = ", ".join(f"{1e3 / costs['perdure'][size]:.0f} at {size // 1000}k" for size in SIZES)
    print(f"\nturns a second of one process on one core: {a_second}")
    print(f"most: {max(costs['perdure'].values()):.1f} ms (aim: {MOST_MS:g})")
    ours, bridged, full = costs["perdure"], costs[BRIDGED], costs[FULL]
    print(f"128k over 16k: {ours[128_000] / ours[16_000]:.2f} x (aim: at most {FLAT} x)")
    cheaper = {size: full[size] / bridged[size] for size in SIZES}
    print(f"in full over bridged: {_ratios(cheaper)} (aim: {CHEAPER:g} x at 128k)")
    if "slime" in costs:
        print(f"slime over perdure: {_ratios({s: costs['slime'][s] / ours[s] for s in SIZES})}")


def _print_streamed(streamed: Streamed) -> None:
    print(
        f"\nCPU us a token, {STREAMS} calls at once, {TOKENS_PER_S:g} tokens a second each: "
        f"{streamed.as_asked:.0f} in events of {streamed.together}, as engines are asked to send "
        f"them, {streamed.one_by_one:.0f} one by one, "
        f"{streamed.at_the_end:.0f} all in the last event: {streamed.event:.0f} for an event"
    )


def _ratios(values: Costs) -> str:
    return ", ".join(f"{value:.1f} x at {size // 1000}k" for size, value in values.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slime", type=Path, metavar="CHECKOUT")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of streams")
    parser.add_argument("--environments", type=Path, default=Path(".perdure/bench/environments"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
