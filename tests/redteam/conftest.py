"""Boxes for hostile code, of every local provider that works here; each attack is Python in one."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.sandboxes.base import Exec, ExecResult, Sandbox, SandboxProvider, SandboxSpec
from perdure.settings.settings_tree import Settings
from perdure.types import Limits
from perdure.variant_registry import SANDBOXES, load
from tests.docker_engine import docker_address, docker_engine
from tests.doubles.apptainer_cli import write_program

__all__ = ["docker_address", "docker_engine"]

PROVIDERS = ["bubblewrap", "podman", "docker", "apptainer"]
LIMITS = Limits(memory_mb=256, cpus=1, pids=64, disk_mb=16, output_mb=1)
SPEC = SandboxSpec(workdir="/testbed", limits=LIMITS)

Boot = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path, because unix sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="rt-") as folder:
        yield Path(folder)


@pytest.fixture(params=PROVIDERS)
def provider(
    request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch
) -> SandboxProvider:
    """Docker on an engine of the tests' own; Apptainer on the double of its program."""
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    if request.param == "apptainer":
        if missing := load("sandbox", SANDBOXES, "bubblewrap")(Settings(home=home)).check():
            pytest.skip(missing[0])
        monkeypatch.setenv("PERDURE_APPTAINER__PROGRAM", str(write_program(home / "bin")))
        monkeypatch.setenv("APPTAINER_CONFIGDIR", str(home / "ac"))
    made: SandboxProvider = load("sandbox", SANDBOXES, request.param)(Settings(home=home))
    if missing := made.check():
        pytest.skip(missing[0])
    return made


@pytest.fixture
async def boot(provider: SandboxProvider) -> AsyncIterator[Boot]:
    """`await boot(field=value...)`: a box of the suite's small limits, killed after the test."""
    identities: list[str] = []

    async def make(**changes: object) -> Sandbox:
        identities.append(f"redteam-{uuid4().hex[:12]}")
        return await provider.create(replace(SPEC, **changes), identities[-1])  # type: ignore[arg-type]

    yield make
    await asyncio.gather(*map(provider.kill, identities))


async def attack(box: Sandbox, code: str, *arguments: str) -> ExecResult:
    """Run Python inside; its output is what the attack obtained."""
    return await box.exec(["python3", "-c", code, *arguments], timeout=120)


async def holding(box: Sandbox, code: str, *arguments: str) -> int:
    """Start an attack that takes what it can and keeps it. Returns how much it says it took."""
    return int(await until_held(box, code, *arguments))


async def until_held(box: Sandbox, code: str, *arguments: str, **env: str) -> bytes:
    """Start an attack that goes on. Returns its first line."""
    await box.start("evil", Exec(["python3", "-c", code, *arguments], env=env))
    while not (said := await box.output("evil")).endswith(b"\n"):
        assert not (await box.wait("evil", timeout_s=0.05)).done, await box.output("evil", "stderr")
    return said


def require(box: Sandbox, limit: str) -> None:
    """Skip where this host gives no means to enforce the limit on a whole sandbox."""
    enforced: dict[str, str] = getattr(box, "enforced", {})
    if not enforced.get(limit, "").startswith("cgroup"):
        pytest.skip(f"{limit} is not limited by cgroups here")
