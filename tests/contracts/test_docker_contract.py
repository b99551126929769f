"""The docker provider keeps the sandbox contract, on a real engine."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.errors import SandboxLost
from perdure.sandboxes.base import Sandbox
from perdure.sandboxes.docker import DockerProvider
from perdure.testing.sandbox_contract import SandboxContract
from tests.docker_engine import docker_address, docker_engine

__all__ = ["docker_address", "docker_engine"]


class TestDocker(SandboxContract):
    reaches_gateway = False  # by a relay, not by a socket of this host

    @pytest.fixture
    def short_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def provider(self, tmp_path: Path, docker_engine: str) -> DockerProvider:
        return DockerProvider(tmp_path / "home")

    async def test_one_that_nobody_touches_ends_too(self, provider: DockerProvider) -> None:
        """Its first deadline is that of its spec, though whoever made it never says a word again."""
        async with self.box(provider, replace(self.spec(), ttl_s=3)) as box:
            with pytest.raises(SandboxLost):
                await asyncio.wait_for(_used_for_ever(box), 60)


async def _used_for_ever(box: Sandbox) -> None:
    while True:
        await box.exec(["true"])
        await asyncio.sleep(0.1)
