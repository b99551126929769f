"""The agent's sandbox reaches no engine and no control route."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.gateway.base import session_key
from perdure.gateway.http import listening_sockets
from perdure.gateway.http.http_app import create_app
from perdure.home_folder import Secrets
from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.testing.local_server import served
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import Limits

SECRET = b"a secret of many letters"
LABELS = {"run": "r", "rollout": "o", "attempt": "1"}
LIMITS = Limits(memory_mb=256, cpus=2, pids=64, disk_mb=16, output_mb=1)
CONTROL = [
    "POST /pause",
    "POST /update_weights",
    "POST /collective_rpc",
    "POST /inference/v1/generate",
    "GET /engines",
    "POST /engines",
]


@pytest.fixture
def provider(tmp_path: Path) -> BubblewrapProvider:
    provider = BubblewrapProvider(Settings(home=tmp_path / "boxes"))
    if missing := provider.check():
        pytest.skip(missing[0])
    return provider


@pytest.fixture
def socket() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pe-"))  # a socket's path is short
    yield folder / "gateway.sock"
    shutil.rmtree(folder)


@asynccontextmanager
async def gateway(home: Path, socket: Path, engine_url: str) -> AsyncIterator[None]:
    settings = Settings(home=home, engine={"url": engine_url, "kind": "vllm"})
    app = create_app(settings, Secrets.of(SECRET), LocalStore(home / "store"))
    async with served(app, listening_sockets.bind_unix(socket)):
        yield


async def status(box: Sandbox, address: str, route: str, key: str) -> str:
    """Status of one request from inside, or `unreachable`."""
    host, port = address.removeprefix("http://").split(":")
    head = rf"{route} HTTP/1.0\r\nAuthorization: Bearer {key}\r\nContent-Length: 0\r\n\r\n"
    result = await box.exec(f"exec 3<>/dev/tcp/{host}/{port} && printf '{head}' >&3 && head -1 <&3")
    return result.stdout.split()[1].decode() if result.stdout else "unreachable"


async def test_a_sandbox_reaches_the_gateway_and_no_engine(
    tmp_path: Path, provider: BubblewrapProvider, socket: Path
) -> None:
    """No route of an engine answers inside; the gateway answers and forwards to none of them."""
    key = session_key(SECRET, "s")
    spec = SandboxSpec(workdir="/testbed", limits=LIMITS, labels=LABELS, gateway=socket)
    async with (
        ScriptedEngine() as engine,
        gateway(tmp_path, socket, engine.url),
        await provider.create(spec, "isolated") as box,
    ):
        assert box.gateway_url is not None
        direct = [await status(box, engine.url, route, key) for route in ("GET /health", *CONTROL)]
        known = await status(box, box.gateway_url, "GET /healthz", key)
        through = [await status(box, box.gateway_url, route, key) for route in CONTROL]

    assert set(direct) == {"unreachable"}
    assert known == "200"
    assert through == ["404", "404", "404", "404", "401", "401"]
