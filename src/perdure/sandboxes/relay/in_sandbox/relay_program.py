"""Runs inside a sandbox that cannot reach the gateway: an HTTP server on its loopback for the agent.

It writes each request as one line of an append-only log, its standard output. It gets the pieces of
the answer as files. One file, standard library, Python 3.8+, because it runs in images of any kind.
Started by `perdure.sandboxes.relay.host_relay`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import queue
import select
import shutil
import socket
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

LARGEST_BODY = 32 << 20
INLINE = 48 << 10
"""Up to this size in bytes, a request's line contains its body. A larger body is in a file."""
MOST_REQUESTS = 64
"""Requests at a time. One more is answered with 503."""
TOO_LARGE = f"a request may have at most {LARGEST_BODY} bytes"
HOP = {
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate",
    "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip

if TYPE_CHECKING:
    Piece = tuple[dict[str, Any], bytes]


class Log:
    """Append-only lines on standard output. To resume, a reader needs only its byte offset."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, **fields: Any) -> None:
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            left = memoryview(line)
            while left:
                left = left[os.write(1, left) :]


class AgentRequest:
    """One request of the agent and the pieces of its answer, delivered once and in order."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._try = ""
        self._next = 0
        self._held: dict[int, Piece] = {}
        self._complete = False

    def take(self, head: dict[str, Any], body: bytes) -> None:
        """Take a piece; drop duplicates. If a second host answers a request that the first has begun
        to answer, break off: the agent asks again, and the gateway recognizes the request."""
        if self._complete:
            return
        if head["try"] != self._try:
            if self._next:
                self._complete = True
                self.pieces.put(None)
                return
            self._try, self._held = head["try"], {}
        if head["seq"] < self._next or len(self._held) > 1024:
            return
        self._held[head["seq"]] = (head, body)
        while self._next in self._held:
            piece = self._held.pop(self._next)
            self._next += 1
            self._complete = bool(piece[0].get("end"))
            self.pieces.put(piece)


class Relay:
    """State shared by the agent's connections and the inbox."""

    def __init__(self, spool: str, log: Log, inline_budget: int, again_s: float) -> None:
        self.spool = spool
        self.log = log
        self.again_s = again_s
        self.open_requests: dict[str, AgentRequest] = {}
        self._budget = inline_budget
        self._lock = threading.Lock()
        self._waiting = threading.Event()

    def open(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> AgentRequest:
        """Raises: BlockingIOError when too many requests are open."""
        request = AgentRequest()
        with self._lock:
            if len(self.open_requests) >= MOST_REQUESTS:
                raise BlockingIOError
            self.open_requests[request.id] = request
            inline = len(body) <= min(INLINE, self._budget)
            self._budget -= len(body) if inline else 0
        fields: dict[str, Any] = {
            "id": request.id,
            "method": method,
            "path": path,
            "headers": headers,
        }
        if inline:
            fields["body"] = base64.b64encode(body).decode()
        else:
            with open(self.body_file(request.id), "wb") as file:
                file.write(body)
            fields["size"] = len(body)
        self.log.say(**fields)
        self._waiting.set()
        return request

    def close(self, request: AgentRequest) -> None:
        with self._lock:
            self.open_requests.pop(request.id, None)
            if not self.open_requests:
                self._waiting.clear()
        self.log.say(done=request.id)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.body_file(request.id))

    def body_file(self, request_id: str) -> str:
        return os.path.join(self.spool, "body", request_id)

    def take(self, head: dict[str, Any], body: bytes) -> None:
        with self._lock:
            request = self.open_requests.get(head["id"])
            if request is not None:
                request.take(head, body)

    def watch_inbox(self) -> None:
        """Poll the folder of pieces, but only while a request is open."""
        inbox = os.path.join(self.spool, "in")
        while True:
            self._waiting.wait()
            began = time.monotonic()
            while self._waiting.is_set():
                if self._empty(inbox):
                    began = time.monotonic()
                time.sleep(0.004 if time.monotonic() - began < 2 else 0.02)

    def _empty(self, inbox: str) -> bool:
        names = sorted(name for name in os.listdir(inbox) if name.endswith(".piece"))
        for name in names:
            path = os.path.join(inbox, name)
            try:
                with open(path, "rb") as file:
                    self.take(json.loads(file.readline()), file.read())
            except (OSError, ValueError, KeyError, TypeError) as error:
                print(f"relay: dropped {name}: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                os.unlink(path)
        return bool(names)

    def check(self, port: int) -> None:
        """Make one round trip: through our own listener and the host to the gateway, and back."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("GET", "/healthz")
                status = connection.getresponse().status
                if status == 200:
                    return self.log.say(healthy=status)
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.5)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    relay: Relay

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the agent hung up


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def forward(self) -> None:
        try:
            body = self._body()
        except ValueError as error:
            return self._refuse(413, str(error))
        headers = [(k, v) for k, v in self.headers.items() if k.lower() not in HOP]
        relay = self.server.relay
        try:
            request = relay.open(self.command, self.path, headers, body)
        except BlockingIOError:
            return self._refuse(503, f"more than {MOST_REQUESTS} requests at a time")
        try:
            self._answer(relay, request)
        finally:
            relay.close(request)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = forward

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunked()
        announced = self.headers.get("content-length", "0")
        if not announced.isdigit() or int(announced) > LARGEST_BODY:
            raise ValueError(TOO_LARGE)
        return self.rfile.read(int(announced))

    def _chunked(self) -> bytes:
        body = b""
        while True:
            size = int(self.rfile.readline(64).split(b";")[0], 16)
            if len(body) + size > LARGEST_BODY:
                raise ValueError(TOO_LARGE)
            body += self.rfile.read(size)
            self.rfile.readline(64)
            if not size:
                return body

    def _answer(self, relay: Relay, request: AgentRequest) -> None:
        """The first piece decides the form: complete with a length, or in chunks as they arrive."""
        piece = self._next(relay, request)
        if piece is None:
            return
        head, body = piece
        bare = self.command == "HEAD" or head["status"] in (204, 304)
        if bare or head.get("end"):
            length = [] if bare else [("Content-Length", str(len(body)))]
            self.wfile.write(_head(head, length) + (b"" if bare else body))
            return
        self.wfile.write(_head(head, [("Transfer-Encoding", "chunked")]) + _chunk(body))
        while not head.get("end"):
            piece = self._next(relay, request)
            if piece is None:
                return
            head, body = piece
            self.wfile.write(_chunk(body) + (b"0\r\n\r\n" if head.get("end") else b""))

    def _next(self, relay: Relay, request: AgentRequest) -> Piece | None:
        """The next piece. None if the answer is broken off or the agent has hung up: close the
        connection."""
        while True:
            try:
                piece = request.pieces.get(timeout=relay.again_s)
            except queue.Empty:
                if self._hung_up():
                    piece = None
                else:
                    relay.log.say(again=request.id)
                    continue
            if piece is None or piece[0].get("broken"):
                self.close_connection = True
                return None
            return piece

    def _hung_up(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _refuse(self, status: int, message: str) -> None:
        data = json.dumps({"error": {"type": "relay", "message": "relay: " + message}}).encode()
        self.close_connection = True
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)


def _head(head: dict[str, Any], more: list[tuple[str, str]]) -> bytes:
    fields = "".join(f"{name}: {value}\r\n" for name, value in [*head["headers"], *more])
    reason = http.client.responses.get(head["status"], "")
    return f"HTTP/1.1 {head['status']} {reason}\r\n{fields}\r\n".encode("latin-1")


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body) if body else b""


def listen(port: int, remembered: str) -> Server:
    """Listen on the previous relay's port or, if there was none, on `port` or any free port."""
    try:
        with open(remembered) as file:
            wanted = [int(file.read())]
    except (OSError, ValueError):
        wanted = [port, 0]
    for number in wanted:
        try:
            return Server(("127.0.0.1", number), Handler)
        except OSError as error:
            print(f"relay: port {number}: {error}", file=sys.stderr, flush=True)
    sys.exit(98)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spool", required=True)
    parser.add_argument("--port", type=int, default=18001)
    parser.add_argument("--inline-budget", type=int, default=8 << 20)
    parser.add_argument("--again-s", type=float, default=30.0)
    options = parser.parse_args()
    for name in ("body", "in"):  # an earlier relay's: its connections ended with it
        shutil.rmtree(os.path.join(options.spool, name), ignore_errors=True)
        os.makedirs(os.path.join(options.spool, name))
    remembered = os.path.join(options.spool, "port")
    server = listen(options.port, remembered)
    port = server.server_address[1]
    server.relay = Relay(options.spool, Log(), options.inline_budget, options.again_s)
    server.relay.log.say(hello=os.getpid(), port=port)
    with open(remembered + ".new", "w") as file:
        file.write(str(port))
    os.rename(remembered + ".new", remembered)
    for work, arguments in ((server.relay.watch_inbox, ()), (server.relay.check, (port,))):
        threading.Thread(target=work, args=arguments, daemon=True).start()
    server.serve_forever(poll_interval=3600)


if __name__ == "__main__":
    main()
