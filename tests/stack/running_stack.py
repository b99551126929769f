"""A whole private stack for tests: real server, gateway, workers and sandboxes, killed at will.

The processes are those of `perdure up`, from the same plan, but they are not restarted: a test
decides who dies and who comes back. Only the scripted engine lives in the test's own process.
"""

import asyncio
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowHandle,
)
from temporalio.service import RPCError

from perdure.client import temporal_names
from perdure.client.sdk import Perdure
from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_episode
from perdure.home_folder import host_of
from perdure.rollouts.activity_messages import SweepRequest
from perdure.sandboxes.base import identity_of
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.sandbox_reaper import SweepReport
from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness, stack_ports, temporal_setup
from perdure.stack.child_restarts import ChildSpec
from perdure.stack.stack_plan import Addresses, Plan, temporal_binary
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.types import (
    Outcome,
    RolloutRequest,
    RolloutStatus,
)
from tests import held_ports, loop_agent
from tests.checkout_paths import ROOT
from tests.cuttable_connection import Wire
from tests.stack import worker_builds
from tests.stack.gated_engine import TURNS, HeldEngine, commands
from tests.stack.host_requirements import cmdline, folders, pids, started_at
from tests.stack.made_instances import INSTANCE, add_instances
from tests.stack.stack_process import Process, answering
from tests.stack.wait_until import LINGERS_S, PAUSE_S, nothing, until
from workers.health_endpoints import wait_until_polling
from workers.worker_process import ROLES

TOOLS = ROOT / ".perdure" / "tools"
"""Agents of all stacks of this checkout: each is fetched once, by the first test that runs it."""
BEAT_S = 30.0
"""Heartbeat time-out of rollouts: a worker that lives is never taken for dead, however busy it is."""
DEATH_S = 3.0
"""The same, where a test waits until a dead worker is noticed."""
MET = 3
"""The turn in which a test meets its rollouts."""


@dataclass
class Stack:
    """Start it with `running`. All files are under `home`; results are in `settings.store_url`."""

    home: Path
    plan: Plan
    engine: HeldEngine
    client: Client
    wire: Wire | None = None
    """The connection from the gateway to the engine, if a test may break it."""
    beat_s: float = BEAT_S
    engine_kind: str = "vllm"
    builds: tuple[str, ...] = ("",)
    """Build ids whose workers `recover` keeps up."""
    processes: list[Process] = field(default_factory=list)
    requests: list[RolloutRequest] = field(default_factory=list)
    """What was started through here, to be looked for when it is over."""
    earlier: frozenset[Path] = field(default_factory=lambda: frozenset(_control_groups()))
    """Groups that a killed suite left. Its rollouts may have the names of ours."""

    @property
    def settings(self) -> Settings:
        return self.plan.settings

    @property
    def perdure(self) -> Perdure:
        return Perdure(self.client)

    @functools.cached_property
    def store(self) -> Store:
        return open_store(self.settings)

    @property
    def provider(self) -> BubblewrapProvider:
        return BubblewrapProvider(Settings(home=self.home))

    # --- processes -----------------------------------------------------------------------------

    @property
    def workers(self) -> list[Process]:
        return [p for p in self.processes if p.name == "worker" and p.alive]

    @property
    def gateway(self) -> Process:
        return next(p for p in reversed(self.processes) if p.name == "gateway")

    @property
    def temporal(self) -> Process:
        return next(p for p in reversed(self.processes) if p.name == "temporal")

    def spawn(self, spec: ChildSpec) -> Process:
        """Dies with the test's process, however that one dies."""
        log = self.home / "logs" / f"{spec.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            popen = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment(spec),
                cwd=ROOT,
                start_new_session=True,
            )
        build = (spec.env or {}).get(worker_builds.VARIABLE, "")
        process = Process(spec.name, popen, log, build)
        self.processes.append(process)
        return process

    def environment(self, spec: ChildSpec) -> dict[str, str]:
        foreign = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        if spec.name == "temporal":
            return env
        ours = {k: v for k, v in spec.env.items() if k.startswith(("PERDURE_", "TEMPORAL_"))}
        ours |= {"PERDURE_CONFIG": os.devnull, "PERDURE_ENGINE__KIND": self.engine_kind}
        return env | ours | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONUNBUFFERED": "1"}

    async def start_temporal(self) -> Process:
        process = self.spawn(self.plan.temporal())
        address = f"{stack_ports.LOOPBACK}:{self.plan.addresses.temporal_port}"
        await answering(process, temporal_setup.wait_for_temporal(address, self.settings))
        return process

    async def start_gateway(self) -> Process:
        process = self.spawn(self.plan.gateway())
        await answering(process, part_readiness.wait_for_http(f"{self.plan.gateway_url}/healthz"))
        return process

    async def start_worker(self, *argv: str, **env: str) -> Process:
        """A worker of all stages, polling when this returns; `argv`: another program instead."""
        spec = self.plan.worker()
        if argv:
            spec = ChildSpec("worker", (sys.executable, "-m", *argv), spec.env)
        spec = replace(spec, env={**(spec.env or {}), **env})
        process = self.spawn(spec)
        identity = f"{process.pid}@{socket.gethostname()}"  # the SDK's default
        await answering(process, wait_until_polling(self.client, ROLES, identity))
        return process

    async def recover(self) -> None:
        """Restart what was killed and stop surplus workers: one process of each kind and build is up."""
        if any(p.name == "temporal" for p in self.processes) and not self.temporal.alive:
            await self.start_temporal()
        if not self.gateway.alive:
            await self.start_gateway()
        for build in set(self.builds) - {worker.build for worker in self.workers}:
            await worker_builds.start_worker(self, build)
        kept = {worker.build: worker for worker in reversed(self.workers)}
        for worker in self.workers:
            if worker.build not in self.builds or worker is not kept[worker.build]:
                await worker.kill(signal.SIGTERM)

    async def refresh(self) -> None:
        """For the next test: everything is up, nothing is remembered."""
        await self.recover()
        self.engine.forget()
        self.requests.clear()

    async def kill_all(self, *processes: Process, signum: int = signal.SIGKILL) -> None:
        """At the same time, then wait for every end."""
        for process in processes:
            os.kill(process.pid, signum)
        for process in processes:
            await process.ended()

    # --- rollouts ------------------------------------------------------------------------------

    def request(self, run_id: str, **fields: Any) -> RolloutRequest:
        """One rollout of the toy instance by the loop agent, unless `fields` says otherwise."""
        values: dict[str, Any] = {
            "run_id": run_id,
            "instance": INSTANCE,
            "agent": loop_agent.NAME,
            "heartbeat_timeout_s": self.beat_s,
            "agent_budget_s": 300,
        }
        values |= fields
        if values["agent"] == loop_agent.NAME:
            values.setdefault("agent_options", {"mark": self.mark})
        request = RolloutRequest.model_validate(values)
        self.requests.append(request)
        return request

    @property
    def mark(self) -> str:
        """A mark in the command line of this stack's agents, and of no other process."""
        return f"mark-of-{self.home}"

    async def start(self, run_id: str, **fields: Any) -> RolloutRequest:
        request = self.request(run_id, **fields)
        await self.perdure.start_rollout(request)
        return request

    async def met(self, run_id: str, count: int = 1, **fields: Any) -> list[RolloutRequest]:
        """New rollouts, each in the middle of its turn `MET`, until the engine lets them go."""
        self.engine.hold(MET)
        requests = [await self.start(run_id, sample_index=k, **fields) for k in range(count)]
        await self.held(*requests)
        return requests

    def handle(self, request: RolloutRequest) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(request.workflow_id)

    async def episode(self, request: RolloutRequest) -> Episode:
        """The rollout's episode, when its workflow is over, however it ended."""
        try:
            await until(lambda: self.is_over(request), f"{request.workflow_id} is over")
        except AssertionError as error:
            stands = f"{error}; {await self.pending(request)}"
            raise AssertionError(f"{stands}{self.last_words()}") from None
        episode = await read_episode(self.store, request)
        assert episode is not None, f"{request.workflow_id} has no episode{self.last_words()}"
        return episode

    async def is_over(self, request: RolloutRequest) -> bool:
        found = await self._described(request)
        return found is not None and found.status is not WorkflowExecutionStatus.RUNNING

    async def pending(self, request: RolloutRequest) -> PendingActivityInfo | None:
        """The activity that is scheduled or running now."""
        found = await self._described(request)
        pending = found.raw_description.pending_activities if found is not None else ()
        return pending[0] if pending else None

    async def _described(self, request: RolloutRequest) -> WorkflowExecutionDescription | None:
        """None while its parent has not started it, and while the server is away."""
        try:
            return await self.handle(request).describe()
        except RPCError:
            return None

    async def at(self, request: RolloutRequest, activity: str, attempt: int = 1) -> int:
        """Wait until `activity` runs in its `attempt`-th try or later; the pid of its worker."""

        async def worker_pid() -> int:
            found = await self.pending(request)
            if found is None or found.state != STARTED or found.attempt < attempt:
                return 0
            right = found.activity_type.name == activity
            return int(found.last_worker_identity.partition("@")[0]) if right else 0

        return int(
            await until(
                worker_pid,
                f"{activity} of {request.workflow_id} is at work, try {attempt}",
                pause_s=PAUSE_S,
            )
        )

    async def watched(self, request: RolloutRequest, attempt: int = 1) -> int:
        """Wait until a worker really watches the agent, and says so; the pid of that worker."""

        async def worker_pid() -> int:
            found = await self.pending(request)
            if found is None or found.state != STARTED or found.attempt < attempt:
                return 0
            beat = (
                found.last_heartbeat_time.ToNanoseconds() > found.last_started_time.ToNanoseconds()
            )
            said = beat and bool(found.heartbeat_details.payloads)
            return int(found.last_worker_identity.partition("@")[0]) if said else 0

        what = f"the agent of {request.workflow_id} is watched, try {attempt}"
        return int(await until(worker_pid, what, pause_s=PAUSE_S))

    async def held(self, *requests: RolloutRequest, attempt: int = 1) -> None:
        """Wait until the agent of every rollout waits for its answer to the held turn."""
        wanted = {self.identity(r, "agent", attempt) for r in requests}

        def arrived() -> bool:
            return wanted <= {name.rpartition("-")[0] for name in self.engine.waiting}

        await until(arrived, f"{len(wanted)} calls are held")

    async def sweep(self, grace_s: float) -> SweepReport:
        """One real sweep by the real worker of this host."""
        result: SweepReport = await self.client.execute_activity(
            "sweep_sandboxes",
            SweepRequest(grace_s=grace_s),
            id=f"sweep-{uuid4().hex}",
            task_queue=temporal_names.upkeep_queue(host_of(self.settings)),
            start_to_close_timeout=timedelta(minutes=1),
            result_type=SweepReport,
        )
        return result

    def worker_of(self, pid: int) -> Process:
        return next(p for p in self.processes if p.pid == pid)

    # --- evidence ------------------------------------------------------------------------------

    async def read(self, request: RolloutRequest, name: str, attempt: int = 1) -> bytes:
        """A file of an attempt's evidence."""
        return (await self.store.get(f"{store_keys.attempt(request, attempt)}/{name}")).data

    async def lines(self, request: RolloutRequest, name: str, attempt: int = 1) -> list[str]:
        return (await self.read(request, f"agent/{name}", attempt)).decode().splitlines()

    async def files(self, request: RolloutRequest) -> list[str]:
        """What the rollout left in the store, below its own folder."""
        prefix = f"{store_keys.rollout_of(request)}/"
        return [key.removeprefix(prefix) async for key in self.store.list(prefix)]

    def identity(self, request: RolloutRequest, purpose: str, attempt: int = 1) -> str:
        return identity_of(request.run_id, request.workflow_id, purpose, attempt)

    def box(self, request: RolloutRequest, purpose: str, attempt: int = 1) -> SandboxFolder:
        return SandboxFolder(self.provider.root / self.identity(request, purpose, attempt))

    async def lose(self, request: RolloutRequest, purpose: str, attempt: int = 1) -> None:
        """kill -9 of the process that holds the sandbox."""
        holder = self.box(request, purpose, attempt).holder
        assert holder is not None
        os.kill(holder.pid, signal.SIGKILL)

    def agents(self) -> frozenset[tuple[int, int]]:
        """Pid and start time of every process that runs one of our agents."""
        return frozenset(
            (pid, started_at(pid)) for pid in pids() if self.mark.encode() in cmdline(pid)
        )

    def left_behind(self) -> list[str]:
        """What our rollouts have on this host: sandbox folders, cgroups, mounts, agents."""
        digests = {self.identity(r, "agent").rpartition("-agent-")[0] for r in self.requests}
        found = [f"process {pid}" for pid, _ in self.agents()]
        groups = set(_control_groups()) - self.earlier
        places = [*folders(self.provider.root), *sorted(groups)]
        ours = re.compile("|".join(digests) or "(?!)")
        found += [str(path) for path in places if ours.search(path.name)]
        mounts = Path("/proc/mounts").read_text().splitlines()
        return found + [line for line in mounts if ours.search(line)]

    async def nothing_left(self, limit_s: float = LINGERS_S) -> None:
        """Assert that our finished rollouts have left nothing on this host."""
        try:
            await nothing(self.left_behind, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.last_words()}") from None

    async def solved_once(
        self, request: RolloutRequest, attempt: int = 1, again: int = 0, replayed: int = 0
    ) -> None:
        """Assert what an interrupted rollout owes: solved, nothing done twice, nothing left.

        `again`: turns that were in flight when their gateway or engine died, and may be bought
        twice. `replayed`: first turns that a lost attempt had bought already.
        """
        episode = await self.episode(request)
        verdict = (episode.status, episode.outcome, episode.reward)
        assert verdict == (RolloutStatus.GRADED, Outcome.RESOLVED, 1.0), (
            episode,
            self.last_words(),
        )
        turns = self.engine.turns
        assert (episode.turns, len(episode.attempts)) == (turns, attempt), episode
        self.bought_once(request, attempt, again, replayed)
        assert await self.lines(request, "commands.log", attempt) == commands(turns)
        starts = await self.lines(request, "starts.log", attempt)
        assert len(starts) == 1, starts
        files = await self.files(request)
        verdicts = [n for n in files if "/grade-" in n and n.endswith(".json")]
        assert len(verdicts) == 1, files
        await self.nothing_left()

    def bought_once(
        self, request: RolloutRequest, attempt: int = 1, again: int = 0, replayed: int = 0
    ) -> None:
        """Assert that the attempt asked for each turn after the `replayed` ones, and for at most
        `again` of them twice."""
        session = self.identity(request, "agent", attempt)
        sampled = {k: n for k, n in self.engine.times_sampled().items() if k.startswith(session)}
        due = {f"{session}-{turn}" for turn in range(replayed, self.engine.turns)}
        assert sampled.keys() == due, sampled
        assert sum(sampled.values()) - len(sampled) <= again, sampled

    # --- the temporal CLI ----------------------------------------------------------------------

    async def temporal_cli(self, *arguments: str) -> str:
        """What `temporal ARGUMENTS` printed. Raises AssertionError with its complaint."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("TEMPORAL_")}
        env["TEMPORAL_ADDRESS"] = f"{stack_ports.LOOPBACK}:{self.plan.addresses.temporal_port}"
        process = await asyncio.create_subprocess_exec(
            *(temporal_binary(), *arguments),
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, (out + err).decode()
        return out.decode()

    async def start_by_hand(self, workflow: str, workflow_id: str, request: Any) -> None:
        await self.temporal_cli(
            *("workflow", "start", "--type", workflow, "--workflow-id", workflow_id),
            *("--task-queue", temporal_names.WORKFLOWS_QUEUE, "--input", json.dumps(request)),
        )

    # --- the end -------------------------------------------------------------------------------

    def last_words(self) -> str:
        """The ends of the logs, for a failed assertion."""
        told = []
        for log in sorted((self.home / "logs").glob("*.log")):
            lines = log.read_text("utf-8", "replace").strip().splitlines()[-8:]
            told.append("\n".join(["", f"--- {log.name}", *(line[:600] for line in lines)]))
        return "".join(told)

    async def stop(self) -> None:
        """End what was started here, by pid, then every sandbox, and look whether that was all."""
        living = [p for p in self.processes if p.alive]
        await self.kill_all(*living)
        for box in await self.provider.list():
            await self.provider.kill(box.identity)
        await nothing(self._strangers)

    def _strangers(self) -> list[bytes]:
        """Command lines that name our folder; helpers of a killed worker take a moment to notice."""
        home = str(self.home).encode()
        lines = [cmdline(pid) for pid in pids() if pid != os.getpid()]
        return [line for line in lines if home in line]


STARTED = 2
"""PENDING_ACTIVITY_STATE_STARTED"""


def _wire_to(engine: HeldEngine) -> Wire:
    port = urlsplit(engine.url).port
    assert port is not None
    return Wire(port)


@asynccontextmanager
async def running(
    home: Path,
    *,
    turns: int = TURNS,
    workers: int = 1,
    store: Path | str | None = None,
    s3_url: str = "",
    wired: bool = False,
    named: bool = True,
    beat_s: float = BEAT_S,
    hosted: HeldEngine | None = None,
    sandbox: Mapping[str, Any] | None = None,
    **engine_settings: Any,
) -> AsyncIterator[Stack]:
    """A stack that is up, with the toy instances in its store; nothing of it remains afterwards.

    `store`: a folder, or `s3://bucket` at `s3_url`. `wired`: the engine is reached through a `Wire`.
    `named`: the settings name the engine; otherwise gateways take those of the roster. `hosted`: an
    engine that is used as a hosted API. `sandbox`: settings of that group.
    """
    home.mkdir(parents=True, exist_ok=True)
    TOOLS.mkdir(parents=True, exist_ok=True)
    if not (home / "tools").exists():
        (home / "tools").symlink_to(TOOLS)
    engine = hosted or HeldEngine(turns)
    with held_ports.held(3) as (temporal_port, ui_port, gateway_port):
        async with AsyncExitStack() as parts:
            await parts.enter_async_context(engine)
            wire = await parts.enter_async_context(_wire_to(engine)) if wired else None
            url = engine.url if wire is None else f"http://{stack_ports.LOOPBACK}:{wire.port}"
            addresses = Addresses(
                temporal_address=None,
                temporal_port=temporal_port,
                ui_port=ui_port,
                gateway_port=gateway_port,
                engine_port=0,
            )
            address = f"{stack_ports.LOOPBACK}:{addresses.temporal_port}"
            addresses = Addresses(**{**vars(addresses), "temporal_address": address})
            settings = Settings(
                home=home,
                store=str(store or home / "store"),
                gateway={"port": addresses.gateway_port},
                engine={"url": url if named else "", **engine_settings},
                sandbox=sandbox or {},
                s3_endpoint_url=s3_url,
            )
            plan = Plan(settings, ROOT, addresses, engine=url if named else "")
            # Lazy: this client outlives every restart of the server.
            stack = Stack(home, plan, engine, client=None, wire=wire, beat_s=beat_s)  # type: ignore[arg-type]  # set below
            stack.engine_kind = "openai" if hosted else "vllm"
            try:
                await stack.start_temporal()
                stack.client = await temporal_setup.wait_for_temporal(address, settings)
                await temporal_setup.register_search_attributes(stack.client)
                await add_instances(home, stack.store)
                await stack.start_gateway()
                for _ in range(workers):
                    await stack.start_worker()
                yield stack
            finally:
                engine.let_go()
                await stack.stop()


# --- this host -----------------------------------------------------------------------------------


def _control_groups() -> list[Path]:
    return folders(Path("/sys/fs/cgroup"), depth=3)
