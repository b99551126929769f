"""The HTTP verbs of document 003's repository, over `OpenHandsServer`.

    POST /start            {}                                          -> {"status": ...}
    POST /process          {"instance": ..., "sampling_params": ..., "job_id": ...}  -> the job's result
    POST /cancel           {"job_id": ...}
    POST /add_llm_server   {"address": "http://host:8000/v1", "weight": 1}
    POST /clear_llm_server {}
    GET  /status                                                       -> counts by stage
    POST /stop             {}

An error is `{"detail": ...}`: 400 if a job cannot start, 404 for an unknown job or path, 503 if the
server is not running or has no LLM server, 504 after `--timeout`.
"""

import argparse
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from perdure.errors import ActionNeeded, Cancelled, GiveUp, NotFound
from perdure.integrations.openhands import OpenHandsServer, ServerNotRunning

MAX_BODY = 32 << 20
PORT = 8006
"""The default port of document 003's repository."""
Answer = dict[str, Any]
logger = logging.getLogger(__name__)


class NoLLMServer(ServerNotRunning):
    """Without an LLM server, jobs would wait forever."""


class Verbs:
    """The HTTP verbs. `timeout`: the longest that a call of /process waits, in seconds."""

    def __init__(self, server: OpenHandsServer, timeout: float | None = None) -> None:
        self._server = server
        self._timeout = timeout
        self.table: dict[tuple[str, str], Callable[[Mapping[str, Any]], Answer]] = {
            ("POST", "/start"): self._start,
            ("POST", "/stop"): self._stop,
            ("GET", "/status"): self._status,
            ("POST", "/process"): self._process,
            ("POST", "/cancel"): self._cancel,
            ("POST", "/add_llm_server"): self._add,
            ("POST", "/clear_llm_server"): self._clear,
        }

    def _start(self, body: Mapping[str, Any]) -> Answer:
        self._server.start()
        return {"status": "Server started successfully"}

    def _stop(self, body: Mapping[str, Any]) -> Answer:
        if not self._server.running:
            raise ServerNotRunning("the server is not running")
        self._server.stop()
        return {"status": "Server stopped successfully"}

    def _status(self, body: Mapping[str, Any]) -> Answer:
        counts = self._server.status()
        return {"status": "running", "pending_jobs": counts["total"], **counts}

    def _process(self, body: Mapping[str, Any]) -> Answer:
        instance, job_id = _field(body, "instance"), body.get("job_id")
        if self._server.needs_llm and not self._server.llm_servers():
            raise NoLLMServer("no LLM server: add one with /add_llm_server")
        parameters = body.get("sampling_params") or {}
        return self._server.process(instance, parameters, job_id, timeout=self._timeout)

    def _cancel(self, body: Mapping[str, Any]) -> Answer:
        job_id = str(_field(body, "job_id"))
        if not self._server.cancel(job_id):
            raise NotFound(f"no open job {job_id!r}")
        return {"status": f"Cancel requested for job {job_id}"}

    def _add(self, body: Mapping[str, Any]) -> Answer:
        address = str(_field(body, "address"))
        self._server.add_llm_server(address, float(body.get("weight", 1.0)))
        return {"status": f"Added LLM server address: {address}"}

    def _clear(self, body: Mapping[str, Any]) -> Answer:
        self._server.clear_llm_servers()
        return {"status": "Cleared all LLM server addresses"}


def _field(body: Mapping[str, Any], name: str) -> Any:
    if body.get(name) in (None, ""):
        raise ValueError(f"{name} is missing")
    return body[name]


def status_of(error: Exception) -> int:
    """The HTTP status of a failed call."""
    if isinstance(error, ServerNotRunning | Cancelled):
        return 503
    if isinstance(error, TimeoutError):
        return 504
    if isinstance(error, NotFound):
        return 404
    return 400 if isinstance(error, ActionNeeded | GiveUp | ValueError | TypeError) else 500


def http_server(verbs: Verbs, host: str, port: int) -> ThreadingHTTPServer:
    """The server; call its `serve_forever`. `port` 0: any free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET", {})

        def do_POST(self) -> None:
            try:
                self._answer("POST", self._body())
            except ValueError as error:
                self._send(400, {"detail": str(error)})

        def _body(self) -> Mapping[str, Any]:
            size = int(self.headers.get("content-length") or 0)
            if size > MAX_BODY:
                self.close_connection = True
                raise ValueError(f"a request may have at most {MAX_BODY} bytes")
            body = json.loads(self.rfile.read(size) or b"{}")
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
            return body

        def _answer(self, method: str, body: Mapping[str, Any]) -> None:
            verb = verbs.table.get((method, self.path.partition("?")[0]))
            if verb is None:
                return self._send(404, {"detail": f"no route {method} {self.path}"})
            try:
                return self._send(200, verb(body))
            except Exception as error:
                status = status_of(error)
                if status == 500:
                    logger.exception("%s %s failed", method, self.path)
                return self._send(status, {"detail": str(error) or type(error).__name__})

        def _send(self, status: int, answer: Answer) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            logger.debug(format, *arguments)

    return ThreadingHTTPServer((host, port), Handler)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perdure.integrations.openhands_http")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--max-init-workers", type=int, default=6)
    parser.add_argument("--max-run-workers", type=int, default=5)
    parser.add_argument("--max-eval-workers", type=int)
    parser.add_argument("--allow-skip-eval", type=truth, nargs="?", const=True, default=True)
    parser.add_argument("--timeout", type=float, help="seconds that a call of /process waits")
    parser.add_argument("--agent", default="openhands")
    parser.add_argument("--sandbox", default="bubblewrap")
    return parser.parse_args(given)


def truth(text: str) -> bool:
    """Parse a boolean: `--allow-skip-eval False` is False."""
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def main() -> None:
    asked = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    server = OpenHandsServer(
        max_init_workers=asked.max_init_workers,
        max_run_workers=asked.max_run_workers,
        max_eval_workers=asked.max_eval_workers,
        allow_skip_eval=asked.allow_skip_eval,
        agent=asked.agent,
        sandbox=asked.sandbox,
    )
    with http_server(Verbs(server, asked.timeout), asked.host, asked.port) as http:
        logger.info("listening on http://%s:%s; call POST /start first", *http.server_address)
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            server.stop()


if __name__ == "__main__":
    main()
