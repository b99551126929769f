"""A stand-in of the Hugging Face hub: what its own client asks for when it uploads a folder."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_writes"


class Hub(ThreadingHTTPServer):
    """Keeps repositories and their files; who comes without `TOKEN` is refused."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = (
            f"{asked['organization']}/{asked['name']}"
            if asked.get("organization")
            else asked["name"]
        )
        code = 409 if name in self.repositories else 200
        self.repositories.setdefault(name, asked)
        return code, {"url": f"{self.url}/datasets/{name}"}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            if line["key"] == "file":
                value = line["value"]
                content = base64.b64decode(value["content"])
                self.files.setdefault(name, {})[value["path"]] = content
        oid = "c" * 40
        return {"commitUrl": f"{self.url}/datasets/{name}/commit/{oid}", "commitOid": oid}


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
            return
        _, _, kind, *rest = self.path.split("?")[0].split("/")
        if (kind, rest) == ("repos", ["create"]):
            self._answer(*self.server.create(json.loads(body)))
            return
        if kind == "validate-yaml":  # of the card
            self._answer(200, {"errors": [], "warnings": []})
            return
        name, act = "/".join(rest[:2]), rest[2]
        if act == "preupload":
            asked = json.loads(body)["files"]
            kinds = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer(200, {"files": [{"path": one["path"], **kinds} for one in asked]})
        else:
            assert act == "commit", self.path
            self._answer(
                200, self.server.commit(name, [json.loads(line) for line in body.splitlines()])
            )

    def do_GET(self) -> None:
        self._answer(404, {"error": "Entry not found"})

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
