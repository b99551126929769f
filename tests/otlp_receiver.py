"""An OTLP collector in this process: takes what OpenTelemetry's exporters send by HTTP, and keeps it."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    """Nanoseconds."""
    end: int
    attributes: dict[str, Any]
    failed: bool
    links: tuple[str, ...]
    """Traces that it links to."""


@dataclass
class Collector:
    url: str
    spans: list[Received] = field(default_factory=list)

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Received) -> list[Received]:
        """Its children, by their start."""
        found = [one for one in self.spans if (one.trace, one.parent) == (parent.trace, parent.id)]
        return sorted(found, key=lambda one: one.start)

    def tree(self, top: Received, depth: int = 0) -> str:
        """A trace as text: milliseconds since its beginning, milliseconds it took, name."""
        begin = min(one.start for one in self.spans if one.trace == top.trace)
        since, took = (top.start - begin) // 1_000_000, (top.end - top.start) // 1_000_000
        line = f"{since:7} {took:7}  {'  ' * depth}{top.name}"
        return "\n".join([line, *(self.tree(one, depth + 1) for one in self.below(top))])


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            known = self.path == "/v1/traces"
            if known:
                collector.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200 if known else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    service=service,
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    failed=span.status.code == 2,
                    links=tuple(link.trace_id.hex() for link in span.links),
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(found: Any) -> Any:
    kind = found.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in found.array_value.values]
    return getattr(found, kind) if kind else None
