"""Runs an agent's real program against a real gateway: sandbox, scripted engine, capture, grading.

Gateway and engines run in this process. A test supplies scripts that call its agent's own tools.
"""

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perdure.agents import skills, user_messages
from perdure.agents.base import EXEC_ID, Agent, AgentTask, Evidence, install
from perdure.episodes import trajectory_segments, turns_parquet
from perdure.errors import NotFound
from perdure.gateway.base import SessionSummary
from perdure.gateway.mcp.mcp_call_record import calls_key
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.graders.diff import diff_capture
from perdure.graders.protocols.eval_cmd import EvalCmdGrader
from perdure.sandboxes.base import Exec, ExecStatus, Mount, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import AgentSettings, Settings
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import Call, ScriptedEngine
from perdure.testing.scripted_policy import Policy
from perdure.types import (
    AgentEnd,
    Grade,
    Grading,
    Instance,
    McpServer,
    Purpose,
    Sampling,
    Source,
    SourceKind,
    Turn,
)

WORKDIR = "/testbed"
FILE = f"{WORKDIR}/calc.py"
BROKEN = "def add(a, b):\n    return a - b\n"
ISSUE = "add() in calc.py subtracts its arguments, which is surprising: make it add them."
BUDGET_S = 120.0
LOOK_S = 0.2
"""Seconds between two looks for the end of an agent's turn."""
BUDGETS_S = (12.0, 48.0, 192.0)
SAMPLING = Sampling()
INSTANCE = Instance(
    instance_id="calc-1",
    dataset="tests",
    problem_statement=ISSUE,
    source=Source(kind=SourceKind.DIRECTORY),
    grading=Grading(
        protocol="eval_cmd", eval_cmd="python3 -c 'import calc; assert calc.add(1, 2) == 3'"
    ),
)


def call(tool: str, /, say: str = "", **arguments: Any) -> dict[str, Any]:
    """A scripted turn: one tool call, and what the model says before it."""
    return {"content": say, "tool_calls": [{"name": tool, "arguments": arguments}]}


def script(*scripted: dict[str, Any], match: str = "surprising") -> dict[str, Any]:
    """The model's answers, turn by turn, for a conversation that contains `match` before the first
    one."""
    return {"match": match, "turns": list(scripted)}


@dataclass(frozen=True)
class Run:
    """All that one agent left: its end, its evidence, what was captured, and the verdict."""

    end: AgentEnd
    evidence: Evidence
    summary: SessionSummary
    turns: Sequence[Turn]
    calls: Sequence[Call]
    """What the engine sampled, in its own record."""
    diff: bytes
    grade: Grade
    first_request_s: float
    """Seconds from launch to the first request at the gateway."""

    def steps(self, chain: str | None = None) -> list[Turn]:
        wanted = [t for t in self.turns if t.purpose is Purpose.STEP]
        return [t for t in wanted if chain is None or t.chain == chain]

    @property
    def said(self) -> str:
        """Everything it printed, for reading when a test fails."""
        return (self.evidence.stdout_tail + self.evidence.stderr_tail).decode("utf-8", "replace")

    def trained(self) -> int:
        """Tokens that the segments of this run train on."""
        return sum(sum(segment.loss_mask) for segment in trajectory_segments.cut(self.turns))

    def assert_token_exact(self) -> None:
        """Every recorded turn is what the engine saw and sampled, and nothing is missing."""
        recorded = {(t.prompt_ids, t.completion_ids, t.logprobs) for t in self.turns}
        sampled = {
            (tuple(c.prompt_ids), tuple(c.completion_ids), tuple(c.logprobs)) for c in self.calls
        }

        assert recorded == sampled
        assert len(self.turns) == len(self.calls)


Sampled = Callable[[ScriptedEngine], None]


def _goes_on(engine: ScriptedEngine) -> None:
    """The default of `sampled`: do nothing."""


class Asked(Policy):
    """The scripted policy, but a request whose last message holds a phrase gets an answer of its own."""

    def __init__(
        self,
        scripts: Mapping[str, Any],
        answers: Mapping[str, Mapping[str, Any]],
        sampled: Callable[[], None],
    ) -> None:
        self._sampled = sampled
        self._reader = load_tokenizer("qwen3")
        super().__init__(self._reader, scripts)
        self._answers = answers
        self._opens = self._reader.convert_tokens_to_ids("<|im_start|>")

    def complete(self, prompt_ids: list[int]) -> list[int]:
        starts = [at for at, token in enumerate(prompt_ids) if token == self._opens]
        if starts:  # a probe of the gateway's has none
            self._sampled()
        last = self._reader.decode(prompt_ids[starts[-2] :] if len(starts) > 1 else prompt_ids)
        for phrase, answer in self._answers.items():
            if phrase in last:
                return self.tokens(answer)
        return super().complete(prompt_ids)


@dataclass(frozen=True)
class Start:
    """What an agent is started with."""

    instance: Instance = INSTANCE
    sampling: Sampling = SAMPLING
    budget_s: float = BUDGET_S
    model: str = "policy"
    options: Mapping[str, Any] = field(default_factory=dict)
    mcp_servers: Mapping[str, McpServer] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    messages: Sequence[str] = ()


@dataclass(frozen=True)
class Served:
    """Engines, and a gateway that sandboxes reach by a socket."""

    engines: Sequence[ScriptedEngine]
    gateway: LocalGateway
    link: "Link"


class Stand:
    """Runs one agent after the other, each in a fresh sandbox with a session of its own.

    Example:
        run = await Stand(tmp_path, tmp_path / "tools").run(MyAgent(), script({"content": "Done."}))
        assert run.end is AgentEnd.FINISHED, run.said
    """

    def __init__(self, folder: Path, tools: Path, agents: AgentSettings | None = None) -> None:
        """`tools`: the cache of installed agents. `agents`: settings that name programs."""
        self.folder, self.tools = folder, tools
        settings = Settings(home=folder / "boxes")
        self.agents = agents or settings.agents
        self.provider = BubblewrapProvider(settings)
        self.tree = folder / "tree"
        _make_repository(self.tree)
        self._runs = 0
        self.mcp_calls: list[dict[str, Any]] = []
        """What the gateway recorded of MCP servers in the newest run."""

    async def run(
        self,
        agent: Agent,
        *scripts: Mapping[str, Any],
        asked: Mapping[str, Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        sampling: Sampling = SAMPLING,
        instance: Instance = INSTANCE,
        budget_s: float = BUDGET_S,
        model: str = "policy",
        engines: int = 1,
        sampled: Sampled = _goes_on,
        mcp_servers: Mapping[str, McpServer] | None = None,
        mounted: Sequence[Mount] = (),
        messages: Sequence[str] = (),
    ) -> Run:
        """`scripts`: see `script`. `messages`: of the user, after the task. `asked`: phrase of a last message -> the answer to it. `sampled` is
        called whenever an engine is about to sample a turn."""

        def policy(engine: ScriptedEngine) -> Policy:
            return Asked({"scripts": list(scripts)}, asked or {}, partial(sampled, engine))

        servers = mcp_servers or {}
        start = Start(
            instance, sampling, budget_s, model, options or {}, servers, mounted, messages
        )
        async with self.served(policy, engines) as served:
            return await self.attempt(served, agent, start)

    @asynccontextmanager
    async def served(
        self, policy: Callable[[ScriptedEngine], Policy], engines: int = 1
    ) -> AsyncIterator[Served]:
        """Start engines, each with its own policy, and a gateway in front of them."""
        self._runs += 1
        home = self.folder / f"home-{self._runs}"
        async with AsyncExitStack() as opened:
            started = [await opened.enter_async_context(ScriptedEngine()) for _ in range(engines)]
            for one in started:
                one.policy = policy(one)
            engine = {"url": ",".join(one.url for one in started), "kind": "vllm"}
            gateway = await opened.enter_async_context(LocalGateway(home, engine=engine))
            socket = self.folder / f"gw-{self._runs}.sock"
            link = await opened.enter_async_context(unix_socket(socket, gateway.url))
            yield Served(started, gateway, link)

    async def attempt(self, served: Served, agent: Agent, start: Start, number: int = 1) -> Run:
        """Start the agent in a new sandbox. Each attempt after the first replays the one before."""
        session = f"s-{number}"
        key = await served.gateway.open(
            session,
            sampling=start.sampling,
            labels={"rollout": "s"},
            mcp_servers={k: one for k, one in start.mcp_servers.items() if one.is_behind_gateway},
            replay_of=f"s-{number - 1}" if number > 1 else None,
        )
        mounts = (
            *await install(agent, self.tools, self.agents, start.options),
            Mount(self.tree / ".git", diff_capture.BASE_GIT),
            *start.mounts,
        )
        spec = SandboxSpec(WORKDIR, tree=self.tree, mounts=mounts, gateway=served.link.path)
        name = f"{self._runs}-{number}"
        async with await self.provider.create(spec, f"p-agent-{name}") as sandbox:
            task = AgentTask(
                instance=start.instance,
                workdir=sandbox.workdir,
                gateway_url=sandbox.gateway_url,
                session_key=key,
                model=start.model,
                sampling=start.sampling,
                budget_s=start.budget_s,
                mcp_servers=dict(start.mcp_servers),
                options=dict(start.options),
                has_user=bool(start.messages),
            )
            started = time.monotonic()
            status = await _to_the_end(agent, task, sandbox, start.messages)
            summary = await served.gateway.control.close(session)
            evidence = Evidence(
                status,
                await sandbox.output(EXEC_ID, "stdout"),
                await sandbox.output(EXEC_ID, "stderr"),
                await _artifacts(agent, sandbox),
                summary.turns,
            )
            captured = await diff_capture.capture(sandbox, diff_capture.BASE_GIT)
        recorded = await served.gateway.store.get(turns_key_of(session))
        with contextlib.suppress(NotFound):
            calls = await served.gateway.store.get(calls_key(turns_key_of(session)))
            self.mcp_calls = [json.loads(line) for line in calls.data.splitlines()]
        return Run(
            end=agent.classify(evidence),
            evidence=evidence,
            summary=summary,
            turns=turns_parquet.decode(recorded.data),
            calls=[call for one in served.engines for call in one.calls],
            diff=captured.data,
            grade=await self._grade(start.instance, captured.data, f"p-grade-{name}"),
            first_request_s=(served.link.first_at or started) - started,
        )

    async def run_until_out_of_time(self, agent: Agent, *scripts: Mapping[str, Any]) -> Run:
        """A run whose scripts end in a command that outlasts every budget. On a busy host the first
        budget may end before the agent has edited its file: then it gets a larger one."""
        for budget_s in BUDGETS_S:
            run = await self.run(agent, *scripts, budget_s=budget_s)
            if run.diff:
                break
        return run

    async def _grade(self, instance: Instance, diff: bytes, name: str) -> Grade:
        spec = SandboxSpec(WORKDIR, tree=self.tree)
        async with await self.provider.create(spec, name) as sandbox:
            graded = await EvalCmdGrader().grade(sandbox, instance, diff, timeout_s=60.0)
        return graded.grade


async def _to_the_end(
    agent: Agent, task: AgentTask, sandbox: Sandbox, messages: Sequence[str]
) -> ExecStatus:
    launch = skills.launch(agent, task)
    for path, content in launch.files.items():
        await sandbox.put(path, content, mode=0o600)
    await sandbox.start(EXEC_ID, Exec(launch.argv, env=launch.env, timeout_s=task.budget_s))
    answers = (*messages, None) if messages else ()
    for turn, message in enumerate(answers, 1):
        while await user_messages.ended_turn(sandbox, turn) is None:
            if (status := await sandbox.wait(EXEC_ID, LOOK_S)).done:
                return status
        await user_messages.send(sandbox, turn, message)
    return await sandbox.wait(EXEC_ID)


async def _artifacts(agent: Agent, sandbox: Sandbox) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in agent.artifacts:
        with contextlib.suppress(NotFound):
            found[path] = await sandbox.get(path)
    return found


def _make_repository(tree: Path) -> None:
    tree.mkdir()
    (tree / "calc.py").write_text(BROKEN)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *who, *command], cwd=tree, check=True)


@dataclass
class Link:
    """The socket that sandboxes mount, and when the first connection came."""

    path: Path
    first_at: float | None = None
    streams: int = 0
    """How many answers were streams."""


@asynccontextmanager
async def unix_socket(path: Path, url: str) -> AsyncIterator[Link]:
    """Serve the gateway's TCP port on a Unix socket."""
    tcp = urlsplit(url)
    link = Link(path)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if link.first_at is None and b"POST " in data:
                    link.first_at = time.monotonic()
                link.streams += b"content-type: text/event-stream" in data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(tcp.hostname, tcp.port)
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    async with await asyncio.start_unix_server(relay, path):
        path.chmod(0o666)
        yield link
