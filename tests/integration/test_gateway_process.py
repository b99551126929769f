"""The gateway as a process: killed with signal 9, started again, reached over both sockets."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.errors import ConfigurationError, GatewayUnavailable, StoreUnavailable
from perdure.gateway.base import SessionSpec, session_key
from perdure.gateway.control_client import GatewayControl
from perdure.home_folder import Secrets, load_secrets
from perdure.settings.settings_tree import Settings
from perdure.testing.scripted_engine import ScriptedEngine

SCRIPTS = {
    "default": {
        "turns": [
            {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": f"ls {n}"}}]}
            for n in range(4)
        ]
    }
}
SPEC = SessionSpec(session_id="p-1-agent-1", turns_key="runs/r/turns.parquet")
HOST = "http://gateway"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(SCRIPTS) as engine:
        yield engine


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "h"


class Process:
    """`python -m perdure.gateway` on a home, reached through its unix socket."""

    def __init__(self, home: Path, engine_url: str, *options: str) -> None:
        self.settings = Settings(home=home)
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")},
            "PERDURE_HOME": str(home),
            "PERDURE_GATEWAY__PORT": "0",
            "PERDURE_ENGINE__URL": engine_url,
            **dict(option.split("=", 1) for option in options),
        }
        self.child: subprocess.Popen[bytes]

    async def start(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "perdure.gateway"],
            env=self._environment,
            stderr=subprocess.PIPE,
        )
        line = await asyncio.to_thread(self._listens)
        self.port = json.loads(line)["port"]

    def _listens(self) -> bytes:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            if b"gateway listens" in line:
                return line
        self.child.communicate()
        raise AssertionError(f"the gateway ended with {self.child.returncode}")

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.child.send_signal(number)
        self.child.communicate(timeout=120)
        return self.child.returncode

    def control(self) -> GatewayControl:
        return GatewayControl(
            HOST,
            load_secrets(self.settings),
            transport=httpx.AsyncHTTPTransport(uds=str(self.settings.gateway_socket)),
        )

    def agent(self, key: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(self.settings.gateway_socket))
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=transport, base_url=HOST, headers=headers, timeout=30)


@pytest.fixture
def process(home: Path, engine: ScriptedEngine) -> Iterator[Process]:
    process = Process(home, engine.url)
    yield process
    if process.child.poll() is None:
        process.kill()


async def _turn(agent: httpx.AsyncClient, messages: list[dict[str, Any]]) -> httpx.Response:
    return await agent.post("/v1/chat/completions", json={"model": "m", "messages": messages})


def _extend(messages: list[dict[str, Any]], answer: httpx.Response) -> list[dict[str, Any]]:
    message = answer.json()["choices"][0]["message"]
    call = message["tool_calls"][0]
    return [*messages, message, {"role": "tool", "tool_call_id": call["id"], "content": "a b"}]


@pytest.mark.longer
async def test_a_killed_gateway_repeats_what_it_journaled(
    process: Process, engine: ScriptedEngine
) -> None:
    """kill -9 between journal and answer: the retry gets the recorded turn, sampled once."""
    await process.start()
    async with process.control() as control:
        await control.open(SPEC)
        key = control.key(SPEC.session_id)
    first: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    async with process.agent(key) as agent:
        messages = _extend(first, await _turn(agent, first))
        journal = process.settings.home / "store/journal" / SPEC.session_id
        records = len([*journal.iterdir()])
        engine.control(latency_s=0.2)
        lost = asyncio.create_task(_turn(agent, messages))
        while not engine.stats().in_flight:
            await asyncio.sleep(0)
        lost.cancel()  # no client reads this answer any more
        while len([*journal.iterdir()]) == records:
            await asyncio.sleep(0)
        process.kill()

    await process.start()
    async with process.agent(key) as agent:
        again, twice = await _turn(agent, messages), await _turn(agent, messages)
        third = await _turn(agent, _extend(messages, again))
    async with process.control() as control:
        summary = await control.close(SPEC.session_id)

    assert again.content == twice.content
    assert third.status_code == 200
    assert engine.stats().calls == 3
    assert (summary.turns, summary.bridge_misses) == (3, {"first": 1})


async def test_a_stopped_gateway_leaves_in_order(process: Process) -> None:
    """SIGTERM ends it with code 0 and takes its socket away."""
    await process.start()

    assert process.kill(signal.SIGTERM) == 0
    assert not process.settings.gateway_socket.exists()


async def test_a_gateway_told_to_stop_answers_the_turn_in_flight(
    process: Process, engine: ScriptedEngine
) -> None:
    """SIGTERM drains it: the turn is not bought again."""
    await process.start()
    async with process.control() as control:
        await control.open(SPEC)
        key = control.key(SPEC.session_id)
    engine.control(latency_s=1.0)
    async with process.agent(key) as agent:
        call = asyncio.create_task(_turn(agent, [{"role": "user", "content": "Go."}]))
        while not engine.stats().in_flight:
            await asyncio.sleep(0)
        code = await asyncio.to_thread(process.kill, signal.SIGTERM)

    assert (await call).status_code == 200
    assert (code, engine.stats().calls) == (0, 1)


async def test_both_sockets_serve_and_the_secret_is_private(process: Process) -> None:
    """TCP and the unix socket reach the same sessions; the secret is readable by its owner only."""
    await process.start()
    async with process.control() as control:
        await control.open(SPEC)
    secrets = load_secrets(process.settings)
    async with GatewayControl(f"http://127.0.0.1:{process.port}", secrets) as control:
        summary = await control.get(SPEC.session_id)

    mode = (process.settings.home / "run" / "secret").stat().st_mode
    assert summary.open
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.longer
async def test_a_second_gateway_on_one_home_is_refused(process: Process, home: Path) -> None:
    """It says so in one line, exits with 2, and leaves the first one reachable."""
    await process.start()
    second = Process(home, "http://127.0.0.1:9")

    with pytest.raises(AssertionError, match="ended with 2"):
        await second.start()
    async with process.control() as control:
        assert (await control.open(SPEC)).open


async def test_a_gateway_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    """Control calls then raise what activities retry."""
    async with GatewayControl("http://127.0.0.1:9", Secrets.of(b"x" * 16)) as control:
        with pytest.raises(GatewayUnavailable, match="no answer"):
            await control.get("s")


@pytest.mark.longer
async def test_a_store_that_is_away_is_told_from_the_gateway(process: Process, home: Path) -> None:
    """The stage then waits for the store, and its time starts again when it is over."""
    await process.start()
    async with process.control() as control:
        await control.open(SPEC)
        (home / "store").rename(home / "away")
        with pytest.raises(StoreUnavailable, match=r"is gone|No such file"):
            await control.close(SPEC.session_id)
        (home / "away").rename(home / "store")
        closed = await control.close(SPEC.session_id)

    assert not closed.open


OLD, NEW = b"the-old-secret-of-a-home", b"the-new-secret-of-a-home"


def _replace_secret(home: Path, *secrets: bytes) -> None:
    """As an operator does: another file in the place of the old one, the newest secret first."""
    draft = home / "run" / "secret.draft"
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(b"\n".join(secrets) + b"\n")
    draft.chmod(0o600)
    draft.replace(home / "run" / "secret")


@pytest.mark.longer
async def test_a_secret_is_replaced_while_sessions_are_open(process: Process) -> None:
    """Without a restart: a session of the old secret goes on, a new one is signed by the new secret,
    and a secret that is removed opens nothing."""
    home = process.settings.home
    _replace_secret(home, OLD)
    await process.start()
    first: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    async with process.control() as control:
        await control.open(SPEC)
        key = control.key(SPEC.session_id)
        async with process.agent(key) as agent:
            answer = await _turn(agent, first)
            _replace_secret(home, NEW, OLD)
            goes_on = await _turn(agent, _extend(first, answer))
            later = SPEC.model_copy(update={"session_id": "later", "turns_key": "later.parquet"})
            await control.open(later)
            async with process.agent(control.key("later")) as other:
                signed_anew = await _turn(other, first)
            _replace_secret(home, NEW)
            refused = await _turn(agent, first)
        summary = await control.close("later")

    assert (answer.status_code, goes_on.status_code, signed_anew.status_code) == (200, 200, 200)
    assert control.key("later") == session_key(NEW, "later")
    assert (refused.status_code, summary.turns) == (401, 1)


@pytest.mark.longer
async def test_gateways_that_know_both_secrets_serve_workers_of_either(
    home: Path, engine: ScriptedEngine
) -> None:
    """Many hosts: gateways get both secrets first, so workers may change one after the other."""
    both = (f"PERDURE_SECRET={NEW.decode()}", f"PERDURE_SECRET_PREVIOUS={OLD.decode()}")
    process = Process(home, engine.url, *both)
    await process.start()
    try:
        for secret, session in ((OLD, "of-the-old"), (NEW, "of-the-new")):
            spec = SPEC.model_copy(update={"session_id": session, "turns_key": session})
            way = httpx.AsyncHTTPTransport(uds=str(process.settings.gateway_socket))
            async with GatewayControl(HOST, Secrets.of(secret), transport=way) as control:
                await control.open(spec)
                async with process.agent(control.key(session)) as agent:
                    answer = await _turn(agent, [{"role": "user", "content": "Go."}])

            assert answer.status_code == 200
    finally:
        process.kill()


def test_a_broken_file_keeps_the_secrets_in_use(tmp_path: Path) -> None:
    """A slip in the file while processes run ends no session; a process that starts refuses it."""
    _replace_secret(tmp_path, OLD)
    settings = Settings(home=tmp_path)
    secrets = load_secrets(settings)
    _replace_secret(tmp_path, b"short", OLD)

    assert secrets.accepted == (OLD,)
    with pytest.raises(ConfigurationError, match="shorter than 16"):
        load_secrets(settings)
