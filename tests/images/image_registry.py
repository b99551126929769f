"""Debian's docker-registry on loopback, and a stub before it that refuses what a test tells it to.

The registry is the real program. It never refuses by rate and never breaks, so `Gate`, a stub of ours,
answers 429 and 5xx in its place.
"""

import http.client
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from tests.held_ports import held

PROGRAM = "docker-registry"
USER, PASSWORD = "reader", "dummy"
HASH = "$2b$04$gWbXTn.hgVnNKm/hPCYfX.9s5hW3XeasLwyt/0OLHeCwwQx6/X.Hq"
"""Of PASSWORD, as htpasswd writes it with bcrypt."""
CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
WITH_PASSWORD = "auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}\n"
START_S = 30.0
HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


def why_not() -> str:
    """Empty, or what is missing for a registry."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed (Debian: apt-get install docker-registry)"
    return ""


@contextmanager
def serving(folder: Path, *, with_password: bool = False) -> Iterator[str]:
    """The address of a registry over `folder`, as `127.0.0.1:PORT`. Several may serve one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(f"{USER}:{HASH}\n")
    text = CONFIG + (WITH_PASSWORD if with_password else "")
    with held(1) as (port,):
        config = folder / f"config-{port}.yml"
        config.write_text(text.format(folder=folder, port=port))
        with open(folder / "log", "ab") as log:
            process = subprocess.Popen([PROGRAM, "serve", config], stdout=log, stderr=log)
        try:
            _wait(f"http://127.0.0.1:{port}/v2/", process, folder / "log")
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            urlopen(url, timeout=5).close()
            return
        except HTTPError as error:
            error.close()
            return  # it asks for the password
        except (URLError, ConnectionError):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, "the registry does not answer"
        time.sleep(0.02)


@dataclass(frozen=True)
class Answer:
    """Instead of the registry's own. `left`: how often; None: always."""

    path: str
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    left: int | None = None


class Gate(ThreadingHTTPServer):
    """A stub of ours before a registry. Plays `play`, forwards the rest, and logs `METHOD path status`."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.upstream = upstream
        self.address = f"127.0.0.1:{self.server_port}"
        self.log: list[str] = []
        self._play: list[Answer] = []
        self._left: list[int | None] = []
        self._lock = threading.Lock()

    def play(self, *answers: Answer) -> None:
        with self._lock:
            self._play, self._left = list(answers), [answer.left for answer in answers]

    def played(self, path: str) -> Answer | None:
        with self._lock:
            for n, answer in enumerate(self._play):
                if self._left[n] != 0 and re.search(answer.path, path):
                    self._left[n] = None if (left := self._left[n]) is None else left - 1
                    return answer
        return None

    def asked(self, path: str, status: int = 200) -> int:
        """How many GET requests of this path got this answer."""
        wanted = re.compile(f"^GET .*{path}.* {status}$")
        return sum(wanted.search(line) is not None for line in list(self.log))

    def handle_error(self, *_: object) -> None:
        """A client that went away is no error of the stub."""


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gate

    def _exchange(self) -> None:
        played = self.server.played(self.path)
        if played is None:
            self._forward()
        else:
            self._send(played.status, played.headers, played.body)

    do_GET = do_HEAD = _exchange

    def _forward(self) -> None:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True)
            for name, value in self.headers.items():  # docker sends several Accept headers
                connection.putheader(name, value)
            connection.endheaders()
            got = connection.getresponse()
            headers = {k: v for k, v in got.getheaders() if k.lower() not in HOP}
            self._send(got.status, headers, got.read(), got.getheader("Content-Length"))
        finally:
            connection.close()

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, length: str | None = None
    ) -> None:
        self.server.log.append(f"{self.command} {self.path} {status}")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def gate_before(upstream: str) -> Iterator[Gate]:
    with Gate(upstream) as gate:
        thread = threading.Thread(target=gate.serve_forever)
        thread.start()
        yield gate
        gate.shutdown()
        thread.join()
