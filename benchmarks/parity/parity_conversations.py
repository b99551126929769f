"""Holds conversations through a gateway process, like those of rollouts, and reads their recorded turns.

It has the sessions, their timing, and the same calls sent directly to the engine.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from perdure.episodes import turns_parquet
from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import GatewayControl
from perdure.gateway.rendering.tokenizer_setting import PACKAGED
from perdure.home_folder import load_secrets
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Sampling, Turn

ROOT = Path(__file__).resolve().parents[2]
MODES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "T-0.7": {"temperature": 0.7},
    "top_p-0.9": {"top_p": 0.9},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "all": {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
}
"""Sampling parameters of each mode, in addition to temperature 1."""
TIMED = ("greedy", "sampled")
"""Modes whose calls are also sent directly to the engine, to compare speeds."""
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Job:
    """All conversations of a mode run at once. `tokens`: the limit of an answer. `text`: characters of
    source code in each question."""

    conversations: int = 8
    turns: int = 3
    tokens: int = 64
    text: int = 2000


@dataclass(frozen=True)
class Played:
    """The recorded turns of each conversation, and the total seconds."""

    mode: str
    conversations: list[list[Turn]]
    seconds: float

    @property
    def recorded(self) -> list[Turn]:
        return list(itertools.chain.from_iterable(self.conversations))

    @property
    def tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.recorded)


@dataclass(frozen=True)
class Gateway:
    """A gateway process in its own home, and a client for its agents."""

    home: Path
    url: str
    client: httpx.AsyncClient
    control: GatewayControl

    async def warm_up(self, job: Job) -> None:
        """Make the engine's first requests, which are slow."""
        await self.play("sampled", replace(job, turns=1, tokens=8), prefix="warm-up-")

    async def play(self, mode: str, job: Job, *, prefix: str = "") -> Played:
        names = [f"{prefix}{mode}-{number}" for number in range(job.conversations)]
        rules = Sampling.model_validate({**MODES[mode], "max_tokens_per_turn": job.tokens})
        for name in names:
            spec = SessionSpec(session_id=name, turns_key=_turns_key(name), sampling=rules)
            await self.control.open(spec)
        asked = zip(names, _questions(job), strict=True)
        began = time.perf_counter()
        await asyncio.gather(*(self._converse(name, questions) for name, questions in asked))
        seconds = time.perf_counter() - began
        return Played(mode, [await self._recorded(name) for name in names], seconds)

    async def _converse(self, name: str, questions: list[str]) -> None:
        headers = {"authorization": f"Bearer {self.control.key(name)}"}
        # The name comes first, so that no conversation finds another's prompt in the engine's cache.
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"Conversation {name}. You read source code."}
        ]
        for question in questions:
            messages.append({"role": "user", "content": question})
            body = {"model": "policy", "messages": messages}
            answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
            messages.append(answer.raise_for_status().json()["choices"][0]["message"])

    async def _recorded(self, name: str) -> list[Turn]:
        """Returns the turns that a trainer would get."""
        await self.control.close(name)
        store = LocalStore(self.home / "store")
        return list(turns_parquet.decode((await store.get(_turns_key(name))).data))


def _turns_key(name: str) -> str:
    return f"parity/{name}.parquet"


def _questions(job: Job) -> list[list[str]]:
    """The questions of each conversation, about this project's source files."""
    files = sorted((ROOT / "src/perdure").rglob("*.py"))
    excerpts = [text[: job.text] for file in files if len(text := file.read_text()) >= job.text]
    if not excerpts:
        raise SystemExit(f"--text {job.text}: no file of this project has this many characters")
    asked = itertools.cycle(f"What does this do?\n\n{text}" for text in excerpts)
    return [list(itertools.islice(asked, job.turns)) for _ in range(job.conversations)]


@contextlib.asynccontextmanager
async def gateway(home: Path, engine_url: str, tokenizer: str) -> AsyncIterator[Gateway]:
    """Runs the gateway with default settings, with journal and fsync, until the context ends."""
    own = {
        "PERDURE_HOME": str(home),
        "PERDURE_GATEWAY__PORT": "0",
        "PERDURE_ENGINE__URL": engine_url,
        "PERDURE_ENGINE__KIND": "vllm",
        "PERDURE_ENGINE__TOKENIZER": tokenizer,
        "PERDURE_ENGINE__TOOL_CALL_PARSER": "auto"
        if tokenizer == PACKAGED
        else "text",  # no conversation has tools
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
    home.mkdir(parents=True, exist_ok=True)
    log = home / "gateway.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "perdure.gateway"], env=inherited | own, stderr=file
        )
    try:
        url = f"http://127.0.0.1:{await _port(process, log)}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client,
            GatewayControl(url, load_secrets(Settings(home=home))) as control,
        ):
            yield Gateway(home, url, client, control)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def _port(process: "subprocess.Popen[bytes]", log: Path) -> int:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if "gateway listens" in line:
                return int(json.loads(line)["port"])
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the gateway did not start: {log.read_text()[-2000:]}")


async def straight(engine_url: str, played: Played) -> float:
    """Seconds of the recorded calls when sent directly to the engine, with as many tokens each.

    A different salt prevents prefix-cache hits on the gateway's prompts.
    """
    async with httpx.AsyncClient(base_url=engine_url, timeout=TIMEOUT_S, trust_env=False) as client:
        began = time.perf_counter()
        await asyncio.gather(*(_again(client, one, played.mode) for one in played.conversations))
        return time.perf_counter() - began


async def _again(client: httpx.AsyncClient, conversation: list[Turn], mode: str) -> None:
    for turn in conversation:
        sampling = {
            "max_tokens": len(turn.completion_ids),
            "temperature": MODES[mode].get("temperature", 1.0),
            "ignore_eos": True,
            "logprobs": 1,
        }
        body = {
            "token_ids": list(turn.prompt_ids),
            "sampling_params": sampling,
            "cache_salt": f"straight-{mode}",
        }
        (await client.post("/inference/v1/generate", json=body)).raise_for_status()
