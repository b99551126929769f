"""The daytona provider keeps the sandbox contract: the real SDK against the double."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.daytona.provider import DaytonaProvider
from perdure.settings.tree import Settings
from perdure.testing.sandbox_contract import SandboxContract

pytest.importorskip("daytona")
pytest.importorskip("aiohttp")


class TestDaytona(SandboxContract):
    runs_commands_as = "TestE2B"
    reaches_gateway = False  # by a relay, not by a socket of this host
    bounds_memory = False  # it is the snapshot's
    shortest_life_s = None  # the service counts in minutes

    @pytest.fixture
    def short_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    async def provider(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[DaytonaProvider]:
        from perdure.testing.daytona_server import serving

        if missing := BubblewrapProvider(Settings(home=tmp_path)).check():
            pytest.skip(missing[0])
        async with serving(tmp_path / "server") as (_, url):
            monkeypatch.setenv("DAYTONA_API_URL", f"{url}/api")
            monkeypatch.setenv("DAYTONA_API_KEY", "dtn_0")
            yield DaytonaProvider(Settings(home=tmp_path / "home"))
