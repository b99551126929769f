"""uvicorn's HTTP protocol, except that the bytes of a large body do not pass through h11's buffer.

h11 copies each byte four times into new memory: 0.7 ms for the 600 KB of 128k tokens. It still reads every
head, chunked bodies and small bodies, and it decides where a body ends.
"""

import h11
from h11._readers import ContentLengthReader
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

LARGE = 16 << 10
"""Bytes that arrive together, below which h11 is as fast."""
HEAD_END = b"\r\n\r\n"


class LargeBodies(H11Protocol):
    def data_received(self, data: bytes) -> None:
        if len(data) >= LARGE:
            data = self._without_body(self._without_head(data))
        if data:
            super().data_received(data)

    def _without_head(self, data: bytes) -> bytes:
        """Hand h11 a head that begins here; returns what follows it."""
        begins = self.conn.their_state is h11.IDLE and not self.conn._receive_buffer
        end = data.find(HEAD_END) if begins else -1
        if end < 0:
            return data
        super().data_received(data[: end + len(HEAD_END)])
        return data[end + len(HEAD_END) :]

    def _without_body(self, data: bytes) -> bytes:
        """Hand the application what belongs to its request's body; returns what follows it."""
        reader = self.conn._reader
        if (
            self.conn.their_state is not h11.SEND_BODY
            or self.conn.our_state is h11.DONE
            or self.conn._receive_buffer
            or not isinstance(reader, ContentLengthReader)
        ):
            return data
        size = min(len(data), reader._remaining)
        reader._remaining -= size
        # Bytes instead of uvicorn's bytearray: a piece that comes alone is never copied.
        body: bytes = bytes(self.cycle.body) + data[:size] if self.cycle.body else data[:size]
        self.cycle.body = body  # type: ignore[assignment]
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()
        if not reader._remaining:
            self.handle_events()  # h11 sees the end of the body
        return data[size:]
