"""Starts and stops a real `vllm serve` for benchmarks.

On CPU this is the server that `make test-vllm` installs in `.perdure/vllm`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import httpx

Device = Literal["cpu", "cuda"]
ROOT = Path(__file__).resolve().parents[1]
VLLM = ROOT / ".perdure/vllm"
PROGRAM = VLLM / "venv/bin/vllm"
MODEL = VLLM / "model"
START_S = 600.0
END_S = 30.0
CONTEXT = 8192
EVERYWHERE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""One thread, because two are ten times slower on a shared host with two cores."""


@contextlib.asynccontextmanager
async def serving(
    log: Path,
    *flags: str,
    model: Path = MODEL,
    program: Path = PROGRAM,
    device: Device = "cpu",
) -> AsyncIterator[str]:
    """Yields the server's URL once it is healthy. It serves `model` as `policy`.

    Raises: RuntimeError if no vLLM is installed, or if it ends or is not healthy within `START_S`.
    """
    if not program.exists() or not model.exists():
        raise RuntimeError(f"no {program} or no {model}: `make test-vllm` installs both for CPU")
    port = _free_port()
    with log.open("wb") as file:
        server = subprocess.Popen(
            [program, "serve", model, *_flags(port, device), *flags],
            env=_environment(program, device),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _healthy(server, url, log)
        yield url
    finally:
        await asyncio.to_thread(_end, server)


def _flags(port: int, device: Device) -> Sequence[str]:
    flags = ["--enable-scale-out", "--generation-config", "vllm"]
    flags += ["--logprobs-mode", "processed_logprobs", "--max-model-len", str(CONTEXT)]
    flags += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    return [*flags, "--enforce-eager"] if device == "cpu" else flags


def _environment(program: Path, device: Device) -> dict[str, str]:
    own = EVERYWHERE | (ON_CPU if device == "cpu" else {})
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    return {**os.environ, **own, **path}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def _healthy(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while server.poll() is None and time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/health")).is_success:
                    return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")


def _end(server: "subprocess.Popen[bytes]") -> None:
    """Kill the whole process group, because engine processes outlive a killed server."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
