"""A real gateway on a loopback port, in this process's event loop: for tests and notebooks."""

import asyncio
import socket
from pathlib import Path
from typing import Any

from perdure.gateway.base import SessionSpec
from perdure.gateway.control import GatewayControl
from perdure.gateway.http.app import create_app
from perdure.gateway.http.server import NO_GRACE, Server, limited, make_server
from perdure.gateway.journal.base import Journal
from perdure.gateway.journal.configured import open_journal
from perdure.home import load_secret, load_secrets
from perdure.settings.tree import Settings
from perdure.storage.base import Store, open_store


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
        self._journal: Journal
        self._server: Server
        self._serving: asyncio.Task[None]

    async def __aenter__(self) -> "LocalGateway":
        self._journal = open_journal(self.settings, self.store)
        secrets = load_secrets(self.settings)
        app = create_app(self.settings, secrets, self.store, self._journal)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.control = GatewayControl(self.url, secrets)
        guarded = limited(app, secrets)
        self._server = make_server(guarded, timeout_graceful_shutdown=NO_GRACE)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.control.aclose()
        self._server.stop()
        await self._serving
        await self._journal.aclose()

    async def open(self, session_id: str, **spec: Any) -> str:
        """Open a session; returns its key."""
        turns_key = spec.pop("turns_key", turns_key_of(session_id))
        await self.control.open(SessionSpec(session_id=session_id, turns_key=turns_key, **spec))
        return self.control.key(session_id)


def turns_key_of(session_id: str) -> str:
    return f"turns/{session_id}.parquet"
