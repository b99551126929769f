"""Finds the gateways: each gateway writes its address to the store, where every host reads it.

Users need not configure these addresses. Owns the records and the order in which a host tries them.
"""

import asyncio
import contextlib
import hashlib
import hmac
import socket
from collections.abc import AsyncIterator
from time import monotonic, time
from urllib.parse import urlsplit

from perdure.errors import NotFound, StoreUnavailable
from perdure.home_folder import Secrets, host_of
from perdure.sandboxes.relay.gateway_route import is_private_to_host
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.types import Frozen

ANNOUNCE_S = 60.0
"""Seconds between two writes of a gateway's record."""
SOON_S = 2.0
"""The same, while the store cannot be reached."""
FORGET_S = 86_400.0
"""Seconds after which a record is removed, because its gateway must have ended."""
READ_S = 30.0
"""Seconds for which a host trusts the records that it has read."""
AVOID_S = 60.0
"""Seconds for which a host tries a gateway last after it failed to connect to it."""
CONNECT_S = 5.0
TEST_NET_ADDRESS = "192.0.2.1"
"""A documentation address that no host has (RFC 5737). Packets to it would take the default route."""


class Address(Frozen):
    url: str
    at: float
    """Unix seconds at which the gateway wrote it, by its host's clock."""


def records(secrets: Secrets) -> str:
    """The records' prefix. It is derived from the secret, because only processes that share a secret
    share sessions."""
    name = hmac.new(secrets.oldest, b"gateways", hashlib.sha256).hexdigest()[:16]
    return f"gateways/{name}/"


async def announce(settings: Settings, store: Store, secrets: Secrets, port: int) -> None:
    """Refresh this host's record until cancelled. Does nothing if other hosts cannot reach the gateway."""
    while True:
        try:
            if not (url := own_url(settings, port)):
                return
            address = Address(url=url, at=time())
            key = f"{records(secrets)}{host_of(settings)}.json"
            await store.put(key, address.model_dump_json().encode())
            await _forget_old(store, secrets)
        except (StoreUnavailable, OSError):
            await asyncio.sleep(SOON_S)
        else:
            await asyncio.sleep(ANNOUNCE_S)


def own_url(settings: Settings, port: int) -> str:
    """The URL at which other hosts reach this gateway; empty if they cannot.

    If the gateway listens on all addresses, this is the address that the host uses towards the store.
    Raises: OSError while the host has no network.
    """
    given = settings.gateway.url
    if given and not is_private_to_host(given):
        return given
    host = settings.gateway.host
    if host in ("0.0.0.0", "::"):
        host = _address_towards(
            urlsplit(settings.s3_endpoint_url or "").hostname or TEST_NET_ADDRESS
        )
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    return "" if is_private_to_host(url) else url


def _address_towards(host: str) -> str:
    """The source address of this host's packets to `host`. Sends nothing."""
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address


async def _forget_old(store: Store, secrets: Secrets) -> None:
    async for key, address in _read(store, secrets):
        if time() - address.at > FORGET_S:
            await store.delete(key)


async def _read(store: Store, secrets: Secrets) -> AsyncIterator[tuple[str, Address]]:
    async for key in store.list(records(secrets)):
        with contextlib.suppress(NotFound, ValueError):  # deleted meanwhile, or not a record
            yield key, Address.model_validate_json((await store.get(key)).data)


class Gateways:
    """The gateways that one host knows."""

    def __init__(self, settings: Settings, store: Store, secrets: Secrets) -> None:
        self._settings, self._store, self._secrets = settings, store, secrets
        self._known: list[str] = []
        self._read_at = float("-inf")
        self._avoided: dict[str, float] = {}
        """By URL: when a connection to it last failed."""

    async def urls(self) -> list[str]:
        """All URLs in the order to try them; never empty.

        If `gateway.url` is set, it is the only one. Otherwise they come from the store. This host's own
        gateway is first. The others follow in an order that is fixed per host: a host keeps using the
        same gateway, and hosts spread over the gateways.
        """
        if self._settings.gateway.url:
            return [self._settings.gateway.url]
        if monotonic() - self._read_at > READ_S:
            await self._look()
        known = self._known or [self._settings.gateway_base_url]
        return sorted(known, key=self._is_avoided)

    def failed(self, url: str) -> None:
        """Note that a connection to this gateway failed."""
        self._avoided[url] = monotonic()
        self._read_at = float("-inf")

    def _is_avoided(self, url: str) -> bool:
        return monotonic() - self._avoided.get(url, float("-inf")) < AVOID_S

    async def _look(self) -> None:
        host = host_of(self._settings)

        def order(record: tuple[str, str]) -> tuple[bool, bytes]:
            key, url = record
            mine = key.endswith(f"/{host}.json")
            return not mine, hashlib.sha256(f"{host} {url}".encode()).digest()

        found = []
        with contextlib.suppress(StoreUnavailable):
            async for key, address in _read(self._store, self._secrets):
                found.append((key, address.url))
            self._known = list(dict.fromkeys(url for _, url in sorted(found, key=order)))
            self._read_at = monotonic()
