"""The kubernetes provider keeps the sandbox contract: the real client against the double."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.kubernetes.provider import KubernetesProvider
from perdure.settings.tree import Settings
from perdure.testing.sandbox_contract import SandboxContract
from tests.doubles.kubernetes_server import serving

pytest.importorskip("kubernetes_asyncio")


class TestKubernetes(SandboxContract):
    runs_commands_as = "TestE2B"
    reaches_gateway = False  # by a relay, not by a socket of this host
    large_file_mb = 64  # client and server of the socket share this process
    at_once = 16

    @pytest.fixture
    def short_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    async def provider(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[KubernetesProvider]:
        if missing := BubblewrapProvider(Settings(home=tmp_path)).check():
            pytest.skip(missing[0])
        async with serving(tmp_path / "server") as (server, _):
            monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
            yield KubernetesProvider(Settings(home=tmp_path / "home"))
        left = [box.identity for box in await server.guests.list()]
        assert left == [], "boxes of the double outlive their pods"
