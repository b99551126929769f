"""An S3 server in the process of the test."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@contextmanager
def with_bucket(name: str, host: str = "127.0.0.1") -> Iterator["S3Server"]:
    """A server with one bucket, whose credentials every process finds in its environment."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = S3Server(host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "dummy")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "dummy")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            boto3.client("s3", endpoint_url=server.url).create_bucket(Bucket=name)
            yield server
        finally:
            server.close()
            moto = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]  # it lives as long as the process
            moto.buckets[name].keys.clear()
            moto.delete_bucket(name)


class S3Server:
    """moto's S3 behind one lock (its own conditional writes race), with faults on request."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.fault: str | None = None
        self.requests = 0
        self.lists = 0
        self._lock = threading.Lock()
        self._s3: Wsgi = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(host, port, self._answer, threaded=True)
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            self.requests += 1
            self.lists += "list-type" in environ["QUERY_STRING"]
            fault = self.fault if environ["REQUEST_METHOD"] == "PUT" else None
            if fault and fault.isdigit():
                start(f"{fault} Fault", [("Content-Type", "application/xml")])
                return [b"<Error><Code>Fault</Code><Message>injected</Message></Error>"]
            answer = self._s3(environ, start) if fault != "unsent" else [b""]
            if fault:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return answer

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    S3Server("0.0.0.0", 8333)  # its thread holds the process
