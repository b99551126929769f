"""The forwarder: in a home without a gateway, the socket leads to a gateway elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.gateway.gateway_addresses import Gateways
from perdure.gateway.http.listening_sockets import bind_unix
from perdure.home_folder import Secrets
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from workers.host import gateway_socket_proxy


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_socket_proxy, "LOOK_S", 0.01)


@asynccontextmanager
async def _gateway(reply: bytes) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class _At(Gateways):
    def __init__(self, settings: Settings, *urls: str) -> None:
        super().__init__(settings, LocalStore(settings.store_url), Secrets.of(b"x" * 16))
        self.given = list(urls)

    async def urls(self) -> list[str]:
        return self.given


async def _ask(settings: Settings) -> bytes:
    async with asyncio.timeout(20):
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(settings.gateway_socket)
                break
            except OSError:
                await asyncio.sleep(0.01)
        writer.write(b"hello\n")
        answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "h" / "run").mkdir(parents=True)
    return Settings(home=tmp_path / "h")


async def test_bytes_go_to_the_first_gateway_that_answers(settings: Settings) -> None:
    """A gateway that accepts no connection is skipped."""
    async with _gateway(b"far ") as url:
        gateways = _At(settings, "http://127.0.0.1:9", url)
        async with gateway_socket_proxy.opened(settings, gateways):
            answer = await _ask(settings)

    assert answer == b"far hello\n"
    assert not settings.gateway_socket.is_symlink()


async def test_a_gateway_of_this_home_takes_over_and_the_link_comes_back(
    settings: Settings,
) -> None:
    """The home's own gateway serves while it lives, and leaves a socket without a listener if
    killed."""
    async with _gateway(b"far ") as url, gateway_socket_proxy.opened(settings, _At(settings, url)):
        before = await _ask(settings)
        own = bind_unix(settings.gateway_socket)
        await asyncio.sleep(0.1)  # ten looks of the passage
        meanwhile = settings.gateway_socket.is_symlink()
        own.close()
        after = await _ask(settings)

    assert (before, meanwhile, after) == (b"far hello\n", False, b"far hello\n")
