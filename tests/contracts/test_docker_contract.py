"""The docker provider keeps the sandbox contract, on a real engine."""

from pathlib import Path

import pytest

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
