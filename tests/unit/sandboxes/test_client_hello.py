"""The server name of a TLS handshake, however its bytes arrive."""

import ssl

import pytest

from perdure.sandboxes.host.client_hello import Incomplete, NotTls, server_name


def hello(name: str | None) -> bytes:
    """What a client sends first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    end = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        end.do_handshake()
    return outgoing.read()


def in_records(message: bytes, size: int) -> bytes:
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize("name", ["files.example", None])
def test_the_name_is_what_the_client_asks_for(name: str | None) -> None:
    assert server_name(hello(name)) == name


def test_records_may_divide_the_message_anywhere() -> None:
    """A client that splits its first message hides no name."""
    message = hello("files.example")[5:]
    divided = in_records(message[:3], 1) + in_records(message[3:], 100)

    assert server_name(divided) == "files.example"


def test_a_beginning_is_incomplete_at_every_length() -> None:
    whole = hello("files.example")
    for end in range(len(whole)):
        with pytest.raises(Incomplete):
            server_name(whole[:end])


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-x\r\n",
        b"\x16\x03\x01\x00\x00",
        in_records(b"\x02\x00\x00\x01x", 100),
        in_records(b"\x01\x00\x00\x02\x03\x03", 100),
    ],
)
def test_other_bytes_are_no_handshake(data: bytes) -> None:
    with pytest.raises(NotTls):
        server_name(data)


def test_two_names_are_refused() -> None:
    """A server might use the second."""
    whole = hello("a.example")[5:]
    one = b"\x00\x00\x09a.example"
    at = whole.index(one)
    grown = bytearray(whole.replace(one, one + one))
    for place, size in ((1, 3), (at - 2, 2), (at - 4, 2)):  # message, name list, extension
        old = int.from_bytes(grown[place : place + size], "big")
        grown[place : place + size] = (old + len(one)).to_bytes(size, "big")
    extensions = 4 + 2 + 32
    extensions += 1 + grown[extensions]
    extensions += 2 + int.from_bytes(grown[extensions : extensions + 2], "big")
    extensions += 1 + grown[extensions]
    old = int.from_bytes(grown[extensions : extensions + 2], "big")
    grown[extensions : extensions + 2] = (old + len(one)).to_bytes(2, "big")

    with pytest.raises(NotTls):
        server_name(in_records(bytes(grown), 1 << 14))
