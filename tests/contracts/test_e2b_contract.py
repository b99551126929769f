"""The e2b provider keeps the sandbox contract: the real SDK against the double."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.settings.tree import Settings
from perdure.testing.sandbox_contract import SandboxContract

pytest.importorskip("e2b")
pytest.importorskip("aiohttp")


class TestE2B(SandboxContract):
    reaches_gateway = False  # by a relay, not by a socket of this host
    bounds_memory = False  # it is the template's

    @pytest.fixture
    def short_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    async def provider(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[E2BProvider]:
        from perdure.testing.e2b_server import serving

        if missing := BubblewrapProvider(Settings(home=tmp_path)).check():
            pytest.skip(missing[0])
        async with serving(tmp_path / "server") as (server, url):
            for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
                monkeypatch.setenv(name, url)
            monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
            yield E2BProvider(Settings(home=tmp_path / "home"))
        left = [box.identity for box in await server.guests.list()]
        assert left == [], "boxes of the double outlive their sandboxes"
