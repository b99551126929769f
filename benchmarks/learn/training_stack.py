"""The processes of `make learn`: the laptop stack, vLLM on Ray, the expert, the trainer.

All of them run under one meter, so that a kill of everything reaches each of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu_measurement import Meter, kill_all, kill_tree
from benchmarks.learn import toy_vocabulary
from benchmarks.learn.training_plan import Plan, Trainer
from benchmarks.perdure_stack import PERDURE, ROOT, Home, Stack
from benchmarks.vllm_server import EVERYWHERE, ON_CPU, VLLM
from perdure.python_interpreters import find_uv
from perdure.stack.stack_ports import free_port

PYTHON = VLLM / "venv/bin/python"
TRL = "trl==1.16.0"
PROGRAMS: dict[Trainer, str] = {"own": "training_loop", "trl": "trl_training"}
START_S = 600.0
"""Timeout of the stack's start on a busy host."""
DEAD_S = 60.0
CONTEXT = 512


@dataclass(frozen=True)
class LearnHome(Home):
    """A home without an engine in its settings; its engines are in the roster."""

    tokenizer: Path = Path()
    agents: int = 16

    def environment(self) -> dict[str, str]:
        return super().environment() | {
            "PERDURE_ENGINE__TOKENIZER": str(self.tokenizer),
            "PERDURE_ENGINE__TOOL_CALL_PARSER": toy_vocabulary.TOOL_CALL_PARSER,
            "PERDURE_SLOTS__AGENT": str(self.agents),
            "RAY_AUTH_MODE": "disabled",
        }


class Live:
    """A running stack and the commands that it gets."""

    def __init__(self, home: LearnHome, meter: Meter) -> None:
        self.home = home
        self.meter = meter
        self.logs = home.folder / "learn-logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.stack = Stack.start(home, meter, START_S)
        self._serves = False

    def perdure(self, *words: str) -> None:
        """Run a perdure command. Raises: RuntimeError with its last output."""
        self._run("perdure", [*PERDURE, *words])

    def in_vllm(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start one of our modules in vLLM's environment."""
        argv = [str(PYTHON), "-m", *words]
        env = self.home.environment() | EVERYWHERE | ON_CPU
        return self.meter.popen(argv, env=env, cwd=ROOT)

    def _run(self, name: str, argv: Sequence[str]) -> None:
        log = self.logs / f"{name}.log"
        if self.meter.run(argv, log, env=self.home.environment(), cwd=ROOT) != 0:
            raise RuntimeError(f"{' '.join(argv)} failed: {log.read_text()[-2000:]}")

    # --- engines -------------------------------------------------------------------------------

    def serve(self, model: Path) -> None:
        """Start vLLM for CPU on Ray and wait until it has sampled a token."""
        transfer = json.dumps({"backend": "perdure-disk"}).replace(" ", "")
        flags = f"--enforce-eager --dtype float32 --max-model-len {CONTEXT} --max-num-seqs 64"
        flags += f" --disable-log-stats --weight-transfer-config '{transfer}'"
        words = ["--model", str(model), "--gpus-per-replica", "0", "--cpus-per-replica", "0.5"]
        words += ["--executable", str(VLLM / "venv/bin/vllm"), "--vllm-args", flags]
        for name, value in (EVERYWHERE | ON_CPU).items():
            words += ["--env", f"{name}={value}"]
        self._serves = True
        self.perdure("engines", "up", *words)

    @contextmanager
    def scripted(self, scripts: Path) -> Iterator[None]:
        """Adds the expert as an engine of the pool inside the context."""
        port = free_port()
        words = ["--port", str(port), "--tokenizer", str(self.home.tokenizer)]
        words += ["--scripts", str(scripts)]
        argv = [sys.executable, "-m", "perdure.testing.scripted_engine", *words]
        with (self.logs / "expert.log").open("ab") as log:
            engine = self.meter.popen(
                argv, env=self.home.environment(), cwd=ROOT, stdout=log, stderr=log
            )
        url = f"http://127.0.0.1:{port}"
        try:
            self.perdure("engines", "add", url, "--kind", "vllm")
            yield
            self.perdure("engines", "remove", url)
        finally:
            engine.terminate()
            engine.wait()

    # --- the trainer, and a kill of everything --------------------------------------------------

    def train(self, plan: Plan) -> "subprocess.Popen[bytes]":
        plan.folder.mkdir(parents=True, exist_ok=True)
        file = plan.folder / "plan.json"
        file.write_text(plan.model_dump_json(indent=1))
        return self.in_vllm(f"benchmarks.learn.trainer.{PROGRAMS[plan.trainer]}", str(file))

    def kill_part(self, part: str, trainer: "subprocess.Popen[bytes]") -> None:
        """Kill -9 the trainer, with the engine in its process, or a process that the stack restarts."""
        if part == "trainer":
            kill_tree(trainer.pid)
            trainer.wait()
        else:
            kill_all([self.stack.pids()[part]], signal.SIGKILL)

    def kill(self) -> int:
        """Kill -9 every process: stack, Temporal, gateway, worker, sandboxes, Ray, vLLM, trainer."""
        killed = kill_everything(self.meter)
        self.stack.wait()
        return killed

    def restart(self) -> None:
        self.stack = Stack.start(self.home, self.meter, START_S)

    def stop(self) -> None:
        if self._serves:
            self.perdure("engines", "down")
        self.stack.stop()


def kill_everything(meter: Meter) -> int:
    """Returns the number of killed processes."""
    first = meter.pids()
    deadline = time.monotonic() + DEAD_S
    while (pids := meter.pids()) and time.monotonic() < deadline:
        kill_all(pids, signal.SIGKILL)
        time.sleep(0.1)
    return len(first)


def installed() -> None:
    """Install vLLM for CPU with TRL and Perdure's client in the same environment. Raises: RuntimeError."""
    mark = VLLM / "learn-with-trl-ready"
    if mark.exists():
        return
    _shell([str(ROOT / "infra/setup/vllm"), str(VLLM)])
    _shell([str(find_uv()), "pip", "install", "-q", "-p", str(PYTHON), f"{ROOT}[trainer]", TRL])
    mark.touch()


def _shell(argv: Sequence[str]) -> None:
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} failed: {done.stderr[-2000:]}")
