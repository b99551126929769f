"""The measured servers, each in its own process. The kernel counts their CPU."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.peers.slime import Slime
from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import GatewayControl
from perdure.home_folder import load_secrets
from perdure.settings.settings_tree import Settings
from perdure.types import Sampling

CONTEXT = 1 << 20
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}
SLIME_SERVER = Path(__file__).with_name("slime_server.py")


class Serving(NamedTuple):
    url: str
    key: str
    pid: int


class MemoryS3(NamedTuple):
    url: str

    def puts(self) -> int:
        """So far."""
        counts: dict[str, int] = httpx.get(f"{self.url}/-/counts", trust_env=False).json()
        return sum(number for what, number in counts.items() if what.startswith("PUT "))


@contextlib.contextmanager
def memory_s3(latency_s: float) -> Iterator[MemoryS3]:
    command = [sys.executable, "-m", "benchmarks.s3_server", "--latency", str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield MemoryS3(json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def perdure(
    home: Path, engine_url: str, s3: MemoryS3 | None = None
) -> AsyncIterator[Serving]:
    """The gateway with default settings, with its store in a folder or in `s3`."""
    store = {"PERDURE_STORE": "s3://bench/store", "PERDURE_S3_ENDPOINT_URL": s3.url} if s3 else {}
    ours = {
        **(store | CREDENTIALS if s3 else {}),
        "PERDURE_HOME": str(home),
        "PERDURE_GATEWAY__PORT": "0",
        "PERDURE_ENGINE__URL": engine_url,
        "PERDURE_ENGINE__KIND": "vllm",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
    with _process([sys.executable, "-m", "perdure.gateway"], inherited | ours) as child:
        url = f"http://127.0.0.1:{_port(child, b'gateway listens')}"
        async with GatewayControl(url, load_secrets(Settings(home=home))) as control:
            spec = SessionSpec(
                session_id="s",
                turns_key="turns.parquet",
                sampling=Sampling(max_context_tokens=CONTEXT),
            )
            await control.open(spec)
            yield Serving(url, control.key("s"), child.pid)


@contextlib.asynccontextmanager
async def slime(peer: Slime, engine_url: str) -> AsyncIterator[Serving]:
    """slime's own adapter, in its own environment."""
    argv = [str(peer.python), "-P", str(SLIME_SERVER), engine_url]
    with _process(argv, peer.variables) as child:
        yield Serving(f"http://127.0.0.1:{_port(child, b'listens')}", "s", child.pid)


@contextlib.contextmanager
def _process(argv: list[str], environment: dict[str, str]):  # type: ignore[no-untyped-def]
    child = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.terminate()
        child.communicate()


def _port(child: "subprocess.Popen[bytes]", word: bytes) -> int:
    assert child.stderr is not None
    for line in child.stderr:
        if word in line:
            return int(json.loads(line)["port"])
    raise RuntimeError(f"{child.args!r} ended with {child.wait()}")


def cpu_ms(pid: int) -> float:
    """The CPU of a process, its threads and its children, in milliseconds."""
    own = Path(f"/proc/{pid}/task")
    total = 0.0
    for task in own.iterdir():
        total += int((task / "schedstat").read_text().split()[0]) / 1e6
        children = (task / "children").read_text().split()
        total += sum(cpu_ms(int(child)) for child in children)
    return total


async def ready(client: httpx.AsyncClient) -> None:
    (await client.get("/healthz")).raise_for_status()
