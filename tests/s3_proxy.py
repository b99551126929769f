"""A proxy before an S3 server that answers, breaks off and delays as real networks and servers do."""

import http.client
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}
TRICKLE_S = 0.05
"""Seconds between two bytes of a trickled body."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Exchange(BaseHTTPRequestHandler):
    """One request, and what a fault may do with it."""

    protocol_version = "HTTP/1.1"
    server: "S3Proxy"

    def _exchange(self) -> None:
        self.request_body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.next_fault()
        if fault is None and not self._knows_key():
            fault = refuse(403, "InvalidAccessKeyId")
        if fault is None:
            self.send(self.forward())
        else:
            fault(self)

    def _knows_key(self) -> bool:
        only = self.server.only_key
        return not only or f"Credential={only}/" in self.headers.get("Authorization", "")

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _exchange

    def forward(self) -> Answer:
        """The server's own answer; the request is carried out."""
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            connection.request(self.command, self.path, self.request_body, dict(self.headers))
            answer = connection.getresponse()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in HOP]
            return Answer(answer.status, tuple(headers), answer.read())
        finally:
            connection.close()

    def send(self, answer: Answer) -> None:
        self.send_head(answer)
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_head(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()

    def hang_up(self) -> None:
        """End the connection with a reset."""
        self.close_connection = True
        now = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:  # the fault ended the connection
            self.close_connection = True

    def log_message(self, *_: Any) -> None: ...


Fault = Callable[[Exchange], None]


def refuse(status: int, code: str = "") -> Fault:
    """An error answer: S3's XML, or without `code` what a proxy answers."""
    said = f"<Error><Code>{code}</Code><Message>played</Message></Error>" if code else "<html>no"
    return lambda call: call.send(Answer(status, (("Content-Type", "text/xml"),), said.encode()))


def reset(call: Exchange) -> None:
    """The request is not carried out."""
    call.hang_up()


def lose_answer(call: Exchange) -> None:
    """The request is carried out, and its answer is lost."""
    call.forward()
    call.hang_up()


def stall(call: Exchange) -> None:
    """No answer until the proxy is healed; then the connection ends."""
    call.server.healed.wait()
    call.hang_up()


def cut(call: Exchange) -> None:
    """Half of the body, then a reset."""
    answer = call.forward()
    call.send_head(answer)
    call.wfile.write(answer.body[: len(answer.body) // 2])
    call.hang_up()


def trickle(call: Exchange) -> None:
    """The body byte by byte."""
    answer = call.forward()
    call.send_head(answer)
    for byte in answer.body:
        if call.server.healed.wait(TRICKLE_S):
            return call.hang_up()
        call.wfile.write(bytes([byte]))


class S3Proxy(ThreadingHTTPServer):
    """Plays `fault` for a share of the requests; forwards the others."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.upstream = urlsplit(upstream).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.healed = threading.Event()
        self.healed.set()
        self.only_key = ""
        """Requests that are signed with another key are refused; empty: any key will do."""
        self.requests = 0
        self.played = 0
        self._faults: tuple[Fault, ...] = ()
        self._share = 1.0
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def play(self, *faults: Fault, share: float = 1.0, seed: int = 0) -> None:
        """From now on one of `faults` happens to this share of the requests."""
        with self._lock:
            self._random = random.Random(seed)
            self._faults, self._share = faults, share
            self.played = 0
            self.healed.clear()

    def heal(self) -> None:
        with self._lock:
            self._faults = ()
            self.only_key = ""
            self.healed.set()

    def next_fault(self) -> Fault | None:
        with self._lock:
            self.requests += 1
            if not self._faults or self._random.random() >= self._share:
                return None
            self.played += 1
            return self._random.choice(self._faults)

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no error of the proxy."""

    def close(self) -> None:
        self.heal()
        self.shutdown()
        self._thread.join()
        self.server_close()
