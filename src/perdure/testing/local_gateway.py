"""A real gateway on a loopback port, in this process's event loop: for tests and notebooks."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from perdure.gateway.base import SessionSpec
from perdure.gateway.control_client import GatewayControl
from perdure.gateway.http.http_app import create_app
from perdure.gateway.http.http_server import limited
from perdure.home_folder import load_secret, load_secrets
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.testing.local_server import served


class LocalGateway:
    """`python -m perdure.gateway` without the process.

    Example:
        async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
            key = await gateway.open("s-1")
            # POST gateway.url + "/v1/chat/completions", Authorization: Bearer <key>
            await gateway.control.close("s-1")
    """

    def __init__(self, home: Path, *, store: Store | None = None, **settings: Any) -> None:
        self.settings = Settings(home=home, **settings)
        self.store = store or open_store(self.settings)
        self.secret = load_secret(self.settings)
        self.url = ""
        self.control: GatewayControl
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "LocalGateway":
        secrets = load_secrets(self.settings)
        app = create_app(self.settings, secrets, self.store)
        self.url = await self._opened.enter_async_context(served(limited(app, secrets)))
        self.control = GatewayControl(self.url, secrets)
        self._opened.push_async_callback(self.control.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def open(self, session_id: str, **spec: Any) -> str:
        """Open a session; returns its key."""
        turns_key = spec.pop("turns_key", turns_key_of(session_id))
        await self.control.open(SessionSpec(session_id=session_id, turns_key=turns_key, **spec))
        return self.control.key(session_id)


def turns_key_of(session_id: str) -> str:
    return f"turns/{session_id}.parquet"
