"""The process behind `perdure up`: starts the parts of a stack, keeps them running, stops them.

`python -m perdure.stack [--engine E] [--report-fd N]`. Each home has at most one: it holds a file lock
until it ends. It reports each step as a JSON line on the given descriptor.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from perdure.client.temporal_server import configured_address
from perdure.engines.reported_model import engine_settings
from perdure.errors import ConfigurationError, PerdureError
from perdure.gateway.http import listening_sockets
from perdure.home_folder import keep_private
from perdure.installation import service_folder
from perdure.sandboxes.host import procfs
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness, stack_state, start_limit
from perdure.stack.child_restarts import Child, ChildSpec, with_parent_death_signal
from perdure.stack.engine_presence import forget_scripted, key_digest
from perdure.stack.error_lines import USAGE, explain
from perdure.stack.hang_detection import Watch
from perdure.stack.process_stopping import identify, stop
from perdure.stack.stack_plan import Addresses, Plan, gateway_names
from perdure.stack.stack_state import StackState
from perdure.telemetry import configure_logging

CHECK_EVERY_S = 10.0
STACKS_S = 1.0
"""Seconds that a hanging part gets to log the stacks of its threads before it is killed."""
EARLY_EXITS = 3
"""The start fails when a part has ended this often before it was ready."""
PORT_TRIES = 3
FINAL_EVENTS = ("ready", "failed")
"""The report ends with one of these."""

Report = Callable[[dict[str, Any]], None]
Answer = TypeVar("Answer")

log = structlog.get_logger("perdure.supervisor")


class StartFailed(PerdureError):
    """A part did not start; the message ends with the end of its log."""


class TemporalSetupFailed(PerdureError):
    """Temporal refused a change that rollouts need."""


class Supervisor:
    """One stack, from its first process to its last."""

    def __init__(self, plan: Plan, report: Report, listeners: Sequence[int]) -> None:
        """`listeners`: descriptors of the gateway's sockets, which outlive the gateway's processes."""
        self.plan = plan
        self.listeners = listeners
        self.report = report
        self.status = "starting"
        self.children: dict[str, Child] = {}
        self._up: set[str] = set()
        self.namespace = "default"
        self._me = identify(os.getpid())
        self._engine_key = key_digest(plan.childrens_settings())

    async def run(self, stopping: asyncio.Event) -> None:
        """Start everything, keep it running until `stopping` is set, then stop everything.

        Raises: StartFailed, TemporalSetupFailed, ConfigurationError.
        """
        try:
            start = asyncio.create_task(self._start())
            stopped = asyncio.create_task(stopping.wait())
            await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
                await self._keep(stopped)
            else:
                start.cancel()
                await asyncio.gather(start, return_exceptions=True)
        except TimeoutError:
            raise StartFailed(self._what_is_late()) from None
        finally:
            await self._stop()

    async def _start(self) -> None:
        await start_limit.limited(self._start_everything(), self._works)

    def _works(self) -> bool:
        """Whether a part that has not answered yet is working."""
        starting = (child.state for name, child in self.children.items() if name not in self._up)
        return any(procfs.is_busy(process.pid) for process in starting if process is not None)

    async def _start_everything(self) -> None:
        engine = self.plan.scripted_engine()
        await self._start_temporal()
        if engine is not None:
            await self._launch(engine)
        gateways = self.plan.gateways(self.listeners)
        for spec in gateways:
            await self._launch(spec)
        await self._launch(self.plan.worker())
        for spec in gateways:
            health = self.plan.health_socket(spec.name)
            await self._answered(spec.name, part_readiness.wait_for_socket(health))
        if engine is not None:
            url = f"{self.plan.engine_url}/health"
            await self._answered("engine", part_readiness.wait_for_http(url))
        health = self.plan.health_socket("worker")
        await self._answered(
            "worker", part_readiness.wait_for_socket(health, part_readiness.POLLED)
        )
        self._set_status("ready")
        self.report({"event": "ready"})
        log.info("ready", children=list(self.children))

    async def _start_temporal(self) -> None:
        if self.plan.addresses.temporal_address is not None:
            prepared = await self._start_own_temporal()
        else:
            prepared = await self._answered("temporal", self._prepare_temporal())
        self.namespace = prepared["namespace"]
        if prepared["warning"]:
            self.report({"event": "warning", "text": prepared["warning"]})

    async def _start_own_temporal(self) -> dict[str, str]:
        """Another process may take a port after we have checked it; then we retry with other ports."""
        for _ in range(PORT_TRIES - 1):
            try:
                return await self._launch_temporal()
            except StartFailed:
                await self.children.pop("temporal").stop()
                chosen = self.plan.addresses.elsewhere(self.plan.settings)
                self.plan = replace(self.plan, addresses=chosen)
        return await self._launch_temporal()

    async def _launch_temporal(self) -> dict[str, str]:
        await self._launch(self.plan.temporal())
        return await self._answered("temporal", self._prepare_temporal(), tries=1)

    async def _prepare_temporal(self) -> dict[str, str]:
        """Wait until the server answers; return the namespace and a warning.

        Raises: ConfigurationError, TemporalSetupFailed.
        """
        process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(self.plan.temporal_setup()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.plan.environment(),
            cwd=self.plan.root,
        )
        try:
            answer, errors = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode == 0:
            prepared: dict[str, str] = json.loads(answer)
            return prepared
        told = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise (ConfigurationError if process.returncode == USAGE else TemporalSetupFailed)(told)

    async def _launch(self, spec: ChildSpec) -> None:
        child = Child(spec, self.plan.home / "logs", self._write)
        self.children[spec.name] = child
        await child.start()
        log.info("started", name=spec.name, pid=child.state.pid if child.state else None)

    async def _answered(
        self, name: str, wait: Coroutine[Any, Any, Answer], tries: int = EARLY_EXITS
    ) -> Answer:
        """Wait for the child called `name` and return the result of `wait`.

        Raises: StartFailed if the child has ended `tries` times; ConfigurationError if its settings are
        wrong.
        """
        waiting = asyncio.create_task(wait)
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=part_readiness.PAUSE_S)
                child = self.children.get(name)
                if child is None or waiting.done():
                    continue
                if (
                    child.refused and name != "temporal"
                ):  # Go programs end with this code when they crash
                    raise ConfigurationError(child.log_end(1))
                if child.exits >= tries:
                    raise StartFailed(f"{name} does not start: {child.log_end(1)}")
        finally:
            waiting.cancel()
        self._up.add(name)
        self.report({"event": "up", "name": name})
        return waiting.result()

    async def _keep(self, stopped: "asyncio.Task[Any]") -> None:
        """Check every part every ten seconds; restart a part that hangs."""
        temporal = functools.partial(part_readiness.answers, self.plan.temporal_health)
        checks = {"temporal": temporal}
        for name in (*self._gateways(), "worker"):
            health = self.plan.health_socket(name)
            checks[name] = functools.partial(part_readiness.socket_answers, health)
        pids = {name: child.state.pid for name, child in self.children.items() if child.state}
        watches = {name: Watch(check, pids.get(name, 0)) for name, check in checks.items()}
        while not stopped.done():
            await asyncio.wait({stopped}, timeout=CHECK_EVERY_S)
            for name, child in self.children.items():
                child.rotate()
                if name not in watches or child.state is None or stopped.done():
                    continue
                if await watches[name].hangs(child.state.pid):
                    log.warning("a process does not answer; restarting it", name=name)
                    await self._end_hanging(name, child)

    async def _end_hanging(self, name: str, child: Child) -> None:
        if name != "temporal":  # only our own programs write their stacks on the signal
            child.write_stacks()
            await asyncio.sleep(STACKS_S)
        child.kill()

    async def _stop(self) -> None:
        """Stop dependents first: workers hand over while Temporal still answers, and gateways finish
        turns in flight while the engine still samples."""
        with contextlib.suppress(OSError):  # a full disk must not prevent the stop
            self._set_status("stopping")
        for names in (("worker",), self._gateways(), ("engine",), ("temporal",)):
            found = [self.children[name] for name in names if name in self.children]
            await asyncio.gather(*(child.stop() for child in found))

    def _gateways(self) -> list[str]:
        return gateway_names(self.plan.settings.gateway.processes)

    def _what_is_late(self) -> str:
        logs = {name: child.log_end() for name, child in self.children.items()}
        told = "\n".join(f"{name}: {text}" for name, text in logs.items() if text)
        return (
            f"some parts did not answer, and none was working for {start_limit.IDLE_S:g} s\n{told}"
        )

    def _set_status(self, status: str) -> None:
        self.status = status
        self._write()

    def _write(self) -> None:
        plan = self.plan
        state = StackState(
            status=self.status,
            pid=os.getpid(),
            started=self._me.started if self._me else 0,
            temporal_address=plan.addresses.temporal_address
            or configured_address(plan.settings)
            or "",
            namespace=self.namespace,
            ui_url=plan.addresses.ui_url,
            gateway_url=plan.gateway_url,
            engine=plan.engine_name,
            children={n: c.state for n, c in self.children.items() if c.state is not None},
            engine_settings=engine_settings(plan.childrens_settings()),
            engine_key=self._engine_key,
        )
        stack_state.write(plan.settings, state)


def stop_survivors(settings: Settings) -> list[str]:
    """Stop processes that a killed supervisor has left running; return their names."""
    state = stack_state.read(settings)
    survivors = state.survivors() if state is not None else {}
    for process in survivors.values():
        stop(process, grace_s=10.0)
    return list(survivors)


async def supervise(settings: Settings, engine: str, report: Report) -> None:
    """Run one stack until SIGTERM, SIGINT or SIGHUP. Raises: ConfigurationError, StartFailed, ..."""
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    with stack_state.locked(settings):
        left = await asyncio.to_thread(stop_survivors, settings)
        await asyncio.to_thread(forget_scripted, settings, stack_state.read(settings))
        if left:
            report(
                {
                    "event": "warning",
                    "text": f"stopped processes of an earlier stack: {', '.join(left)}",
                }
            )
        own = configured_address(settings) is None
        plan = Plan(
            settings, service_folder(), Addresses.choose(settings, own_temporal=own), engine=engine
        )
        with listening_sockets.bound(
            settings.changed(gateway={"port": plan.addresses.gateway_port})
        ) as sockets:
            try:
                descriptors = [listener.fileno() for listener in sockets]
                await Supervisor(plan, report, descriptors).run(stopping)
            finally:
                await asyncio.to_thread(forget_scripted, settings, stack_state.read(settings))
                stack_state.forget(settings)


def run(engine: str, report: Report) -> int:
    """Run a stack until it ends; return the exit code. Logs and reports a failed start."""
    settings = load_settings()
    keep_private(settings)
    configure_logging("supervisor")
    try:
        asyncio.run(supervise(settings, engine, report))
    except Exception as error:
        code, line = explain(error)
        log.error("stopped", reason=line, exc_info=not isinstance(error, PerdureError))
        taken = isinstance(error, stack_state.Locked)
        report({"event": "failed", "reason": line, "code": code, "taken": taken})
        return code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perdure.stack", description=__doc__)
    parser.add_argument("--engine", default="", help="scripted:FILE, or an inference server's URL")
    parser.add_argument("--report-fd", type=int, help="write a JSON line for each step here")
    options = parser.parse_args()
    if options.report_fd is None:
        return run(options.engine, lambda event: print(json.dumps(event), file=sys.stderr))
    return run(options.engine, functools.partial(_tell, options.report_fd))


def _tell(descriptor: int, event: dict[str, Any]) -> None:
    # The command that started us may have ended; that must not stop the stack.
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(event).encode() + b"\n")
        if event["event"] in FINAL_EVENTS:
            os.close(descriptor)
