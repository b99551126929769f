"""The legal forms of an engine's answer over HTTP, and the meaning of each way in which it can
break."""

import asyncio
import base64
import json
from contextlib import aclosing
from pathlib import Path

import pytest

from perdure.engines.clients import engine_connections, token_endpoint
from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.token_endpoint import BreakKind, StreamBroken
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import FinishReason
from tests import held_ports
from tests.certificates import Authority
from tests.engine_wire import (
    DONE,
    END,
    OK,
    STREAM,
    Step,
    answering,
    chunk,
    close,
    engine,
    event,
    hold,
    pause,
    plain,
    reset,
    sample,
)

TOKENS = [event(3), event(4), event(5, "stop")]
WHOLE = STREAM + b"".join(map(chunk, (*TOKENS, DONE))) + END
TWO = STREAM + chunk(event(3)) + chunk(event(4))
"""A stream that has sampled two tokens and continues."""


async def broken(*steps: Step, salvage: Salvage | None = None) -> StreamBroken:
    """How a stream with this answer breaks; the request is sent once."""
    async with answering(steps) as wire, engine(wire.url) as asked:
        with pytest.raises(StreamBroken) as caught:
            await sample(asked, salvage)
        assert len(wire.heads) == 1
    return caught.value


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        [WHOLE],
        [bytes([one]) for one in WHOLE],
        [STREAM, *map(chunk, TOKENS), chunk(DONE), END],
        [STREAM + chunk(b"".join(TOKENS) + DONE) + END],
        [STREAM, *(chunk(bytes([one])) for one in b"".join(TOKENS)), END],
        [WHOLE.removesuffix(b"\r\n"), b"expires: 0\r\n\r\n"],
        [STREAM, *(chunk(one).replace(b"\r\n", b";a=b\r\n", 1) for one in TOKENS), END],
        [plain("200 OK", b"".join(TOKENS))],
        [OK + b"\r\n" + b"".join(TOKENS), close],
        [b"HTTP/1.0 200 OK\r\n\r\n" + b"".join(TOKENS), close],
        [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", WHOLE],
    ],
    ids=[
        *("at once", "byte by byte", "an event a chunk", "one chunk", "a byte a chunk"),
        *("a trailer", "chunk extensions", "a length", "to the end", "HTTP/1.0", "a hint before"),
    ],
)
async def test_a_completion_does_not_depend_on_its_framing(answer: list[Step]) -> None:
    """Ids and logprobs arrive in order with every legal framing."""
    salvage = Salvage()
    async with answering(answer) as wire, engine(wire.url) as asked:
        reason = await sample(asked, salvage)

    assert (reason, list(salvage.ids)) == (FinishReason.STOP, [3, 4, 5])
    assert list(salvage.logprobs) == [-3 / 8, -4 / 8, -5 / 8]


async def test_a_request_arrives_whole() -> None:
    """Host, key, session and ids arrive, even if the body has a megabyte."""
    async with answering([WHOLE]) as wire, engine(wire.url) as asked:
        await sample(asked, prompt=range(200_000))
        head = wire.heads[0].lower()
        body = json.loads(wire.bodies[0])

    assert body["token_ids"] == list(range(200_000))
    assert head.startswith(b"post /inference/v1/generate http/1.1\r\n")
    assert b"\r\nhost: " + wire.url.removeprefix("http://").encode() + b"\r\n" in head
    assert b"\r\nx-session-id: s\r\n" in head


async def test_a_user_and_password_in_the_url_are_sent() -> None:
    """Every HTTP client does this, so an engine may be behind a proxy that requires them."""
    async with (
        answering([WHOLE]) as wire,
        engine(wire.url.replace("://", "://me:p%40ss@")) as asked,
    ):
        await sample(asked)

    assert b"Basic " + base64.b64encode(b"me:p@ss") in wire.heads[0]


async def test_credentials_in_the_url_replace_the_key() -> None:
    """A request has one `authorization` header."""
    async with answering([WHOLE]) as wire, aclosing(Connections()) as kept:
        url = wire.url.replace("://", "://me:pass@")
        await sample(VllmEngine("vllm e", url, kept, api_key="a key"))

    assert b"Basic " + base64.b64encode(b"me:pass") in wire.heads[0]
    assert b"a key" not in wire.heads[0]


async def test_a_cookie_is_not_kept() -> None:
    """Calls of many sessions share the connections."""
    answer = WHOLE.replace(b"\r\n\r\n", b"\r\nset-cookie: a=b\r\n\r\n", 1)
    async with answering([answer]) as wire, engine(wire.url) as asked:
        for _ in range(2):
            await sample(asked)

    assert b"cookie" not in wire.heads[1].lower()


# --- breaks -------------------------------------------------------------------------------------


async def test_a_refused_connection_is_not_a_timeout() -> None:
    """A refusal proves that no process listens; after a timeout, one may listen."""
    with held_ports.held(1) as (port,):
        async with engine(f"http://127.0.0.1:{port}") as asked:
            with pytest.raises(StreamBroken) as caught:
                await sample(asked)

    assert caught.value.kind is BreakKind.LOST
    assert "Timeout" not in str(caught.value)


@pytest.mark.parametrize(
    "steps",
    [
        [reset],
        [close],
        [b"HTTP/1.1 200", close],
        [b"SSH-2.0-x\r\n\r\n", hold],
        [OK + b"content-length: -1\r\n\r\n", hold],
        [OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", hold],
        [OK + b"x: " + b"a" * 200_000, hold],
    ],
    ids=[
        *("reset", "closed", "closed in the head", "not HTTP"),
        *("negative length", "two lengths", "endless head"),
    ],
)
async def test_an_answer_that_never_begins_means_a_lost_engine(steps: list[Step]) -> None:
    """The request is not repeated automatically, because the engine may have run it."""
    assert (await broken(*steps)).kind is BreakKind.LOST


@pytest.mark.parametrize(
    "steps",
    [
        [TWO, reset],
        [TWO, close],
        [TWO + chunk(event(5))[:-9], close],
        [TWO + END, hold],
        [TWO + chunk(DONE) + END, hold],
        [TWO, pause, b"zz\r\n", hold],
        [TWO, pause, b"-5\r\nabcde\r\n", hold],
        [TWO, pause, b"0x5\r\nabcde\r\n", hold],
        [TWO, pause, b"5\r\nabcdefg\r\n", hold],
        [TWO, pause, b"1" * 5000, hold],
        [TWO + chunk(b'data: {"choices": \xff\xfe}\n\n'), hold],
        [TWO + chunk(b'data: {"choices": [\n\n'), hold],
        [TWO + chunk(b"data: " + b"{" * 300_000), hold],
        [
            plain("200 OK", event(3) + event(4)).replace(b"content-length: ", b"content-length: 9"),
            close,
        ],
    ],
    ids=[
        *("reset", "closed", "closed in a chunk", "ended", "[DONE] alone", "no chunk size"),
        *("negative size", "prefixed size", "a chunk longer than said", "endless size"),
        *("not UTF-8", "not JSON", "an event too large", "shorter than said"),
    ],
)
async def test_a_broken_stream_keeps_the_tokens_before_the_break(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call continues from exactly the tokens before the break."""
    monkeypatch.setattr(token_endpoint, "LONGEST_EVENT", 200_000)
    monkeypatch.setattr(
        engine_connections, "READ_TIMEOUT_S", 0.5
    )  # aiohttp does not report a bad chunk
    salvage = Salvage()
    found = await broken(*steps, salvage=salvage)

    assert (found.kind, list(salvage.ids)) == (BreakKind.LOST, [3, 4])


async def test_a_silent_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout counts from the last byte that arrived."""
    salvage = Salvage()
    monkeypatch.setattr(engine_connections, "READ_TIMEOUT_S", 0.2)
    found = await broken(TWO, hold, salvage=salvage)

    assert (found.kind, list(salvage.ids)) == (BreakKind.LOST, [3, 4])
    assert "Time" in str(found)


async def test_an_engine_that_cannot_be_connected_to_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timeout for connections is much shorter than that for answers, also with TLS and
    proxies."""
    monkeypatch.setattr(engine_connections, "CONNECT_S", 0.2)
    async with answering([hold]) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        async with engine("https://engine.example") as asked:
            with pytest.raises(StreamBroken) as caught:
                await sample(asked)

    assert caught.value.kind is BreakKind.LOST
    assert "Time" in str(caught.value)


async def test_an_endless_refusal_is_not_read_to_its_end() -> None:
    """Reading stops after a megabyte."""
    found = await broken(plain("503 Busy", b"x" * (2 * engine_connections.MAX_TEXT)))

    assert (found.kind, "more than" in str(found)) == (BreakKind.LOST, True)


async def test_a_busy_engines_retry_after_is_kept() -> None:
    """The pool gets the engine's message and its wait."""
    found = await broken(plain("503 Busy", b'{"error": "full"}', "retry-after: 7"))

    assert (found.kind, found.retry_after) == (BreakKind.REFUSED, 7.0)
    assert "full" in str(found)


@pytest.mark.parametrize(
    "answer",
    [
        plain("400 No", b"not so"),
        plain("302 Found", b"not so", "location: http://127.0.0.1:9/"),
        b"HTTP/1.1 204 not so\r\n\r\n",
    ],
    ids=["400", "302", "204"],
)
async def test_an_answer_without_a_completion_is_an_engine_failure(answer: bytes) -> None:
    """The call may move to another engine. A redirect is not followed, because it would forward the
    key."""
    found = await broken(answer)

    assert (found.kind, answer[9:12].decode() in str(found)) == (BreakKind.REFUSED, True)


async def test_a_cancelled_call_closes_its_connection() -> None:
    """The engine sees this and stops sampling."""
    salvage = Salvage()
    async with answering([TWO, hold]) as wire, engine(wire.url) as asked:
        call = asyncio.ensure_future(sample(asked, salvage))
        while len(salvage.ids) < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wire.left.get()
        wire.left.put_nowait(None)

    assert list(salvage.ids) == [3, 4]


# --- persistent connections --------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        [WHOLE, close],
        [WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)],
        [WHOLE.replace(b"1.1", b"1.0")],
        [WHOLE + b"HTTP/1.1 408 Too late\r\n\r\n"],
    ],
    ids=["closed", "announced", "HTTP/1.0", "more than asked for"],
)
async def test_a_closed_connection_is_not_reused(answer: list[Step]) -> None:
    """The next call opens a new connection, and never gets another call's answer."""
    async with answering(answer) as wire, engine(wire.url) as asked:
        for _ in range(3):
            assert await sample(asked) is FinishReason.STOP
            await asyncio.sleep(0.01)  # what the engine does after it has answered

    assert (wire.connections, len(wire.heads)) == (3, 3)


async def test_a_request_on_a_closing_connection_is_not_repeated() -> None:
    """It is unknown whether the engine ran it, so the pool decides."""
    async with answering([WHOLE], [reset], [WHOLE]) as wire, engine(wire.url) as asked:
        await sample(asked)
        with pytest.raises(StreamBroken) as caught:
            await sample(asked)

    assert (caught.value.kind, len(wire.heads), wire.connections) == (BreakKind.LOST, 2, 1)


async def test_concurrent_calls_have_separate_connections() -> None:
    """An answer never reaches another call."""
    async with answering([WHOLE]) as wire, engine(wire.url) as asked:
        salvages = [Salvage() for _ in range(5)]
        await asyncio.gather(*(sample(asked, salvage) for salvage in salvages))
        await sample(asked)

    assert [list(one.ids) for one in salvages] == [[3, 4, 5]] * 5
    assert wire.connections == 5


# --- TLS and proxies ----------------------------------------------------------------------------


async def test_tls_trusts_the_authorities_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSL_CERT_FILE` names them; without it, a private authority is not trusted."""
    authority = Authority.of(tmp_path)
    async with answering([WHOLE], tls=authority.tls()) as wire:
        async with engine(wire.url) as asked:
            with pytest.raises(StreamBroken) as caught:
                await sample(asked)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        async with engine(wire.url) as asked:
            reason = await sample(asked)

    assert (caught.value.kind, reason) == (BreakKind.LOST, FinishReason.STOP)
    assert "certificate" in str(caught.value).lower()


async def test_tls_with_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate for 127.0.0.1 is not valid for localhost."""
    authority = Authority.of(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with (
        answering([WHOLE], tls=authority.tls()) as wire,
        engine(wire.url.replace("127.0.0.1", "localhost")) as asked,
    ):
        with pytest.raises(StreamBroken) as caught:
            await sample(asked)

    assert caught.value.kind is BreakKind.LOST
    assert wire.heads == []


async def test_the_proxy_from_the_environment_gets_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gets the whole URL, and its own user and password; `NO_PROXY` excludes hosts."""
    async with answering([WHOLE]) as proxy, answering([WHOLE]) as direct:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("://", "://me:pass@"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        async with engine("http://engine.example:8000/v1") as asked:
            await sample(asked)
        async with engine(direct.url) as asked:
            await sample(asked)

    line, *fields = proxy.heads[0].split(b"\r\n")
    assert line == b"POST http://engine.example:8000/inference/v1/generate HTTP/1.1"
    assert b"proxy-authorization: basic " + base64.b64encode(b"me:pass").lower() in [
        one.lower() for one in fields
    ]
    assert (len(proxy.heads), len(direct.heads)) == (1, 1)


async def test_tls_uses_a_tunnel_through_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy sees the engine's address and ciphertext, but not the key."""
    authority = Authority.of(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    asked_for: list[bytes] = []
    async with answering([WHOLE], tls=authority.tls()) as wire:
        port = int(wire.url.rpartition(":")[2])

        async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked_for.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back_reader, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, back), _copy(back_reader, writer))

        async with await asyncio.start_server(tunnel, "127.0.0.1", 0) as proxy:
            at = proxy.sockets[0].getsockname()[1]
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{at}")
            monkeypatch.delenv("NO_PROXY", raising=False)
            monkeypatch.delenv("no_proxy", raising=False)
            async with engine(wire.url) as asked:
                reasons = [await sample(asked) for _ in range(2)]

    assert reasons == [FinishReason.STOP] * 2
    assert [head.partition(b"\r\n")[0] for head in asked_for] == [
        b"CONNECT 127.0.0.1:%d HTTP/1.1" % port
    ]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_a_proxy_that_refuses_a_tunnel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status says why no engine was reached."""
    async with answering([plain("407 Who are you", b"")]) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        async with engine("https://engine.example") as asked:
            with pytest.raises(StreamBroken) as caught:
                await sample(asked)

    assert caught.value.kind is BreakKind.LOST
    assert "407" in str(caught.value)
