"""A rollout whose agent and tests reach a listed host: the stages, their evidence, and what an outage
means."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.cli.commands.show import _steps
from perdure.reports import stored_rollout
from perdure.rollouts.activity_messages import Attempt, GradedPatch
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Outcome, RolloutRequest
from tests.certificates import Authority, issue
from tests.integration.command_agent import CommandAgent
from tests.integration.one_row import ROW, save_row

FETCH = """
import pathlib, sys, urllib.request
for url in sys.argv[1:]:
    try:
        pathlib.Path("a.txt").write_bytes(urllib.request.urlopen(url).read())
    except OSError:
        pass
"""


class FetchingAgent(CommandAgent):
    name: ClassVar[str] = f"{__name__}:FetchingAgent"
    urls: ClassVar[tuple[str, ...]] = ()

    @property
    def argv(self) -> tuple[str, ...]:  # type: ignore[override]  # the port is known only then
        return ("python3", "-c", FETCH, *self.urls)


@asynccontextmanager
async def serving(
    context: ssl.SSLContext | None = None, heads: list[bytes] | None = None
) -> AsyncIterator[int]:
    """`heads` gets the requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.read(4096)
        if heads is not None:
            heads.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ntwo\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Services]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    real = socket.getaddrinfo

    def resolve(host: Any, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == "files.example" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    provider = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    yield Services(Settings(home=tmp_path / "home", store=str(tmp_path / "store")))
    for info in await provider.list():
        await provider.kill(info.identity)


class Rollout:
    """The stages of one rollout, as its workflow calls them."""

    def __init__(self, services: Services, **fields: Any) -> None:
        asked = {"run_id": "r", "instance": ROW, "agent": FetchingAgent.name, **fields}
        request = RolloutRequest.model_validate(asked)
        self._attempt = Attempt(request=request, attempt=1, workflow_run_id="00000000")
        self._stages, self._called = Stages(services), ActivityEnvironment()

    async def play(self) -> None:
        for stage in (self._stages.boot, self._stages.run_agent, self._stages.capture):
            await self._called.run(stage, self._attempt)

    async def grade(self) -> GradedPatch:
        return await self._called.run(self._stages.grade, self._attempt)


def fetching_tests(port: int) -> dict[str, Any]:
    line = f"python3 -c 'import urllib.request as u; u.urlopen(\"http://files.example:{port}/\")'"
    return {"grading": {"protocol": "eval_cmd", "eval_cmd": line}}


def listing(port: int) -> dict[str, Any]:
    return {
        phase: {"network": [f"files.example:{port}", f"127.0.0.1:{port}"]}
        for phase in ("agent", "grade")
    }


async def test_agent_and_tests_reach_the_listed_host(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the agent asked for besides is in the attempt's files and in `perdure show`."""
    async with serving() as port:
        await save_row(services, tmp_path / "tree", **fetching_tests(port))
        urls = (f"http://files.example:{port}/", "http://evil.example/", "http://evil.example/2")
        monkeypatch.setattr(FetchingAgent, "urls", urls)
        rollout = Rollout(services, phases=listing(port))
        await rollout.play()
        graded = await rollout.grade()
    found = await stored_rollout.read(services.store, stored_rollout.RolloutName("r", "add-1", 0))
    last = found.last

    assert graded.outcome is Outcome.RESOLVED
    assert last is not None
    assert [one.model_dump() for one in last.networks["agent-1"].refused] == [
        {"host": "evil.example", "port": 80, "reason": "not listed", "count": 2}
    ]
    assert list(last.networks) == ["agent-1"]
    assert "network agent-1: evil.example:80 not listed (2 requests)" in _steps(last)


CLIS = """
printf '%s' "$0" >/tmp/ca.pem
export SSL_CERT_FILE=/tmp/ca.pem CURL_CA_BUNDLE=/tmp/ca.pem GIT_SSL_CAINFO=/tmp/ca.pem
curl -fsS "https://files.example:$1/" >a.txt
git ls-remote "https://files.example:$1/repo.git" >>a.txt
curl -sS https://curl.example/ https://198.51.100.7/
git ls-remote https://git.example/x.git
python3 -m pip download --no-deps --retries 0 -q -d /tmp/got harmless
true
"""
"""Unmodified programs; `$1` is the port of the listed host."""


async def test_usual_programs_reach_only_listed_hosts(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """curl and git reach it by its name and its own certificate; what they and pip want besides is
    evidence."""
    authority = Authority.of(tmp_path)
    own = issue(tmp_path, "files", "DNS:files.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    heads: list[bytes] = []
    async with serving(context, heads) as port:
        await save_row(services, tmp_path / "tree", **fetching_tests(port))
        argv = ("bash", "-c", CLIS, authority.file.read_text(), str(port))
        monkeypatch.setattr(FetchingAgent, "argv", argv)
        rollout = Rollout(services, phases=listing(port))
        await rollout.play()
    found = await stored_rollout.read(services.store, stored_rollout.RolloutName("r", "add-1", 0))
    last = found.last
    assert last is not None
    assert last.patch is not None
    refused = {one.host for one in last.networks["agent-1"].refused}
    patch = await services.store.get(last.patch["key"])

    assert {"curl.example", "198.51.100.7", "git.example"} <= refused
    assert "files.example" not in refused
    assert any(head.startswith(b"GET /repo.git/info/refs") for head in heads)
    assert b"+two" in patch.data


async def test_an_outage_is_no_verdict(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that fail while a listed host is away are run again."""
    async with serving() as port:
        monkeypatch.setattr(FetchingAgent, "urls", (f"http://files.example:{port}/",))
        await save_row(services, tmp_path / "tree", **fetching_tests(port))
        rollout = Rollout(services, phases=listing(port))
        await rollout.play()
    with pytest.raises(ApplicationError, match=f"could not reach files.example:{port}"):
        await rollout.grade()


async def test_a_row_opens_no_network(services: Services, tmp_path: Path) -> None:
    """Its list needs the worker's setting, and the refusal comes before a sandbox."""
    await save_row(services, tmp_path / "tree", phases={"grade": {"network": ["a.example"]}})
    with pytest.raises(ApplicationError, match=r"PERDURE_SANDBOX__ROW_HOSTS=a\.example"):
        await Rollout(services).play()

    assert await services.provider("bubblewrap").list() == []
