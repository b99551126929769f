"""mini-swe-agent from PyPI, in a bubblewrap sandbox, against the gateway and the scripted engine."""

import itertools
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from perdure.agents import prompt_template
from perdure.agents.base import EXEC_ID, AgentTask, Evidence
from perdure.agents.mini_swe_agent import TRAJECTORY, MiniSweAgent
from perdure.agents.oracle import Oracle
from perdure.engines.clients import hosted_requests
from perdure.episodes import turns_parquet
from perdure.gateway.base import HOPELESS
from perdure.rollouts.activity_messages import AgentRun
from perdure.sandboxes.base import Exec, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import AgentSettings, Settings
from perdure.stack.command_server import serving
from perdure.testing.agent_stand import unix_socket
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import AgentEnd, Instance, Sampling, Source, SourceKind, Turn
from tests.stack.running_stack import TOOLS

ISSUE = "Say \N{BUG}\u2028 hello, {workdir}: 'politely'"
WORKDIR = "/testbed"
AGENT_S = 300.0


def bash(command: str) -> dict[str, Any]:
    return {
        "content": f"Now {command[:10]}.",
        "tool_calls": [{"name": "bash", "arguments": {"command": command}}],
    }


SCRIPTS = {
    "scripts": [
        {
            "match": "politely",
            "turns": [
                bash("cat greeting.txt"),
                bash("sed -i 's/bye/hello/' greeting.txt"),
                bash("cat greeting.txt && python3 -c 'print(6 * 7)'"),
                bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            ],
        },
        {"match": "rudely", "turns": [{"content": "No tool call at all."}]},
    ]
}


def instance(issue: str = ISSUE, gold_patch: bytes = b"") -> Instance:
    return Instance(
        instance_id="greeting-1",
        dataset="tests",
        problem_statement=issue,
        source=Source(kind=SourceKind.DIRECTORY),
        gold_patch=gold_patch,
    )


def task(sandbox: Sandbox, key: str = "", **fields: Any) -> AgentTask:
    values = {
        "instance": instance(),
        "workdir": sandbox.workdir,
        "gateway_url": sandbox.gateway_url,
        "session_key": key,
        "model": "policy",
        "sampling": Sampling(),
        "budget_s": AGENT_S,
    }
    return AgentTask(**{**values, **fields})


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose own modules would break the agent, if it imported them."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "greeting.txt").write_bytes(b"bye\r\n")
    for shadow in ("pydantic.py", "requests.py", "json.py"):
        (tree / shadow).write_text("raise SystemExit('the repository shadows the agent')\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *who, *command], cwd=tree, check=True)
    return tree


class Stand:
    """Engine, gateway and sandbox provider; runs one agent to its end."""

    def __init__(self, home: Path, tree: Path, gateway: LocalGateway) -> None:
        self.tree, self.gateway = tree, gateway
        self.socket = home / "gw.sock"
        self.provider = BubblewrapProvider(Settings(home=home / "boxes"))
        self.refused = ""
        """What the gateway says of the session: why no call of the agent was answered."""

    async def run(self, **fields: Any) -> tuple[Evidence, bytes]:
        """What remains of the agent, and the file it was to edit."""
        agent = MiniSweAgent()
        mounts = await agent.install(TOOLS, AgentSettings())
        spec = SandboxSpec(WORKDIR, tree=self.tree, mounts=mounts, gateway=self.socket)
        key = await self.gateway.open("s-1")
        async with await self.provider.create(spec, "p-test-agent-1") as sandbox:
            launch = agent.launch(task(sandbox, key, **fields))
            for path, content in launch.files.items():
                await sandbox.put(path, content)
            await sandbox.start(EXEC_ID, Exec(launch.argv, env=launch.env, timeout_s=AGENT_S))
            status = await sandbox.wait(EXEC_ID, 1.0)
            while not status.done:
                if (await self.gateway.control.get("s-1")).is_hopeless:  # as the stage decides
                    await sandbox.signal(EXEC_ID, signal.SIGKILL)
                status = await sandbox.wait(EXEC_ID, 1.0)
            summary = await self.gateway.control.close("s-1")
            self.refused = summary.refused
            evidence = Evidence(
                status,
                await sandbox.output(EXEC_ID, "stdout"),
                await sandbox.output(EXEC_ID, "stderr"),
                {} if summary.refused else {TRAJECTORY: await sandbox.get(TRAJECTORY)},
                summary.turns,
            )
            return evidence, await sandbox.get("greeting.txt")

    async def turns(self) -> list[Turn]:
        return turns_parquet.decode((await self.gateway.store.get(turns_key_of("s-1"))).data)


@pytest.fixture
async def stand(tmp_path: Path, tree: Path) -> AsyncIterator[Stand]:
    missing = BubblewrapProvider(Settings(home=tmp_path / "boxes")).check()
    if missing:
        pytest.skip("; ".join(missing))
    async with (
        ScriptedEngine(SCRIPTS) as engine,
        LocalGateway(tmp_path / "home", engine={"url": engine.url, "kind": "vllm"}) as gateway,
        unix_socket(tmp_path / "gw.sock", gateway.url),
    ):
        yield Stand(tmp_path, tree, gateway)


@pytest.mark.registry
@pytest.mark.parametrize("client", ["litellm", "direct"])
async def test_it_edits_a_file_over_several_turns(stand: Stand, client: str) -> None:
    """It reads, edits and submits: finished, the file changed byte-exactly, four turns recorded."""
    evidence, greeting = await stand.run(options={"client": client})
    end = MiniSweAgent().classify(evidence)

    assert (end, evidence.turns) == (AgentEnd.FINISHED, 4), evidence.stderr_tail
    assert greeting == b"hello\r\n"


@pytest.mark.longer
@pytest.mark.registry
async def test_its_turns_are_one_growing_sequence(stand: Stand) -> None:
    """Each prompt begins with the prompt and completion before it: one linear chain of tokens."""
    await stand.run()
    recorded = await stand.turns()

    for before, after in itertools.pairwise(recorded):
        held = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(held)] == held


@pytest.mark.registry
async def test_the_prompt_arrives_as_it_was_written(stand: Stand) -> None:
    """Line separators, emoji and braces of an issue survive the way through its YAML settings."""
    evidence, _ = await stand.run(options={"client": "direct"})
    messages = json.loads(evidence.files[TRAJECTORY])["messages"]
    expected = prompt_template.ISSUE_TEMPLATE.replace("{workdir}", WORKDIR).replace(
        "{problem_statement}", ISSUE
    )

    assert expected in messages[1]["content"]


@pytest.mark.registry
async def test_step_limit_ends_it(stand: Stand) -> None:
    """After the allowed number of model calls it stops, and that is a limit, not a crash."""
    evidence, _ = await stand.run(options={"client": "direct", "step_limit": 2})

    assert MiniSweAgent().classify(evidence) is AgentEnd.LIMIT
    assert evidence.turns == 2


@pytest.mark.registry
async def test_a_model_that_never_calls_a_tool_gives_up(stand: Stand) -> None:
    """Answers without a tool call end it as given up: the model's failure, to be graded."""
    evidence, greeting = await stand.run(
        instance=instance("Say bye rudely"), options={"client": "direct"}
    )

    assert MiniSweAgent().classify(evidence) is AgentEnd.GAVE_UP
    assert greeting == b"bye\r\n"


class Refusal(NamedTuple):
    """What a hosted API answers, and the fix that Perdure adds."""

    status: int
    message: str
    code: str
    fix: str


TOO_LONG = "This model's maximum context length is 9 tokens"
REFUSALS = [
    Refusal(
        401, "Incorrect API key provided", "invalid_api_key", "Check the key in OPENAI_API_KEY"
    ),
    Refusal(404, "The model `policy` does not exist", "model_not_found", "PERDURE_ENGINE__MODEL"),
    Refusal(400, TOO_LONG, "context_length_exceeded", "Raise sampling.max_context_tokens"),
]


class Refusing:
    """An endpoint that refuses every call in the words of a hosted API."""

    def __init__(self, refusal: Refusal) -> None:
        self.calls = 0
        error = {"message": refusal.message, "type": "invalid_request_error", "code": refusal.code}

        async def refuse(request: Request) -> Response:
            self.calls += 1
            return JSONResponse({"error": error}, refusal.status)

        async def models(request: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})

        self.app = Starlette(
            routes=[
                Route("/v1/models", models),
                Route("/v1/chat/completions", refuse, methods=["POST"]),
            ]
        )


@pytest.mark.registry
@pytest.mark.parametrize(
    "refusal",
    [*REFUSALS[:1], *(pytest.param(one, marks=pytest.mark.longer) for one in REFUSALS[1:])],
    ids=lambda refusal: refusal.code,
)
async def test_a_refused_call_is_told_once_in_the_endpoints_words(
    tmp_path: Path, tree: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure has the endpoint's own sentence and the fix. The agent would ask ten times, in minutes; it
    may ask three times."""
    if missing := BubblewrapProvider(Settings(home=tmp_path / "boxes")).check():
        pytest.skip("; ".join(missing))
    endpoint = Refusing(refusal)
    monkeypatch.setattr(hosted_requests, "FIRST_PATIENCE_S", 0.0)
    async with (
        serving(endpoint.app, "127.0.0.1", 0) as port,
        LocalGateway(
            tmp_path / "home",
            engine={"url": f"http://127.0.0.1:{port}/v1", "kind": "openai", "model": "policy"},
        ) as gateway,
        unix_socket(tmp_path / "gw.sock", gateway.url),
    ):
        stand = Stand(tmp_path, tree, gateway)
        evidence, _ = await stand.run()
    run = AgentRun(end=MiniSweAgent().classify(evidence), refused=stand.refused)

    assert run.broke.startswith("the first model call was refused: ")
    assert run.broke.count(refusal.message) == 1, run.broke
    assert refusal.fix in run.broke
    assert endpoint.calls <= HOPELESS + 1  # one more may be on its way when the third is noticed


async def test_oracle_applies_the_gold_patch(tmp_path: Path, tree: Path) -> None:
    """The gold patch lands in the sandbox's tree byte for byte, CRLF kept, and not in the base."""
    provider = BubblewrapProvider(Settings(home=tmp_path / "boxes"))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    (tree / "greeting.txt").write_bytes(b"hello\r\n")
    gold = subprocess.run(["git", "diff"], cwd=tree, check=True, capture_output=True).stdout
    subprocess.run(["git", "checkout", "-q", "."], cwd=tree, check=True)
    async with await provider.create(SandboxSpec(WORKDIR, tree=tree), "p-test-oracle-1") as sandbox:
        launch = Oracle().launch(task(sandbox, instance=instance(gold_patch=gold)))
        for path, content in launch.files.items():
            await sandbox.put(path, content)
        result = await sandbox.exec(launch.argv)

        assert result.status.ok, result.stderr
        assert await sandbox.get("greeting.txt") == b"hello\r\n"
    assert (tree / "greeting.txt").read_bytes() == b"bye\r\n"
