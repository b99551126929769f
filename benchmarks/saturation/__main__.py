"""`python -m benchmarks.saturation`: throughput and turn times against the agents of one engine.

The engine is a model of vLLM's scheduler. Its steps take the time in `vllm_cpu.json` (a real vLLM on
CPU, by `python -m benchmarks.saturation.fit`), scaled to the given ratio of tool time. The pool, its
leases, queue and capacity are the gateway's own; the clock is virtual.
"""

import argparse
import json
import logging
from dataclasses import asdict

import structlog

from benchmarks.saturation import clock, law
from benchmarks.saturation.agents import Job, Result, play

POLICIES = ("adaptive", "fixed 64", "fixed 128")
HEAD = ("policy", "agents", "busy", "tokens", "p50", "p95", "hits", "preempted", "limit")
ROW = "{:10} {:>6} {:>6} {:>7} {:>7} {:>7} {:>6} {:>9} {:>6}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saturation", description=__doc__)
    parser.add_argument("--agents", default="8,16,32,64,128,256")
    parser.add_argument(
        "--context", default=str(Job(1).context), help="mean tokens of a context; several"
    )
    parser.add_argument("--kv-tokens", default=str(Job(1).kv_tokens), help="several")
    parser.add_argument("--ratio", default="20", help="tool seconds per engine second; several")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--fresh", action="store_true", help="all agents begin at once")
    parser.add_argument("--cycles", type=int, default=Job(1).cycles)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=quiet)
    measured, told = law.read(), []
    for ratio in options.ratio.split(","):
        for kv_tokens in map(int, options.kv_tokens.split(",")):
            for context in map(int, options.context.split(",")):
                if not options.json:
                    fits = kv_tokens * 0.9 / context
                    print(f"\nratio {ratio}, contexts of {context} tokens, {fits:.0f} of them fit")
                    print(ROW.format(*HEAD))
                for agents in map(int, options.agents.split(",")):
                    for policy in options.policies.split(","):
                        job = Job(
                            agents,
                            context,
                            kv_tokens,
                            float(ratio),
                            fresh=options.fresh,
                            cycles=options.cycles,
                        )
                        result = clock.run(play(policy, job, measured))
                        told.append(result)
                        if not options.json:
                            print(_row(result), flush=True)
    if options.json:
        print(json.dumps([asdict(result) for result in told], indent=1))


def _row(result: Result) -> str:
    return ROW.format(
        result.policy,
        result.job.agents,
        f"{result.busy:.0%}",
        f"{result.gain:.2f}",
        f"{result.p50_s:.2f}",
        f"{result.p95_s:.2f}",
        f"{result.hits:.0%}",
        result.preemptions,
        result.limit,
    )


if __name__ == "__main__":
    main()
