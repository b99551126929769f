"""Runs inside Harbor's own Python: a bash-tool loop on the host with one kept-alive connection, or the
same loop in a Python in the sandbox."""

# mypy: ignore-errors
# Harbor is importable only in its own environment.

import asyncio
import functools
import json
import os
import tempfile
from pathlib import Path

import aiohttp
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

URL = os.environ.get("BENCH_ENDPOINT", "") + "/v1/chat/completions"
TRIES = 60
TURNS = int(os.environ.get("BENCH_TURNS", "0"))
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


@functools.cache
def session() -> aiohttp.ClientSession:
    """One connection pool for all trials of the job."""
    return aiohttp.ClientSession()


async def ask(body: dict) -> dict:
    """Repeat the call while the engine is away, as the other sides' agents do."""
    for tries in range(TRIES):
        try:
            async with session().post(URL, json=body) as response:
                if response.status < 500:
                    response.raise_for_status()
                    return await response.json()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            pass
        await asyncio.sleep(min(0.1 * 2**tries, 2.0))
    raise ConnectionError("the engine did not come back")


class BashAgent(BaseAgent):
    @staticmethod
    def name() -> str:
        return "bench-bash"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        messages = [
            {"role": "system", "content": "You are a helpful assistant that can use a shell."},
            {"role": "user", "content": instruction},
        ]
        for _ in range(TURNS):
            body = {"model": "policy", "messages": messages, "tools": [TOOL]}
            answer = await ask(body)
            message = answer["choices"][0]["message"]
            messages.append(message)
            for call in message["tool_calls"]:
                command = json.loads(call["function"]["arguments"])["command"]
                done = await environment.exec(command)
                output = (done.stdout or "") + (done.stderr or "")
                if output.startswith(DONE):
                    await self._submit(environment, output.partition("\n")[2])
                    (self.logs_dir / "messages.json").write_text(json.dumps(messages))
                    return
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call["id"],
                        "content": json.dumps({"returncode": done.return_code, "output": output}),
                    }
                )

    async def _submit(self, environment: BaseEnvironment, patch: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "patch.diff"
            path.write_text(patch)
            await environment.upload_file(path, "/logs/artifacts/patch.diff")


class InsideAgent(BashAgent):
    """One command: runs the loop, then saves its patch as the artifact. It prints nothing on success."""

    @staticmethod
    def name() -> str:
        return "bench-inside"

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        port = URL.split("/")[2].rpartition(":")[2]
        done = await environment.exec(
            f"$BENCH_PYTHON -I -S /opt/bench/bash_loop.py {port} {DONE}"
            " && cp patch.txt /logs/artifacts/patch.diff",
            env={
                "BENCH_KEY": "none",
                "BENCH_MODEL": "policy",
                "BENCH_SYSTEM": "You are a helpful assistant that can use a shell.",
                "BENCH_TURNS": "0",
                "BENCH_PROMPT": instruction,
            },
        )
        if done.return_code != 0:
            raise RuntimeError(done.stderr or "")
