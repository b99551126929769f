"""Sidecars in a pod: the real client against the double, which runs each container's command."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError, SandboxLost
from perdure.sandboxes.providers.kubernetes.pod_boot_wait import BootWait
from perdure.sandboxes.providers.kubernetes.provider import KubernetesProvider
from perdure.sandboxes.sidecar_boot import SidecarFailed
from perdure.settings.settings_tree import Settings
from perdure.types import Healthcheck, SharedFolder, Sidecar
from tests.service_harness import KUBERNETES, serving
from tests.service_harness import SPEC as PLAIN

SERVE = """
import os, socketserver, sys
words = [os.environ["WORD"].encode()]
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        asked = self.rfile.readline().strip()
        if asked == b"die":
            print("told to die", flush=True)
            os._exit(7)
        words.extend([asked] if asked else [])
        self.wfile.write(words[-1])
socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("127.0.0.1", 5432), Answer).serve_forever()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5432), 5) as it:
    it.sendall(sys.argv[2].encode() + b"\\n")
    print(it.recv(99).decode())
"""
WORD = "a $(HOME) costs $$5"
CHECK = Healthcheck(command=("python3", "-c", ASK, "db", ""), interval_s=1, timeout_s=5, retries=60)
DB = Sidecar(
    image="postgres:16",
    entrypoint=("python3", "-c", SERVE),
    env={"WORD": WORD},
    healthcheck=CHECK,
    aliases=("database",),
)
SHARED = (SharedFolder(name="data", target="/out"),)
FAILS_ONCE = "[ -e /out/file ] && exec sleep 99; touch /out/file; echo cannot open the disk; exit 3"
SPEC = replace(PLAIN, sidecars={"db": DB})


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    async with serving(KUBERNETES, tmp_path / "server", monkeypatch) as (server, _):
        yield server


@pytest.fixture
def provider(server: Any, tmp_path: Path) -> KubernetesProvider:
    return KubernetesProvider(Settings(home=tmp_path / "home"))


async def ask(box: Any, name: str, word: str = "") -> str:
    said = await box.exec(["python3", "-c", ASK, name, word], check=True)
    return str(said.stdout.decode().strip())


async def left(server: Any) -> list[str]:
    return [info.identity for info in await server.guests.list({})]


async def test_a_sandbox_reaches_its_sidecars_by_name(
    server: Any, provider: KubernetesProvider
) -> None:
    """A healthy service answers under its name and alias with its variables as written, and keeps what
    it was told. A second create finds the same one. A kill leaves no container."""
    box = await provider.create(SPEC, "box")
    first = await ask(box, "db")
    await ask(box, "database", "42")
    again = await ask(await provider.create(SPEC, "box"), "db")
    await provider.kill("box")

    assert (first, again) == (WORD, "42")
    assert (await left(server), server.sandboxes.all()) == ([], [])


async def test_sidecars_start_in_order(provider: KubernetesProvider) -> None:
    """A job that fills the database runs once it is healthy, and is over before the sandbox starts."""
    fill = Sidecar(
        image="i",
        command=("python3", "-c", ASK, "db", "filled"),
        depends_on={"db": "healthy"},
        completes=True,
    )
    async with await provider.create(replace(SPEC, sidecars={"fill": fill, "db": DB}), "b") as box:
        assert await ask(box, "db") == "filled"


async def test_containers_share_a_folder(provider: KubernetesProvider) -> None:
    writer = DB.model_copy(
        update={
            "entrypoint": ("sh", "-c", 'echo made >/out/file && exec "$@"', "sh", *DB.entrypoint),  # type: ignore[misc]
            "folders": (SharedFolder(name="data", target="/out"),),
        }
    )
    folders = (SharedFolder(name="data", target="/in", read_only=True),)
    async with await provider.create(
        replace(SPEC, sidecars={"db": writer}, folders=folders), "box"
    ) as box:
        found = await box.exec("cat /in/file")
        refused = await box.exec("touch /in/other")

    assert found.stdout == b"made\n"
    assert not refused.status.ok


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entrypoint": ("sh", "-c", FAILS_ONCE), "folders": SHARED}, r"code 3 \(Error\).*cannot open the disk"),
        ({"healthcheck": Healthcheck(command=("false",), interval_s=1, timeout_s=1, retries=2)}, "not healthy"),
        ({"entrypoint": ("sh", "-c", "exit 4"), "healthcheck": None, "completes": True}, "code 4"),
        ({"entrypoint": ("sh", "-c", "exit 5"), "restart": "always"}, "code 5"),
    ],
    ids=["exits", "unhealthy", "job", "restarts"],
)  # fmt: skip
async def test_a_failed_sidecar_is_no_sandbox(
    server: Any, provider: KubernetesProvider, changes: dict[str, Any], said: str
) -> None:
    """The error is for a retry, and has the last lines of the log. Nothing is left."""
    spec = replace(SPEC, sidecars={"db": DB.model_copy(update=changes)}, folders=SHARED)
    with pytest.raises(SidecarFailed, match=said):
        await provider.create(spec, "box")

    assert (await left(server), server.sandboxes.all()) == ([], [])


async def test_a_command_during_which_a_sidecar_ends_proves_nothing(
    provider: KubernetesProvider,
) -> None:
    """Kubernetes starts the sidecar again without its data, so tests would fail for no fault of the
    agent's: the sandbox is lost, and the next stage cannot attach to it."""
    box = await provider.create(SPEC, "box")
    with pytest.raises(SandboxLost, match=r"sidecar 'db' exited with code 7"):
        await box.exec(["sh", "-c", f"python3 -c '{ASK}' db die; sleep 3; echo 0 >/tmp/reward"])
    with pytest.raises(SandboxLost, match="sidecar 'db'"):
        await provider.attach("box")
    await provider.kill("box")


async def test_a_sidecar_that_may_restart_does(provider: KubernetesProvider) -> None:
    spec = replace(SPEC, sidecars={"db": DB.model_copy(update={"restart": "unless-stopped"})})
    async with await provider.create(spec, "box") as box:
        await ask(box, "db", "42")
        await box.exec(["python3", "-c", ASK, "db", "die"])
        async with asyncio.timeout(60):
            while (
                said := await box.exec(["python3", "-c", ASK, "db", ""])
            ).stdout != f"{WORD}\n".encode():
                await asyncio.sleep(0.1)

    assert said.status.ok


async def test_a_cluster_without_native_sidecars_is_named(
    server: Any, provider: KubernetesProvider
) -> None:
    """It drops the field, and would wait for the database to exit."""
    server.settings["minor_version"] = 27.0
    with pytest.raises(ConfigurationError, match=r"1\.29 or later"):
        await provider.create(SPEC, "box")

    assert (await left(server), server.sandboxes.all()) == ([], [])


async def test_an_image_of_a_sidecar_that_cannot_be_pulled_is_named(
    server: Any, provider: KubernetesProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = provider._pod(SPEC, "box")
    pod = {**made, "status": {"phase": "Pending", "initContainerStatuses": [
        {"name": "db", "state": {"waiting": {"reason": "InvalidImageName", "message": "no"}}}
    ]}}  # fmt: skip
    found = BootWait("box").judged(pod)

    assert "'postgres:16' cannot be pulled" in str(found)


@pytest.mark.parametrize(
    ("sidecars", "said"),
    [
        ({"My_DB": DB}, "rename 'My_DB'"),
        ({"sandbox": DB}, "rename 'sandbox'"),
        ({"db": DB.model_copy(update={"aliases": ("d_b",)})}, "rename 'd_b' of 'db'"),
        ({"db": DB.model_copy(update={"user": "postgres"})}, "`user` of 'db' to a number"),
        (
            {"db": DB.model_copy(update={"healthcheck": None}), "web": Sidecar(image="i", depends_on={"db": "healthy"})},
            "give 'db' a health check",
        ),
    ],
)  # fmt: skip
async def test_what_a_pod_cannot_run_is_named_before_anything_is_created(
    server: Any, provider: KubernetesProvider, sidecars: dict[str, Sidecar], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        await provider.create(replace(SPEC, sidecars=sidecars), "box")

    assert server.sandboxes.all() == []
