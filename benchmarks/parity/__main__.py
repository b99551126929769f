"""`python -m benchmarks.parity`: scores recorded tokens of rollouts again with transformers.

A real vLLM samples conversations through the gateway, greedily and at random; with `--every-mode` also
with temperature, top_p and penalties. Then transformers, in its own environment, reads exactly the
recorded ids, in the served dtype and in float32. The report has the distance of its logprobs from the
recorded ones, the effect on a trainer's importance ratios, and whether greedy ids agree. It also has
tokens per second of both and of the engine alone. `--device cuda` runs everything on a GPU; without a GPU
the report says that it was not run.
"""

import argparse
import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path

from benchmarks import vllm_server
from benchmarks.parity.parity_conversations import MODES, TIMED, Job
from benchmarks.parity.parity_figures import Figures
from benchmarks.parity.parity_measurement import EXACT, Report, Stand, measure
from benchmarks.scratch_folder import scratch_folder


def show(report: Report, stand: Stand) -> None:
    ran = report.transformers[0]
    print(f"{stand.model} served in {stand.dtype} on {ran.device}; transformers {ran.version}")
    print(
        f"{'turns':9} {'scored in':>9} {'tokens':>7} {'spread':>7} {'mean':>9} {'p99':>9} {'max':>9}"
        f" {'ratio min / p1 / p99 / max':>31} {'of a turn':>15} {'KL (k3)':>9}  greedy ids equal"
    )
    for found in report.figures:
        print(_line(found))
    for one in report.speeds:
        print(
            f"tokens/s, {one.mode} ({one.tokens} tokens): through the gateway {one.gateway:.1f}, "
            f"straight at vLLM {one.straight:.1f}"
        )
    for each in report.transformers:
        print(f"tokens/s, transformers generate in {each.dtype}: {each.generated_per_s:.1f}")
    if stand.device != "cuda":
        print("cuda: not run")
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")


def _line(found: Figures) -> str:
    ratios = " / ".join(f"{ratio:.4f}" for ratio in found.ratio)
    whole = " / ".join(f"{ratio:.3f}" for ratio in found.turn_ratio)
    k3 = "" if found.k3 is None else f"{found.k3:.2e}"
    return (
        f"{found.mode:9} {found.scored_in:>9} {found.tokens:7} {found.spread:7.3f} {found.mean:9.2e} "
        f"{found.p99:9.2e} {found.max:9.2e} {ratios:>31} {whole:>15} {k3:>9}  {_equal(found)}"
    ).rstrip()


def _equal(found: Figures) -> str:
    if found.differences is None:
        return ""
    equal = f"{found.turns - len(found.differences)} of {found.turns} turns"
    if not found.differences:
        return equal
    first = min(found.differences, key=lambda one: one.position)
    worst = max(one.behind for one in found.differences)
    return f"{equal}; the first at {first.position}, {first.behind:.4f} behind; {worst:.4f} at most"


def _stand(options: argparse.Namespace) -> Stand:
    stock = options.model == vllm_server.MODEL
    return Stand(
        model=options.model,
        tokenizer=options.tokenizer or ("qwen3" if stock else str(options.model)),
        dtype=options.dtype,
        device=options.device,
        vllm=options.vllm,
        python=options.python or options.vllm.with_name("python"),
        modes=tuple(MODES) if options.every_mode else TIMED,
        engine_url=options.engine_url,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=vllm_server.MODEL, help="folder with weights and tokenizer"
    )
    parser.add_argument(
        "--tokenizer", help="as PERDURE_ENGINE__TOKENIZER; default: the model's folder"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", EXACT), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--vllm", type=Path, default=vllm_server.PROGRAM, help="path of the program vllm"
    )
    parser.add_argument(
        "--python", type=Path, help="a Python with transformers; default: the one next to --vllm"
    )
    parser.add_argument(
        "--engine-url",
        default="",
        help="URL of a vLLM that serves --model in --dtype; default: start one",
    )
    parser.add_argument(
        "--every-mode",
        action="store_true",
        help="also sample with temperature, top_p and penalties",
    )
    parser.add_argument("--json", action="store_true")
    for name, value in asdict(Job()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    job = Job(**{name: getattr(options, name) for name in asdict(Job())})
    stand = _stand(options)
    with scratch_folder("perdure-parity-", keep=False) as folder:
        report = asyncio.run(measure(stand, job, folder))
    if options.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        show(report, stand)


if __name__ == "__main__":
    main()
