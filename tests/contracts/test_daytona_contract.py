"""The daytona provider keeps the sandbox contract: the real SDK against the double."""

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.sandboxes.bubblewrap import BubblewrapProvider
from perdure.sandboxes.daytona import DaytonaProvider
from perdure.testing.sandbox_contract import SandboxContract, fresh_identity

pytest.importorskip("daytona")
pytest.importorskip("aiohttp")


class TestDaytona(SandboxContract):
    reaches_gateway = False  # by a relay, not by a socket of this host

    @pytest.fixture
    def short_folder(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    async def provider(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[DaytonaProvider]:
        from perdure.testing.daytona_server import serving

        if missing := BubblewrapProvider(tmp_path).check():
            pytest.skip(missing[0])
        async with serving(tmp_path / "server") as (_, url):
            monkeypatch.setenv("DAYTONA_API_URL", f"{url}/api")
            monkeypatch.setenv("DAYTONA_API_KEY", "dtn_0")
            yield DaytonaProvider(tmp_path / "home")

    async def test_large_binary_file_round_trips(
        self, provider: DaytonaProvider, tmp_path: Path
    ) -> None:
        """A file of 200 MB goes in as a stream, is whole inside, and any part of it comes back."""
        path, size = tmp_path / "large", 200 << 20
        with path.open("wb") as file:
            for seed in range(200):
                file.write(random.Random(seed).randbytes(1 << 20))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        async with self.box(provider) as box:
            await box.put("/tmp/large", path)
            inside = (await box.exec("sha256sum /tmp/large", check=True)).stdout.split()[0]
            tail = await box.get("/tmp/large", size - (3 << 20) - 7)

            assert (inside.decode(), tail) == (digest, _tail(path, (3 << 20) + 7))

    async def test_64_sandboxes_at_once(self, provider: DaytonaProvider) -> None:
        """Sixty-four are made, used and killed at the same time, each with its own result."""
        identities = [fresh_identity() for _ in range(64)]

        async def use(number: int) -> bytes:
            box = await provider.create(self.spec(), identities[number])
            said = (await box.exec(f"echo {number} >mine; cat mine")).stdout
            await box.kill()
            return said

        said = await asyncio.gather(*(use(number) for number in range(64)))

        assert (said, await provider.list()) == ([b"%d\n" % n for n in range(64)], [])


def _tail(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-size, os.SEEK_END)
        return file.read()
