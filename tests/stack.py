"""A whole private stack for tests: real server, gateway, workers and sandboxes, killed at will.

The processes are those of `perdure up`, from the same plan, but nobody starts them again: a test
decides who dies and who comes back. Only the scripted engine lives in the test's own process.
"""

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowHandle,
)
from temporalio.service import RPCError

from activities.hosts import host_of
from activities.messages import SweepRequest, Swept
from perdure.client import names
from perdure.client.api import Perdure
from perdure.episodes.episode import Episode
from perdure.episodes.files import read_episode
from perdure.gateway.rendering.tokenizers import ASSISTANT_HEADER, load_tokenizer
from perdure.instances import catalog
from perdure.sandboxes.base import identity_of
from perdure.sandboxes.host.box import Box
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings import Settings
from perdure.stack import ports, readiness
from perdure.stack.children import ChildSpec
from perdure.stack.plan import Addresses, Plan, temporal_binary
from perdure.storage import keys
from perdure.storage.base import Store, open_store
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import (
    Grading,
    Instance,
    Outcome,
    RolloutRequest,
    RolloutStatus,
    Source,
    SourceKind,
)
from tests import held_ports, loop_agent

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".perdure" / "tools"
"""Agents of all stacks of this checkout: each is fetched once, by the first test that runs it."""
PAUSE_S = 0.02
PATIENCE_S = 300.0
"""Only what is broken takes this long; nothing waits for the clock."""
LINGERS_S = 60.0
"""What has ended may be there for so long, on a busy host."""
BEAT_S = 30.0
"""Heartbeat time-out of rollouts: a worker that lives is never taken for dead, however busy it is."""
DEATH_S = 3.0
"""The same, where a test waits until a dead worker is noticed."""

TURNS = 6
ASSISTANT = tuple(load_tokenizer("qwen3").encode(ASSISTANT_HEADER)[:2])
"""Begins each turn of the policy in a prompt."""
FIX = "sed -i 's/return a - b/return a + b/' calc.py"
GOLD = b"""\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
INSTANCE = "tests/add"
SLOW_INSTANCE = "tests/add-slowly"
"""Its hidden test takes a few seconds: long enough to be met at work."""


def commands(turns: int = TURNS) -> list[str]:
    """What an agent does in that many turns: idle commands, then the fix; the last turn is the end."""
    return [*(f"echo {n}" for n in range(turns - 2)), FIX]


def script(turns: int = TURNS) -> dict[str, Any]:
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in commands(turns)
    ]
    return {"default": {"turns": [*calls, {"content": loop_agent.DONE}]}}


class HeldEngine(ScriptedEngine):
    """Holds the calls of one turn until they are let go: a rollout stands still where a test wants.

    Held calls are sampled when they are let go, whether or not somebody still waits for them: as
    expensive as an engine can be.
    """

    def __init__(self, turns: int = TURNS, **options: Any) -> None:
        super().__init__(script(turns), **options)
        self.turns = turns
        self.waiting: list[str] = []
        """`<session>-<turn>` of the calls that arrived while their turn was held."""
        self._gates: dict[int, asyncio.Event] = {}

    def hold(self, turn: int) -> None:
        self._gates[turn] = asyncio.Event()

    def let_go(self) -> None:
        for gate in self._gates.values():
            gate.set()
        self._gates.clear()

    def times_sampled(self) -> Counter[str]:
        """How often each `<session>-<turn>` was sampled: what the GPU was asked to do."""
        return Counter(f"{call.session_id}-{_turn(call.prompt_ids)}" for call in self.calls)

    def forget(self) -> None:
        self.let_go()
        self.reset()
        self.waiting.clear()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()  # taken in, so it is sampled even if its caller dies meanwhile
        turn = _turn(body["token_ids"])
        gate = self._gates.get(turn)
        if gate is not None:
            self.waiting.append(f"{request.headers['x-session-id']}-{turn}")
            await gate.wait()
        return await super()._generate(request)


def _turn(prompt_ids: Sequence[int]) -> int:
    """How many answers of the policy stand in the prompt: the number of the turn that follows."""
    return sum(pair == ASSISTANT for pair in itertools.pairwise(prompt_ids)) - 1


async def until(condition: Callable[[], Any], what: str, limit_s: float = PATIENCE_S) -> Any:
    """Ask again until the answer, awaited where it must be, is truthy; then return it."""
    end = time.monotonic() + limit_s
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < end, f"still not so after {limit_s:g} s: {what}"
        await asyncio.sleep(PAUSE_S)


async def nothing(look: Callable[[], Sequence[Any]]) -> None:
    """Look again until nothing is found. Raises AssertionError with what is there at last."""
    end = time.monotonic() + LINGERS_S
    while found := look():
        assert time.monotonic() < end, f"still there after {LINGERS_S:g} s: {found}"
        await asyncio.sleep(PAUSE_S)


@dataclass(frozen=True)
class Process:
    """One process of the stack."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    async def ended(self) -> int:
        """Its exit code, once it has one."""
        await until(lambda: self.popen.poll() is not None, f"{self.name} ends")
        code: int = self.popen.returncode
        return code

    async def kill(self, signum: int = signal.SIGKILL) -> int:
        if self.alive:
            os.kill(self.pid, signum)
        return await self.ended()


@dataclass
class Stack:
    """Start it with `running`. Everything lies under `home`; results in `settings.store_url`."""

    home: Path
    plan: Plan
    engine: HeldEngine
    client: Client
    beat_s: float = BEAT_S
    processes: list[Process] = field(default_factory=list)
    requests: list[RolloutRequest] = field(default_factory=list)
    """What was started through here, to be looked for when it is over."""

    @property
    def settings(self) -> Settings:
        return self.plan.settings

    @property
    def perdure(self) -> Perdure:
        return Perdure(self.client)

    @property
    def store(self) -> Store:
        return open_store(self.settings)

    @property
    def provider(self) -> BubblewrapProvider:
        return BubblewrapProvider(self.home)

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
                env=self._environment(spec),
                cwd=ROOT,
                start_new_session=True,
            )
        process = Process(spec.name, popen, log)
        self.processes.append(process)
        return process

    def _environment(self, spec: ChildSpec) -> dict[str, str]:
        foreign = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        if spec.name == "temporal":
            return env
        ours = {k: v for k, v in spec.env.items() if k.startswith(("PERDURE_", "TEMPORAL_"))}
        ours |= {"PERDURE_CONFIG": str(self.home / "none.toml"), "PERDURE_ENGINE_KIND": "vllm"}
        return env | ours | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONUNBUFFERED": "1"}

    async def start_temporal(self) -> Process:
        process = self.spawn(self.plan.temporal())
        address = f"{ports.LOOPBACK}:{self.plan.addresses.temporal_port}"
        await _answering(process, readiness.wait_for_temporal(address))
        return process

    async def start_gateway(self) -> Process:
        process = self.spawn(self.plan.gateway())
        await _answering(process, readiness.wait_for_http(f"{self.plan.gateway_url}/healthz"))
        return process

    async def start_worker(self, *argv: str) -> Process:
        """A worker of all stages, polling when this returns; `argv`: another program instead."""
        spec = self.plan.worker()
        if argv:
            spec = ChildSpec("worker", (sys.executable, "-m", *argv), spec.env)
        process = self.spawn(spec)
        await _answering(process, readiness.wait_for_pollers(self.client, process.pid))
        return process

    async def recover(self) -> None:
        """Start again whatever was killed, and let surplus workers go: one of each is up."""
        if not self.temporal.alive:
            await self.start_temporal()
        if not self.gateway.alive:
            await self.start_gateway()
        for worker in self.workers[1:]:
            await worker.kill(signal.SIGTERM)
        if not self.workers:
            await self.start_worker()

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
        """Stands in the command line of this stack's agents, and of nobody else's."""
        return f"mark-of-{self.home}"

    async def start(self, run_id: str, **fields: Any) -> RolloutRequest:
        request = self.request(run_id, **fields)
        await self.perdure.start_rollout(request)
        return request

    def handle(self, request: RolloutRequest) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(request.workflow_id)

    async def episode(self, request: RolloutRequest) -> Episode:
        """The rollout's episode, when its workflow is over, however it ended."""
        await until(lambda: self.is_over(request), f"{request.workflow_id} is over")
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
                worker_pid, f"{activity} of {request.workflow_id} is at work, try {attempt}"
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
        return int(await until(worker_pid, what))

    async def held(self, *requests: RolloutRequest, attempt: int = 1) -> None:
        """Wait until the agent of every rollout waits for its answer to the held turn."""
        wanted = {self.identity(r, "agent", attempt) for r in requests}

        def arrived() -> bool:
            return wanted <= {name.rpartition("-")[0] for name in self.engine.waiting}

        await until(arrived, f"{len(wanted)} calls are held")

    async def sweep(self, grace_s: float) -> Swept:
        """One real sweep by the real worker of this host."""
        result: Swept = await self.client.execute_activity(
            "sweep_sandboxes",
            SweepRequest(grace_s=grace_s),
            id=f"sweep-{uuid4().hex}",
            task_queue=names.host_queue(host_of(self.settings)),
            start_to_close_timeout=timedelta(minutes=1),
            result_type=Swept,
        )
        return result

    def worker_of(self, pid: int) -> Process:
        return next(p for p in self.processes if p.pid == pid)

    # --- evidence ------------------------------------------------------------------------------

    async def read(self, request: RolloutRequest, name: str, attempt: int = 1) -> bytes:
        """A file of an attempt's evidence."""
        return (await self.store.get(f"{keys.attempt(request, attempt)}/{name}")).data

    async def lines(self, request: RolloutRequest, name: str, attempt: int = 1) -> list[str]:
        return (await self.read(request, f"agent/{name}", attempt)).decode().splitlines()

    async def files(self, request: RolloutRequest) -> list[str]:
        """What the rollout left in the store, below its own folder."""
        prefix = f"{keys.rollout_of(request)}/"
        return [key.removeprefix(prefix) async for key in self.store.list(prefix)]

    def identity(self, request: RolloutRequest, purpose: str, attempt: int = 1) -> str:
        return identity_of(request.run_id, request.workflow_id, purpose, attempt)

    def box(self, request: RolloutRequest, purpose: str, attempt: int = 1) -> Box:
        return Box(self.provider.root / self.identity(request, purpose, attempt))

    async def lose(self, request: RolloutRequest, purpose: str, attempt: int = 1) -> None:
        """kill -9 of the process that holds the sandbox."""
        holder = self.box(request, purpose, attempt).holder
        assert holder is not None
        os.kill(holder.pid, signal.SIGKILL)

    def agents(self) -> frozenset[tuple[int, int]]:
        """Pid and start time of every process that runs one of our agents."""
        return frozenset(
            (pid, _started(pid)) for pid in _pids() if self.mark.encode() in _cmdline(pid)
        )

    def left_behind(self) -> list[str]:
        """What our rollouts have on this host: sandbox folders, cgroups, mounts, agents."""
        digests = {self.identity(r, "agent").rpartition("-agent-")[0] for r in self.requests}
        found = [f"process {pid}" for pid, _ in self.agents()]
        places = [*_folders(self.provider.root), *_folders(Path("/sys/fs/cgroup"), depth=3)]
        found += [str(path) for path in places if any(d in path.name for d in digests)]
        mounts = Path("/proc/mounts").read_text().splitlines()
        found += [line for line in mounts if any(d in line for d in digests)]
        return found

    async def nothing_left(self) -> None:
        """Assert that our finished rollouts have left nothing on this host."""
        await nothing(self.left_behind)

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
        env["TEMPORAL_ADDRESS"] = f"{ports.LOOPBACK}:{self.plan.addresses.temporal_port}"
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
            *("--task-queue", names.WORKFLOWS_QUEUE, "--input", json.dumps(request)),
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
        lines = [_cmdline(pid) for pid in _pids() if pid != os.getpid()]
        return [line for line in lines if home in line]


STARTED = 2
"""PENDING_ACTIVITY_STATE_STARTED"""


@asynccontextmanager
async def running(
    home: Path,
    *,
    turns: int = TURNS,
    workers: int = 1,
    store: Path | None = None,
    beat_s: float = BEAT_S,
) -> AsyncIterator[Stack]:
    """A stack that is up, with the toy instances in its store; nothing of it remains afterwards."""
    home.mkdir(parents=True, exist_ok=True)
    TOOLS.mkdir(parents=True, exist_ok=True)
    if not (home / "tools").exists():
        (home / "tools").symlink_to(TOOLS)
    engine = HeldEngine(turns)
    with held_ports.held(3) as (temporal_port, ui_port, gateway_port):
        async with engine:
            addresses = Addresses(
                temporal_address=None,
                temporal_port=temporal_port,
                ui_port=ui_port,
                gateway_port=gateway_port,
                engine_port=0,
            )
            address = f"{ports.LOOPBACK}:{addresses.temporal_port}"
            addresses = Addresses(**{**vars(addresses), "temporal_address": address})
            settings = Settings(
                home=home,
                store=str(store or home / "store"),
                gateway_port=addresses.gateway_port,
                engine_url=engine.url,
            )
            plan = Plan(settings, ROOT, addresses, engine=engine.url)
            # Lazy: this client outlives every restart of the server.
            stack = Stack(home, plan, engine, client=None, beat_s=beat_s)  # type: ignore[arg-type]  # set below
            try:
                await stack.start_temporal()
                stack.client = await readiness.wait_for_temporal(address)
                await readiness.register_search_attributes(stack.client)
                await add_instances(stack)
                await stack.start_gateway()
                for _ in range(workers):
                    await stack.start_worker()
                yield stack
            finally:
                engine.let_go()
                await stack.stop()


async def add_instances(stack: Stack) -> None:
    tree = stack.home / "trees" / "calc"
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    check = "python3 -c 'from calc import add; assert add(2, 3) == 5'"
    for ref, command in ((INSTANCE, check), (SLOW_INSTANCE, f"sleep 4; {check}")):
        dataset, _, name = ref.partition("/")
        instance = Instance(
            instance_id=name,
            dataset=dataset,
            problem_statement="add(2, 3) returns -1.",
            source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
            grading=Grading(protocol="eval_cmd", eval_cmd=command, timeout_s=60),
            gold_patch=GOLD,
        )
        await catalog.save(stack.store, instance)


async def _answering(process: Process, wait: Awaitable[Any]) -> None:
    """Until it answers; fails at once, with its log, when it ends instead."""
    waiting = asyncio.ensure_future(wait)
    try:
        await until(lambda: waiting.done() or not process.alive, f"{process.name} answers")
        words = process.log.read_text("utf-8", "replace")[-3000:]
        assert waiting.done(), f"{process.name} ended with {process.popen.returncode}:\n{words}"
        waiting.result()
    finally:
        waiting.cancel()


# --- this host -----------------------------------------------------------------------------------


def why_not_here() -> str:
    """What this machine lacks for a stack, for a skip; empty = nothing."""
    missing = [] if shutil.which("setpriv") else ["setpriv (util-linux) is missing"]
    return "; ".join([*missing, *BubblewrapProvider(Path("/nonexistent")).check()])


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0


def _folders(root: Path, depth: int = 1) -> list[Path]:
    """Folders below `root`, down to `depth` levels; what vanishes meanwhile is left out."""
    found: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append(Path(entry.path))
                if depth > 1:
                    found += _folders(Path(entry.path), depth - 1)
    return found
