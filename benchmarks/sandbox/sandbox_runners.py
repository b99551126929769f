"""The measured sides: one of our providers, and the plain tool that does the same work.

Every side boots until its first command has ended, runs `true`, writes a file of 16 MB and kills.
`__main__` controls the timing, the order and the number at once.
"""

import asyncio
import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import service_doubles
from perdure import variant_registry
from perdure.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from perdure.sandboxes.host.host_processes import ProcessId, ended
from perdure.sandboxes.host.procfs import started_at
from perdure.sandboxes.host.root_folder import write_skeleton
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Healthcheck, Sidecar

BOOT, EXEC, FILE, KILL = STEPS = ("boot to first exec", "exec", "16 MB file", "kill")
TARGET = "/tmp/file"
LABELS = {"run": "bench", "rollout": "bench", "attempt": "1"}


class Unavailable(Exception):
    """Why a provider cannot be measured here."""


class Side(ABC):
    """Makes sandboxes of one kind. Each side has its own sandbox type."""

    name: str
    steps: Sequence[str] = STEPS

    @abstractmethod
    async def boot(self) -> Any: ...

    @abstractmethod
    async def exec(self, box: Any) -> None:
        """Run `true` to its end. Raises an error if it failed."""

    @abstractmethod
    async def put(self, box: Any, file: Path) -> None: ...

    @abstractmethod
    async def kill(self, box: Any) -> None: ...


Pair = tuple[Side, Side]
"""Our provider and the plain tool."""


@asynccontextmanager
async def pair(name: str, folder: Path, sidecar: str = "") -> AsyncIterator[Pair]:
    """A pair that is ready and warmed up. `sidecar`: an image; both sides are then our sandboxes of it,
    and only the first has a sidecar, with a health check. Raises: Unavailable."""
    folder.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        if name in service_doubles.SERVICES:
            service = await stack.enter_async_context(
                service_doubles.serving(name, folder / "double")
            )
            stack.enter_context(service.environment())
        if name == "docker":
            stack.enter_context(_docker_engine())
        kind = variant_registry.load("sandbox", variant_registry.SANDBOXES, name)
        ours = Ours(kind(Settings(home=folder / "home")), _spec(name, folder))
        if missing := ours.provider.check():
            raise Unavailable(missing[0])
        alone = SandboxSpec("/tmp", image=sidecar, labels=LABELS)
        if sidecar:
            ours = Ours(ours.provider, replace(alone, sidecars={"side": _sidecar(sidecar)}))
        box = await ours.boot()
        plain: Side
        if sidecar:
            plain = Ours(ours.provider, alone, "alone")
        else:
            plain = _plain(name, ours, box, folder / "plain")
        await ours.kill(box)
        await plain.kill(await plain.boot())
        yield ours, plain


def _spec(name: str, folder: Path) -> SandboxSpec:
    """Only local providers mount an overlay on a tree. Services would pack and upload it, which is not part
    of a boot."""
    if name not in ("bubblewrap", "podman"):
        return SandboxSpec("/testbed", labels=LABELS)
    tree = folder / "tree"
    tree.mkdir()
    (tree / "file").write_text("base\n")
    return SandboxSpec("/testbed", tree=tree, labels=LABELS)


def _sidecar(image: str) -> Sidecar:
    check = Healthcheck(command=("true",), interval_s=1)
    return Sidecar(image=image, command=("sleep", "infinity"), healthcheck=check)


def _plain(name: str, ours: "Ours", box: Any, folder: Path) -> Side:
    match name:
        case "bubblewrap":
            return PlainBubblewrap(ours.provider, ours.spec, box.box, folder)
        case "podman":
            return _plain_podman(ours.provider, ours.spec, box.box, folder)
        case "docker":
            image = os.environ["PERDURE_DOCKER__IMAGE"]
            stays = ["--network", "none", "--tmpfs", "/tmp", image, "sleep", "infinity"]
            return PlainEngine(name, ["docker"], stays)
        case "e2b":
            return PlainE2B()
        case "daytona":
            return PlainDaytona()
    raise Unavailable(f"there is no plain tool to compare {name} with")


class Ours(Side):
    def __init__(self, provider: SandboxProvider, spec: SandboxSpec, prefix: str = "bench") -> None:
        """`prefix`: of the sandboxes' identities."""
        self.name, self.provider, self.spec = provider.name, provider, spec
        self._prefix = prefix
        self._numbers = itertools.count()

    async def boot(self) -> Sandbox:
        box = await self.provider.create(self.spec, f"{self._prefix}-{next(self._numbers)}")
        await self.exec(box)
        return box

    async def exec(self, box: Any) -> None:
        await box.exec(["true"], check=True)

    async def put(self, box: Any, file: Path) -> None:
        await box.put(TARGET, file)

    async def kill(self, box: Any) -> None:
        await box.kill()


# -- plain programs -------------------------------------------------------------------------------


class PlainBubblewrap(Side):
    """`bwrap` with the same flags running `true`: no overlay, no limits and no process that stays."""

    name = "plain bwrap"
    steps = (BOOT, EXEC)

    def __init__(self, provider: Any, spec: SandboxSpec, box: SandboxFolder, folder: Path) -> None:
        argv = BubblewrapProvider.command(provider, spec, box)
        flags = argv[: argv.index("--")]
        for flag in ("--info-fd", "--seccomp"):  # file descriptors that a keeper would hold
            at = flags.index(flag)
            del flags[at : at + 2]
        for name in ("tmp", "home", "shm", "tree"):
            (folder / name).mkdir(parents=True)
        plain = [flag.replace(str(box.path / "disk"), str(folder)) for flag in flags]
        self._command = [*plain, "--", "/usr/bin/true"]

    async def boot(self) -> None:
        await self.exec(None)

    async def exec(self, box: None) -> None:
        pid = os.posix_spawn(self._command[0], self._command, {})
        await ended(ProcessId(pid, started_at(pid)), 60)
        if os.waitpid(pid, 0)[1] != 0:
            raise RuntimeError("plain bwrap failed: its flags no longer run without a keeper")

    async def put(self, box: None, file: Path) -> None:
        raise NotImplementedError

    async def kill(self, box: None) -> None:
        pass


class PlainEngine(Side):
    """The container engine's own command line: `run --detach`, `exec`, `rm --force`."""

    def __init__(self, name: str, program: Sequence[str], container: Sequence[str]) -> None:
        """`container`: flags, image and command of a container that keeps running."""
        self.name = f"plain {name}"
        self._program, self._container = program, container
        self._at_once = (
            ("--time", "0") if name == "podman" else ()
        )  # docker's `rm` has no grace period
        self._numbers = itertools.count()

    async def boot(self) -> str:
        name = f"perdure-bench-{os.getpid()}-{next(self._numbers)}"
        await self._call("run", "--detach", "--name", name, *self._container)
        await self.exec(name)
        return name

    async def exec(self, box: str) -> None:
        await self._call("exec", box, "true")

    async def put(self, box: str, file: Path) -> None:
        # `cp` cannot write into a tmpfs
        await self._call("exec", "--interactive", box, "sh", "-c", f"cat >{TARGET}", given=file)

    async def kill(self, box: str) -> None:
        await self._call("rm", "--force", *self._at_once, "--volumes", box)

    async def _call(self, *arguments: str, given: Path | None = None) -> None:
        with (given or Path("/dev/null")).open("rb") as stdin:
            process = await asyncio.create_subprocess_exec(
                *self._program,
                *arguments,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"{self.name} {arguments[0]}: {said[-300:].decode()}")


def _plain_podman(
    provider: Any, spec: SandboxSpec, box: SandboxFolder, folder: Path
) -> PlainEngine:
    """The flags of our containers on plain folders. They sleep instead of running a keeper."""
    argv = PodmanProvider.command(provider, spec, box)
    at = argv.index("run")
    flags = argv[at + 1 : argv.index("--rootfs")]
    flags.remove("--interactive")
    flags.remove("--rm")
    for flag in ("--name", "--pidfile"):
        place = flags.index(flag)
        del flags[place : place + 2]
    for name in ("tmp", "home", "shm", "tree"):
        (folder / name).mkdir(parents=True)
    write_skeleton(folder / "root")
    plain = [flag.replace(str(box.path / "disk"), str(folder)) for flag in flags]
    stays = [*plain, "--rootfs", str(folder / "root"), "/bin/sleep", "infinity"]
    return PlainEngine("podman", argv[:at], stays)


@contextlib.contextmanager
def _docker_engine() -> Iterator[None]:
    """Uses the engine and image that the environment names; otherwise starts our own engine."""
    if "DOCKER_HOST" in os.environ and "PERDURE_DOCKER__IMAGE" in os.environ:
        yield
        return
    from tests import docker_engine

    if reason := docker_engine.why_not():
        raise Unavailable(reason)
    with docker_engine.running("overlay2") as address:
        os.environ |= {"DOCKER_HOST": address, "PERDURE_DOCKER__IMAGE": docker_engine.IMAGE}
        try:
            yield
        finally:
            del os.environ["DOCKER_HOST"], os.environ["PERDURE_DOCKER__IMAGE"]


# -- plain SDKs -----------------------------------------------------------------------------------


class PlainE2B(Side):
    name = "plain e2b SDK"

    async def boot(self) -> Any:
        from e2b import AsyncSandbox

        box = await AsyncSandbox.create("base", timeout=3600, allow_internet_access=False)
        await self.exec(box)
        return box

    async def exec(self, box: Any) -> None:
        await box.commands.run("true")

    async def put(self, box: Any, file: Path) -> None:
        with file.open("rb") as source:
            await box.files.write(TARGET, source)

    async def kill(self, box: Any) -> None:
        await box.kill()


class PlainDaytona(Side):
    """Uses the SDK's polling, as ours does, because the double has no event socket."""

    name = "plain daytona SDK"

    async def boot(self) -> Any:
        from perdure.sandboxes.providers.daytona.daytona_client import client

        box = await (await client()).create()
        await self.exec(box)
        return box

    async def exec(self, box: Any) -> None:
        done = await box.process.exec("true")
        if done.exit_code != 0:
            raise RuntimeError(f"plain daytona: {done.result}")

    async def put(self, box: Any, file: Path) -> None:
        await box.fs.upload_file(str(file), TARGET)

    async def kill(self, box: Any) -> None:
        await box.delete()
