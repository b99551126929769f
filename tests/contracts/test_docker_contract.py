"""The docker provider keeps the sandbox contract, on a real engine."""

import asyncio
import base64
import re
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.errors import SandboxLost
from perdure.sandboxes.base import Exec, Sandbox
from perdure.sandboxes.host.sandbox_programs import program
from perdure.sandboxes.providers.docker import docker_cli
from perdure.sandboxes.providers.docker.provider import DockerProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.sandbox_contract import SandboxContract
from tests.docker_engine import IMAGE, docker_address, docker_engine

__all__ = ["docker_address", "docker_engine"]


@pytest.mark.longer
class TestDocker(SandboxContract):
    reaches_gateway = False  # through a relay, not a socket of this host

    @pytest.fixture
    def short_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def provider(
        self, tmp_path: Path, docker_engine: str, monkeypatch: pytest.MonkeyPatch
    ) -> DockerProvider:
        """With long time-outs: 64 sandboxes start hundreds of programs, in minutes on a slow host."""
        monkeypatch.setattr("perdure.sandboxes.providers.docker.provider.REQUEST_S", 300.0)
        return DockerProvider(Settings(home=tmp_path / "home"))

    async def test_a_sandbox_that_is_never_renewed_ends_too(self, provider: DockerProvider) -> None:
        """Its first deadline is the spec's, even if its creator never renews it."""
        async with self.box(provider, replace(self.spec(), ttl_s=10)) as box:
            with pytest.raises(SandboxLost):
                async with asyncio.timeout(60):
                    await _used_for_ever(box)

    async def test_no_step_costs_more_calls_than_it_must(
        self, provider: DockerProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A boot is a run and a set-up; a command and an upload are one call each; a
        kill lists the sandbox's containers, removes them, and lists the volumes that they shared."""
        async with self.box(provider):
            pass  # the engine and the image are inspected once
        log, docker = tmp_path / "log", tmp_path / "docker"
        docker.write_text(f'#!/bin/sh\necho "$1" >>{log}\nexec {program("docker")} "$@"\n')
        docker.chmod(0o755)
        monkeypatch.setattr(docker_cli, "program", lambda name: str(docker))
        async with self.box(provider) as box:
            await box.exec("true")
            await box.put("large", b"x" * 100_000)

        assert log.read_text().split() == [
            *("run", "exec", "exec", "exec"),
            *("ps", "rm", "volume"),
        ]

    async def test_no_argument_tells_a_variable(
        self, provider: DockerProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A session's key is in no argument of `docker` or of the programs in the container,
        because every user of the host can list both."""
        log, docker = tmp_path / "log", tmp_path / "docker"
        docker.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {program("docker")} "$@"\n')
        docker.chmod(0o755)
        monkeypatch.setattr(docker_cli, "program", lambda name: str(docker))
        key = {"KEY": "session-key-of-nobody-else"}
        async with self.box(provider) as box:
            await box.put("settings", key["KEY"].encode())
            inside = await box.exec("cat /proc/[0-9]*/cmdline", env=key)
            await box.start("agent", Exec(["sh", "-c", 'echo "$KEY" >said'], env=key))
            await box.wait("agent")

            assert await box.get("said") == f"{key['KEY']}\n".encode()
        assert "exec" in log.read_text()
        assert b"guest_entry" in inside.stdout
        assert not _tells(key["KEY"].encode(), log.read_bytes() + inside.stdout)

    async def test_command_that_breaks_the_sandbox_costs_it_alone(
        self, provider: DockerProvider
    ) -> None:
        """A sandbox in which a command removed Python is lost. No error blames its image."""
        async with self.box(provider, replace(self.spec(), image=IMAGE, tree=None)) as box:
            await box.exec("rm $(command -v python3)", check=True)

            with pytest.raises(SandboxLost, match="python3"):
                await box.exec("true")

    async def test_container_removed_before_its_start_is_lost(
        self, provider: DockerProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kill that comes between a container's making and its start ends the boot as lost."""
        real, docker = program("docker"), tmp_path / "docker"
        docker.write_text(
            f'#!/bin/sh\n[ "$1" = run ] || exec {real} "$@"\nshift 2\n'  # run --detach
            f'id=$({real} create "$@") && {real} rm "$id" >&2 && exec {real} start "$id"\n'
        )
        docker.chmod(0o755)
        monkeypatch.setattr(docker_cli, "program", lambda name: str(docker))

        with pytest.raises(SandboxLost):
            await provider.create(self.spec(), "p-removed-agent-1")


def _tells(secret: bytes, text: bytes) -> bool:
    """Whether the text contains it, plain or in base64."""
    found = (word[: len(word) // 4 * 4] for word in re.findall(rb"[A-Za-z0-9+/]{16,}=*", text))
    return any(secret in each for each in (text, *map(base64.b64decode, found)))


async def _used_for_ever(box: Sandbox) -> None:
    while True:
        await box.exec(["true"])
        await asyncio.sleep(0.1)
