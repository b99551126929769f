"""A viewer over a made store, called without a network."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from perdure.settings.settings_loader import load_settings
from perdure.storage.local_store import LocalStore
from perdure.viewer.pages import Pages
from perdure.viewer.search_index import Index
from perdure.viewer.viewer_app import create_app

ADDRESS = "http://127.0.0.1:8236"
TOKEN = "t" * 40
Show = Callable[[str], Awaitable[str]]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
async def client(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A client without the token."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))

    async def step(workflow_id: str) -> str:
        return f"the agent works in {workflow_id}"

    pages = Pages(load_settings(), store, Index(tmp_path / "cache" / "i.sqlite"), step)
    transport = httpx.ASGITransport(app=create_app(pages, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as found:
        yield found
    await pages.aclose()


@pytest.fixture
def show(client: httpx.AsyncClient) -> Show:
    """A page as a user sees it who opened the printed URL."""

    async def get(path: str) -> str:
        if not client.cookies:
            await client.get("/", params={"token": TOKEN})
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    return get
