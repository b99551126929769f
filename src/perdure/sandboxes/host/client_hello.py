"""The server name in the first bytes of a TLS connection (RFC 8446, section 4; RFC 6066, section 3)."""

HANDSHAKE_RECORD, CLIENT_HELLO, SERVER_NAME, HOST_NAME = 22, 1, 0, 0
RECORD_HEAD, MESSAGE_HEAD = 5, 4
MOST_RECORDS = 64


class Incomplete(Exception):
    """The handshake's first message continues in bytes that are still to come."""


class NotTls(Exception):
    """The bytes do not begin a TLS handshake, or their form is wrong."""


def server_name(data: bytes) -> str | None:
    """The host that the client names; None if it names none. Raises: Incomplete; NotTls."""
    message = _message(data)
    try:
        return _name(message)
    except (IndexError, UnicodeDecodeError) as error:
        raise NotTls from error


def _message(data: bytes) -> bytes:
    """The ClientHello without its head. Records may divide it anywhere."""
    message = b""
    for _ in range(MOST_RECORDS):
        if (data[:1] and data[0] != HANDSHAKE_RECORD) or (data[1:2] and data[1] != 3):
            raise NotTls
        if message[:1] and message[0] != CLIENT_HELLO:
            raise NotTls
        wanted = MESSAGE_HEAD + int.from_bytes(message[1:MESSAGE_HEAD], "big")
        if len(message) >= MESSAGE_HEAD and len(message) >= wanted:
            return message[MESSAGE_HEAD:wanted]
        end = RECORD_HEAD + int.from_bytes(data[3:RECORD_HEAD], "big")
        if len(data) < RECORD_HEAD or len(data) < end:
            raise Incomplete
        if end == RECORD_HEAD:
            raise NotTls
        message += data[RECORD_HEAD:end]
        data = data[end:]
    raise Incomplete


def _name(message: bytes) -> str | None:
    fields = _Fields(message[2 + 32 :])
    fields.take(1)  # session id
    fields.take(2)  # cipher suites
    fields.take(1)  # compression methods
    extensions = _Fields(fields.take(2) if fields.left else b"")
    found: list[bytes] = []
    while extensions.left:
        kind, body = extensions.number(2), extensions.take(2)
        if kind == SERVER_NAME:
            names = _Fields(_Fields(body).take(2))
            while names.left:
                if names.number(1) != HOST_NAME:
                    raise NotTls
                found.append(names.take(2))
    if len(found) > 1:
        raise NotTls
    return found[0].decode("ascii") if found else None


class _Fields:
    """Reads fields whose length comes before them. Raises: IndexError beyond the end."""

    def __init__(self, left: bytes) -> None:
        self.left = left

    def number(self, size: int) -> int:
        return int.from_bytes(self._cut(size), "big")

    def take(self, size: int) -> bytes:
        """A field after `size` bytes with its length."""
        return self._cut(self.number(size))

    def _cut(self, size: int) -> bytes:
        if len(self.left) < size:
            raise IndexError
        cut, self.left = self.left[:size], self.left[size:]
        return cut
