"""Several real gateway processes behind one TCP port, and agents that retry as the CLIs do.

Agents are plain HTTP clients: on a lost connection or a 5xx they send the identical body again.
After each answer they repeat the request over a new connection: any process must repeat it.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from perdure.episodes.turns_parquet import decode
from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import GatewayControl
from perdure.home_folder import Secrets
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.testing.scripted_engine import ScriptedEngine

SECRET = b"one secret for the whole pool"
ENDS_WITHIN_S = 300.0
GIVE_UP_S = 20.0
"""How long an agent waits for an answer before it asks again: for a process that is stopped."""

Stream = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Prompt and completion ids of each turn, in the session's order."""


class Pool:
    """N gateways that accept from one socket. `homes`: the home of each, one host per folder."""

    def __init__(self, homes: list[Path], engine_url: str, **settings: str) -> None:
        self.homes = homes
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")},
            "PERDURE_SECRET": SECRET.decode(),
            "PERDURE_ENGINE__URL": engine_url,
            "PERDURE_ENGINE__KIND": "vllm",
            **{f"PERDURE_{name.upper()}": value for name, value in settings.items()},
        }

    @property
    def store(self) -> Store:
        given = {
            name: self._environment[f"PERDURE_{name.upper()}"]
            for name in ("store", "s3_endpoint_url")
            if f"PERDURE_{name.upper()}" in self._environment
        }
        return open_store(Settings(home=self.homes[0], **given))  # type: ignore[arg-type]

    def control(self) -> GatewayControl:
        return GatewayControl(self.url, Secrets.of(SECRET))

    async def __aenter__(self) -> "Pool":
        self.processes = [self._spawn(number) for number in range(len(self.homes))]
        try:
            await asyncio.gather(*map(self._up, range(len(self.homes))))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes:
            await asyncio.to_thread(process.wait, ENDS_WITHIN_S)
        self.listener.close()

    def signal(self, number: int, signum: int) -> None:
        self.processes[number].send_signal(signum)

    async def kill(self, number: int) -> None:
        """Signal 9, and what a supervisor does then: start it again on the same listener."""
        self.processes[number].kill()
        await asyncio.to_thread(self.processes[number].wait)
        self.processes[number] = self._spawn(number)

    def _spawn(self, number: int) -> "subprocess.Popen[bytes]":
        home = self.homes[number]
        home.mkdir(parents=True, exist_ok=True)
        with (home / f"gateway-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "perdure.gateway"),
                    *("--listeners", str(self.listener.fileno())),
                    *("--health", str(self._health(number))),
                ],
                env={**self._environment, "PERDURE_HOME": str(home)},
                pass_fds=(self.listener.fileno(),),
                stderr=log,
            )

    def _health(self, number: int) -> Path:
        return self.homes[number] / f"{number}.health"

    async def _up(self, number: int) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(self._health(number)))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            while self.processes[number].poll() is None:
                try:
                    await client.get("/healthz", timeout=60)
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
                else:
                    return
        raise AssertionError((self.homes[number] / f"gateway-{number}.log").read_text()[-2000:])


@dataclass
class Crowd:
    """Agents of many sessions, and what they saw."""

    url: str
    engine: ScriptedEngine
    answered: int = 0
    watchers: list[tuple[int, "asyncio.Event"]] = field(default_factory=list)
    retries: int = 0
    surprises: list[str] = field(default_factory=list)
    """A repeated request whose answer differed, or that the engine was asked for again."""

    async def until(self, answered: int) -> None:
        """Wait for that many answers."""
        event = asyncio.Event()
        self.watchers.append((answered, event))
        self._tell()
        await event.wait()

    async def agent(self, session_id: str, key: str) -> None:
        """A whole session: calls, tool results, until an answer without a tool call."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {session_id}."}]
        while True:
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            content = await self._ask(key, body)
            sampled = self.engine.stats().calls_by_session[session_id]
            if await self._ask(key, body) != content:
                self.surprises.append(f"{session_id}: another answer to the same request")
            if self.engine.stats().calls_by_session[session_id] != sampled:
                self.surprises.append(f"{session_id}: an answered turn was sampled again")
            self.answered += 1
            self._tell()
            message = json.loads(content)["choices"][0]["message"]
            if not message.get("tool_calls"):
                return
            call = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": call, "content": "a\nb\n"}]

    async def _ask(self, key: str, body: bytes) -> bytes:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        while True:
            async with httpx.AsyncClient(base_url=self.url, timeout=GIVE_UP_S) as client:
                try:
                    answer = await client.post(
                        "/v1/chat/completions", content=body, headers=headers
                    )
                except httpx.TransportError:
                    self.retries += 1
                    continue
            if answer.status_code < 500:
                assert answer.status_code == 200, answer.text
                return answer.content
            self.retries += 1
            await asyncio.sleep(0.1)  # as an SDK backs off

    def _tell(self) -> None:
        for wanted, event in self.watchers:
            if self.answered >= wanted:
                event.set()


def spec(number: int) -> SessionSpec:
    name = f"r-{number}-agent-1"
    return SessionSpec(session_id=name, turns_key=f"turns/{name}.parquet")


async def play(
    pool: Pool, engine: ScriptedEngine, sessions: int, disturb: Callable[[Crowd], Any] | None = None
) -> tuple[Crowd, dict[str, Stream]]:
    """Run so many sessions to their ends; what the agents saw, and each session's token stream."""
    crowd = Crowd(pool.url, engine)
    specs = [spec(number) for number in range(sessions)]
    async with pool.control() as control:
        for one in specs:
            await control.open(one)
        async with asyncio.TaskGroup() as group:
            for one in specs:
                group.create_task(crowd.agent(one.session_id, control.key(one.session_id)))
            if disturb is not None:
                group.create_task(disturb(crowd))
        for one in specs:
            await control.close(one.session_id)
    return crowd, {one.session_id: await _stream(pool.store, one) for one in specs}


async def _stream(store: Store, one: SessionSpec) -> Stream:
    turns = decode((await store.get(one.turns_key)).data)
    return [(turn.prompt_ids, turn.completion_ids) for turn in turns]


def differences(streams: dict[str, Stream], expected: dict[str, Stream]) -> list[str]:
    """What is not the same, one line per session."""
    found = []
    for name, stream in expected.items():
        got = streams[name]
        if got != stream:
            same = [
                turn for turn, (one, two) in enumerate(zip(got, stream, strict=False)) if one == two
            ]
            found.append(f"{name}: {len(got)} turns for {len(stream)}, the same are {same}")
    return found


def scripts(turns: int) -> dict[str, Any]:
    """Every session: so many turns with a tool call, then one without."""
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": f"ls {number}"}}]}
        for number in range(turns - 1)
    ]
    return {"default": {"turns": [*calls, {"content": "Done."}]}}
