"""Hosts find gateways by their records in the store, and try them one after the other."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.errors import GatewayUnavailable
from perdure.gateway.control_client import FailoverTransport, GatewayControl
from perdure.gateway.gateway_addresses import Address, Gateways, announce, own_url, records
from perdure.home_folder import Secrets, host_of
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore

SECRETS = Secrets.of(b"the secret of one cluster")


def _settings(tmp_path: Path, **gateway: object) -> Settings:
    return Settings(home=tmp_path / "home", store=str(tmp_path / "store"), gateway=gateway)


async def _record(store: LocalStore, name: str, url: str, at: float = 2e9) -> None:
    data = Address(url=url, at=at).model_dump_json().encode()
    await store.put(f"{records(SECRETS)}{name}.json", data)


def test_a_gateway_on_loopback_has_no_address_for_others(tmp_path: Path) -> None:
    """This also holds if `perdure up` has set its own URL."""
    local = _settings(tmp_path, url="http://127.0.0.1:18001")

    assert (own_url(local, 18001), own_url(_settings(tmp_path), 18001)) == ("", "")


def test_a_gateway_on_an_address_of_the_network_names_it(tmp_path: Path) -> None:
    """The record has the port that the gateway listens on."""
    found = own_url(_settings(tmp_path, host="10.1.2.3", port=0), 4711)

    assert found == "http://10.1.2.3:4711"


async def test_a_record_is_found_by_other_hosts(tmp_path: Path) -> None:
    """A day-old record is removed, and a record of another secret is ignored."""
    settings, store = _settings(tmp_path, host="10.1.2.3"), LocalStore(tmp_path / "store")
    await _record(store, "old", "http://10.9.9.9:1", at=1.0)
    other = Gateways(_settings(tmp_path / "b"), store, Secrets.of(b"another secret's hosts"))
    announcing = asyncio.create_task(announce(settings, store, SECRETS, 18001))
    async with asyncio.timeout(20):
        while await store.exists(f"{records(SECRETS)}old.json"):
            await asyncio.sleep(0.01)
    announcing.cancel()

    assert await Gateways(_settings(tmp_path / "b"), store, SECRETS).urls() == [
        "http://10.1.2.3:18001"
    ]
    assert await other.urls() == ["http://127.0.0.1:18001"]


async def test_a_host_tries_its_own_gateway_first(tmp_path: Path) -> None:
    """A gateway to which a connection failed is tried last."""
    settings, store = _settings(tmp_path), LocalStore(tmp_path / "store")
    for number in range(5):
        await _record(store, f"host-{number}", f"http://10.0.0.{number}:1")
    await _record(store, host_of(settings), "http://10.0.0.9:1")
    gateways = Gateways(settings, store, SECRETS)
    first, second, *_ = await gateways.urls()
    gateways.failed(first)

    assert first == "http://10.0.0.9:1"
    assert [(await gateways.urls())[0], (await gateways.urls())[-1]] == [second, first]


async def test_a_host_with_a_private_gateway_rarely_reads_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control call does not list the store each time; a refused connection makes the host list it
    at once."""
    store = LocalStore(tmp_path / "store")
    asked: list[str] = []
    listed = store.list

    def counted(prefix: str) -> AsyncIterator[str]:
        asked.append(prefix)
        return listed(prefix)

    monkeypatch.setattr(store, "list", counted)
    gateways = Gateways(_settings(tmp_path), store, SECRETS)
    own = [(await gateways.urls())[0] for _ in range(3)]
    seldom = len(asked)
    gateways.failed(own[0])
    await gateways.urls()

    assert (own, seldom, len(asked)) == (["http://127.0.0.1:18001"] * 3, 1, 2)


async def test_hosts_spread_over_the_gateways(tmp_path: Path) -> None:
    """Each host has its own order."""
    store = LocalStore(tmp_path / "store")
    for number in range(2):
        await _record(store, f"host-{number}", f"http://10.0.0.{number}:1")
    firsts = {
        (await Gateways(_settings(tmp_path / str(n)), store, SECRETS).urls())[0] for n in range(32)
    }

    assert len(firsts) == 2


async def test_a_given_url_is_the_only_one(tmp_path: Path) -> None:
    """`gateway.url` may be a load balancer's address."""
    store = LocalStore(tmp_path / "store")
    await _record(store, "host", "http://10.0.0.1:1")
    given = _settings(tmp_path, url="https://gateway.example")

    assert await Gateways(given, store, SECRETS).urls() == ["https://gateway.example"]


async def test_a_control_call_goes_to_the_next_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so if the first one refuses the connection, and fails with an error if all do."""
    settings, store = _settings(tmp_path), LocalStore(tmp_path / "store")
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 33\r\n\r\n")
        writer.write(b'{"session_id": "a", "open": true}')
        await writer.drain()
        writer.close()

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await _record(store, host_of(settings), f"http://127.0.0.1:{closed.getsockname()[1]}")
        await _record(store, "other", f"http://127.0.0.1:{port}")
        to = FailoverTransport(Gateways(settings, store, SECRETS))
        async with GatewayControl("http://gateway", SECRETS, transport=to) as control:
            summary = await control.get("a")
            server.close()
            await server.wait_closed()
            with pytest.raises(GatewayUnavailable):
                await control.get("a")

    assert summary.open
    assert f"host: 127.0.0.1:{port}".encode() in asked[0].lower()
