"""The Modal SDK's client and app, one for each account. The SDK runs them in a thread of its own, so
all event loops of a process share them.
"""

import asyncio
import importlib
import threading
from typing import TYPE_CHECKING, NamedTuple

from perdure.settings import process_environment

if TYPE_CHECKING:
    import modal

NAMES = ("MODAL_SERVER_URL", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_ENVIRONMENT")
"""Variables that name the account."""


class Connection(NamedTuple):
    client: "modal.Client"
    app: "modal.App"


_connections: dict[tuple[str, ...], Connection] = {}
_lock = threading.Lock()


async def connection(app: str) -> Connection:
    """The client, and the app of this name, made at the first call. Raises: the SDK's errors."""
    account = (app, *(process_environment.foreign(name) for name in NAMES))
    if account not in _connections:
        await asyncio.to_thread(_import)  # it takes a second, and heartbeats must continue
        import modal

        client = await modal.Client.from_credentials.aio(
            process_environment.foreign("MODAL_TOKEN_ID"),
            process_environment.foreign("MODAL_TOKEN_SECRET"),
        )
        found = await modal.App.lookup.aio(app, client=client, create_if_missing=True)
        with _lock:
            _connections.setdefault(account, Connection(client, found))
    return _connections[account]


def _import() -> None:
    config = importlib.import_module("modal.config").config
    if config.get("max_throttle_wait") is None:
        # otherwise the SDK waits inside a create, and callers cannot share the account's queue
        config.override_locally("max_throttle_wait", "0")
