"""A Docker engine of the tests' own, with one small image: no registry, no bridge, no daemon left.

Use `docker_engine` as a fixture by importing it; it skips with the reason where there is none.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import small_image

IMAGE = "perdure-test/small:1"
BOOT_S = 60.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str:
    """Empty, or why no engine can be started here."""
    for name in ("docker", "dockerd"):
        if shutil.which(name, path=PATH) is None:
            return f"{name} is not installed (Debian: apt-get install docker.io, after 12 docker-cli too)"
    if os.geteuid() != 0:
        return "dockerd needs root"
    return small_image.why_not()


@contextmanager
def running(storage_driver: str = "vfs") -> Iterator[str]:
    """The address of an engine that has IMAGE. `vfs` runs on any disk."""
    with without_images(storage_driver) as address, tempfile.TemporaryDirectory() as folder:
        root = small_image.write_root(Path(folder, "root"))
        archive = small_image.write_archive(root, Path(folder, "image.tar"))
        docker(address, "import", "--change", "ENV KIND=image", str(archive), IMAGE)
        yield address


@contextmanager
def without_images(storage_driver: str) -> Iterator[str]:
    """Its address. The folder's path is short, because it holds a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="dk-"))
    address = f"unix://{folder}/docker.sock"
    command = [
        *("dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
        *("--pidfile", f"{folder}/pid", "--host", address, "--storage-driver", storage_driver),
        *("--iptables=false", "--ip6tables=false", "--bridge=none"),
        *("--default-ulimit", "nofile=20000:20000"),
    ]
    with open(folder / "log", "wb") as log:
        engine = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PATH": PATH})
    try:
        _wait(engine, address, folder / "log")
        yield address
    finally:
        for container in docker(address, "ps", "--all", "--quiet").split():
            docker(address, "rm", "--force", "--volumes", container)
        engine.send_signal(signal.SIGTERM)
        engine.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def docker(address: str, *arguments: str) -> str:
    done = subprocess.run(
        ["docker", "--host", address, *arguments], capture_output=True, check=False, text=True
    )
    return done.stdout


def _wait(engine: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + BOOT_S
    while not docker(address, "version", "--format", "{{.Server.Version}}").strip():
        if engine.poll() is not None or time.monotonic() > end:
            pytest.skip(f"dockerd does not run here: {log.read_text()[-300:]}")
        time.sleep(0.1)


@pytest.fixture(scope="session")
def docker_address() -> Iterator[str]:
    if reason := why_not():
        pytest.skip(reason)
    with running() as address:
        yield address


@pytest.fixture
def docker_engine(docker_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine's address, which the provider finds in the environment, and its image."""
    monkeypatch.setenv("DOCKER_HOST", docker_address)
    monkeypatch.setenv("PERDURE_DOCKER__IMAGE", IMAGE)
    monkeypatch.delenv("PERDURE_DOCKER__SCOPE", raising=False)
    return docker_address
