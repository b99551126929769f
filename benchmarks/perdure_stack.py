"""Perdure's side of a comparison: starts, uses and stops the whole laptop stack by Perdure's own CLI.

All processes run under one meter: Temporal's server, gateway, worker, supervisor, sandboxes.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common_job
from benchmarks.cpu_measurement import (
    Meter,
    ended_children_cpu_seconds,
    ended_if_interrupted,
    kill_all,
    own_seconds,
)
from perdure.instances import instance_catalog
from perdure.instances.rows.content_diffs import added_file
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_state
from perdure.stack.stack_ports import free_port
from perdure.stack.stack_state import StackState
from perdure.storage.base import put_blob
from perdure.storage.store_url import open_store
from perdure.types import Environment, Grading, Instance, Source, SourceKind, Twin, TwinDraw

ROOT = Path(__file__).resolve().parents[1]
PERDURE = (sys.executable, "-m", "perdure.cli.main")
START_LIMIT_S = 1800.0
"""`perdure up` gives up sooner by itself, unless the host is so busy that its start is slow."""
DATASET = "toy"
EMPTY = "perdure.toml"
"""An empty settings file, so that a benchmark does not read the settings of its working directory."""


def _free_ports() -> dict[str, str]:
    """We avoid the default ports, because another stack may run on this machine."""
    names = ("PERDURE_TEMPORAL__PORT", "PERDURE_TEMPORAL__UI_PORT", "PERDURE_GATEWAY__PORT")
    return {name: str(free_port()) for name in names}


@dataclass(frozen=True)
class Home:
    """One PERDURE_HOME of the benchmark: settings, instances, logs. It survives restarts."""

    folder: Path
    engine_url: str
    ports: Mapping[str, str] = field(default_factory=_free_ports)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further settings of its processes."""

    @property
    def settings(self) -> Settings:
        return Settings(home=self.folder, store=str(self.folder / "store"))

    def environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "TEMPORAL_"))}
        return env | {
            "PERDURE_HOME": str(self.folder),
            "PERDURE_CONFIG": str(self.folder / EMPTY),
            "PERDURE_ENGINE__URL": self.engine_url,
            "PERDURE_ENGINE__KIND": "vllm",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
            **self.ports,
            **self.variables,
        }

    def add_instances(self, tree: Path, count: int, *, with_twins: bool = False) -> None:
        """Add `count` copies of the toy instance, which the hidden test grades in a fresh sandbox."""
        asyncio.run(self._add(tree, count, with_twins))

    async def _add(self, tree: Path, count: int, with_twins: bool) -> None:
        store = open_store(self.settings)
        key = await put_blob(store, common_job.pack(tree))
        grading = _graded_with_twins() if with_twins else _graded_by_exit_code()
        for name in common_job.instance_ids(count):
            await instance_catalog.save(store, _instance(name, key, grading))


def _instance(name: str, key: str, grading: Grading) -> Instance:
    return Instance(
        instance_id=name,
        dataset=DATASET,
        problem_statement=common_job.STATEMENT,
        source=Source(kind=SourceKind.BLOB, key=key),
        environment=Environment(workdir="/testbed"),
        grading=grading,
        gold_patch=common_job.GOLD,
    )


def _graded_by_exit_code() -> Grading:
    return Grading(
        protocol="eval_cmd",
        eval_cmd=f"{common_job.PYTHON} test_calc.py",
        test_patch=added_file("test_calc.py", common_job.TEST.encode()),
        timeout_s=60.0,
    )


def _graded_with_twins() -> Grading:
    """The same assertion as a unittest: a script's exit code does not give the status of a test."""
    lines = common_job.UNITTEST.encode().splitlines()
    number = lines.index(common_job.ASSERTION.encode())
    twin = Twin(
        tests=(common_job.UNITTEST_ID,),
        path=common_job.UNITTEST_PATH,
        line=number + 1,
        before=lines[number],
        after=lines[number].replace(b"5", b"6"),
        rule="number",
    )
    hidden = {
        common_job.RUNNER_PATH: common_job.RUNNER,
        common_job.UNITTEST_PATH: common_job.UNITTEST,
    }
    return Grading(
        protocol="swebench",
        test_cmd=f"{common_job.PYTHON} {common_job.RUNNER_PATH} sums.tests",
        log_parser="parse_log_django",
        test_patch=b"".join(added_file(path, text.encode()) for path, text in hidden.items()),
        fail_to_pass=(common_job.UNITTEST_ID,),
        twin_draws=(TwinDraw(runs=((twin,),)),),
        timeout_s=60.0,
    )


class Stack:
    """A running stack. `split` gives the CPU of each of its parts."""

    def __init__(self, home: Home, meter: Meter, process: "subprocess.Popen[bytes]") -> None:
        self.home = home
        self.meter = meter
        self._process = process
        self._runs_took = 0.0

    @classmethod
    def start(cls, home: Home, meter: Meter, limit_s: float = START_LIMIT_S) -> "Stack":
        """Run `perdure up` and wait until it is ready. Raises: RuntimeError with the supervisor's message."""
        log = home.folder / "up.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        (home.folder / EMPTY).touch()
        with log.open("ab") as file:
            process = meter.popen(
                [*PERDURE, "up", "--foreground"],
                env=home.environment(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        stack = cls(home, meter, process)
        deadline = time.monotonic() + limit_s
        with ended_if_interrupted(process, signal.SIGTERM):
            while not stack._is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"`perdure up` failed: {log.read_text()[-2000:]}")
                time.sleep(0.02)
        return stack

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def state(self) -> StackState:
        found = stack_state.read(self.home.settings)
        if found is None:
            raise RuntimeError("no stack is running here")
        return found

    def run(self, arguments: list[str], log: Path) -> dict[str, Any]:
        """Run `perdure run toy ARGUMENTS --json` and return its document. Raises: RuntimeError."""
        argv = [*PERDURE, "run", DATASET, *arguments, "--json"]
        before = ended_children_cpu_seconds()
        with log.open("ab") as file:
            process = self.meter.popen(
                argv,
                env=self.home.environment(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
            )
            with ended_if_interrupted(process):
                out, _ = process.communicate()
        self._runs_took += ended_children_cpu_seconds() - before
        if not out:
            raise RuntimeError(f"`perdure run` printed nothing: {log.read_text()[-2000:]}")
        document: dict[str, Any] = json.loads(out)
        return document

    def split(self) -> dict[str, float]:
        """CPU seconds so far, by part. `sandboxes` is the rest: short-lived and other processes."""
        parts = {name: own_seconds(pid) for name, pid in self.pids().items()}
        if self._runs_took:
            parts["perdure run"] = self._runs_took
        return parts | {"sandboxes": self.meter.seconds() - sum(parts.values())}

    def pids(self) -> dict[str, int]:
        """The pids of each supervised process and of the supervisor."""
        state = self.state()
        pids = {name: child.pid for name, child in state.children.items()}
        return pids | {"supervisor": state.pid}

    def stop(self) -> None:
        """Stop the stack by SIGTERM, which does the same as `perdure down`."""
        os.kill(self.state().pid, signal.SIGTERM)
        self._process.wait()

    def kill(self) -> list[int]:
        """Send SIGKILL to every Perdure process and to Temporal's server, but not to sandboxes."""
        state = self.state()
        pids = [state.pid, *(child.pid for child in state.children.values())]
        kill_all(pids, signal.SIGKILL)
        self._process.wait()
        return pids

    def wait(self) -> None:
        """Wait until the supervisor has ended."""
        self._process.wait()

    def _is_ready(self) -> bool:
        state = stack_state.read(self.home.settings)
        return state is not None and state.alive and state.status == "ready"


def right_answers(document: Mapping[str, Any]) -> int:
    return sum(rollout["reward"] == 1 for rollout in document["rollouts"])
