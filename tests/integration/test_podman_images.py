"""Sandboxes from images: pulled once through a mirror, and as disposable as any other."""

import asyncio
import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.errors import InstanceError
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Limits

PROGRAMS = ("bash", "cat", "ls", "touch", "head", "env")
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry(http.server.ThreadingHTTPServer):
    """A registry over HTTP with one image in every repository; `manifests` counts what was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder
        self.manifests: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path == "/v2/":
            self._send(b"{}", "application/json")
        elif "/missing/" in self.path:
            body = b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'
            self._send(body, "application/json", 404)
        elif "/manifests/" in self.path:
            self.server.manifests.append(self.path)
            self._send((self.server.folder / "manifest.json").read_bytes(), MANIFEST)
        else:
            blob = self.server.folder / name.removeprefix("sha256:")
            self._send(blob.read_bytes(), "application/octet-stream")

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def podman(*arguments: str) -> str:
    argv = ["podman", "--events-backend=file", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def provider(tmp_path: Path) -> PodmanProvider:
    made = PodmanProvider(Settings(home=tmp_path / "home"))
    if missing := made.check():
        pytest.skip(missing[0])
    return made


@pytest.fixture
def pushed(tmp_path: Path, provider: PodmanProvider) -> Path:
    """A small image with a repository in it, as a registry stores it; not in podman's own storage."""
    root = tmp_path / "image"
    (root / "tmp").mkdir(parents=True)
    (root / "testbed").mkdir()
    (root / "testbed/file").write_text("from the image\n")
    for name in PROGRAMS:
        _copy_program(Path("/bin", name), root)
    subprocess.run(
        ["tar", "--owner=0", "--group=0", "-C", root, "-cf", tmp_path / "image.tar", "."],
        check=True,
    )
    changes = ("--change", "ENV KIND=image", "--change", "ENV PATH=/bin:/usr/bin")
    built = podman("import", "--quiet", *changes, str(tmp_path / "image.tar"))
    podman("push", "--quiet", "--format", "v2s2", built, f"dir:{tmp_path}/pushed")
    podman("rmi", "--force", built)
    return tmp_path / "pushed"


@pytest.fixture
def registry(
    tmp_path: Path, pushed: Path, provider: PodmanProvider, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registry]:
    with Registry(pushed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        insecure = f'[[registry]]\nlocation = "{server.address}"\ninsecure = true\n'
        (tmp_path / "registries.conf").write_text(insecure)
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
        mirror = f"{server.address}/mirror/"
        provider.settings = provider.settings.changed(sandbox={"image_mirror": mirror})
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def spec(registry: Registry) -> Iterator[SandboxSpec]:
    name = f"perdure-test/{uuid4().hex}:1"
    yield SandboxSpec("/testbed", image=name, limits=Limits(disk_mb=16))
    subprocess.run(["podman", "image", "umount", f"{registry.address}/mirror/{name}"], check=False)
    subprocess.run(["podman", "rmi", "-f", f"{registry.address}/mirror/{name}"], check=False)


async def test_image_brings_tree_and_environment(
    provider: PodmanProvider, spec: SandboxSpec
) -> None:
    """The image's own files are at the workdir, writable, with its environment."""
    async with await provider.create(spec, "image-1") as box:
        result = await box.exec("cat file; echo $KIND; touch new; ls")

    assert result.stdout == b"from the image\nimage\nfile\nnew\n"


@pytest.mark.longer
async def test_many_sandboxes_of_one_image_pull_it_once(
    provider: PodmanProvider, spec: SandboxSpec, registry: Registry
) -> None:
    """Sandboxes of one image that boot at once pull it once, by the mirror."""
    boxes = await asyncio.gather(*(provider.create(spec, f"image-{n}") for n in range(3)))
    for box in boxes:
        await box.kill()

    assert registry.manifests == [f"/v2/mirror/{str(spec.image).replace(':', '/manifests/')}"]


@pytest.mark.longer
async def test_next_sandbox_has_the_image_as_it_was(
    provider: PodmanProvider, spec: SandboxSpec
) -> None:
    """What one sandbox wrote anywhere, programs included, is in no other."""
    async with await provider.create(spec, "image-1") as box:
        await box.exec("echo evil >file; echo evil >/bin/env; echo evil >/tmp/x", check=True)
        async with await provider.create(spec, "image-2") as other:
            result = await other.exec("cat file; ls /tmp; head -c 4 /bin/env")

    assert result.stdout == b"from the image\n\x7fELF"


async def test_disk_of_an_image_is_bounded(provider: PodmanProvider, spec: SandboxSpec) -> None:
    """The whole root folder shares the sandbox's disk."""
    async with await provider.create(spec, "image-1") as box:
        result = await box.exec("head -c 32M /dev/zero >/bin/big")

    assert b"No space left" in result.stderr


async def test_missing_image_is_an_error_of_the_row(
    provider: PodmanProvider, registry: Registry
) -> None:
    """An image that the registry does not know is said by name, and not tried again."""
    with pytest.raises(InstanceError, match="missing/image"):
        await provider.create(SandboxSpec("/testbed", image="missing/image:1"), "image-1")


def _copy_program(program: Path, root: Path) -> None:
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    libraries = [word for word in linked.split() if word.startswith("/")]
    for path in (str(program), *libraries):
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
