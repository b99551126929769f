"""Traces: OpenTelemetry spans of this process, exported over OTLP if an address is set.

Owns setup, attribute names, and the propagation of traces across processes. Without an address,
OpenTelemetry is not imported, and `span` costs one comparison.
"""

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from perdure.errors import ConfigurationError, MissingDependency
from perdure.installation import command_for_extra
from perdure.settings import process_environment
from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenTelemetrySpan
    from opentelemetry.trace import Tracer

TRACES_PATH = "/v1/traces"
PARENT = "traceparent"
"""The W3C header, and the label of a gateway session, that names the span to continue."""
FLUSH_MS = 3000
"""Milliseconds that a process waits at its end to export its last spans."""
Attributes = Mapping[str, str | int | float | bool | list[str] | None]
NOTHING: Attributes = {}
Kind = Literal["internal", "client", "server"]


class Span:
    """The interface to a span. Without tracing it does nothing."""

    def __init__(self, span: "OpenTelemetrySpan | None" = None) -> None:
        self._span = span

    def set(self, attributes: "Attributes") -> None:
        """Set attributes, except those with the value None."""
        if self._span is not None:
            self._span.set_attributes(_known(attributes))


_OFF = contextlib.nullcontext(Span())
_tracer: "Tracer | None" = None
_above: ContextVar[str] = ContextVar("above", default="")


def wanted(settings: Settings) -> bool:
    """Whether Perdure's settings or OpenTelemetry's variables set an address for traces."""
    if process_environment.foreign("OTEL_SDK_DISABLED").lower() == "true":
        return False
    if process_environment.foreign("OTEL_TRACES_EXPORTER") == "none":
        return False
    named = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(
        settings.traces.endpoint or any(process_environment.foreign(name) for name in named)
    )


def configure(settings: Settings, process: str) -> None:
    """Export the spans of this process if an address is set. Idempotent.

    An existing tracer provider of the process, such as a trainer's, stays.
    Raises: ConfigurationError, MissingDependency.
    """
    global _tracer  # noqa: PLW0603  # one per process, as OpenTelemetry's own provider
    if _tracer is not None or not wanted(settings):
        return
    if not settings.traces.endpoint and not importable():
        log = logging.getLogger("perdure.tracing")
        log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set; for traces: %s", command_for_extra("traces")
        )
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from temporalio.contrib.opentelemetry import create_tracer_provider
    except ImportError as error:
        raise MissingDependency(
            f"PERDURE_TRACES__ENDPOINT is set: {command_for_extra('traces')}, or unset it"
        ) from error
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        _check_protocol()
        endpoint = settings.traces.endpoint
        exporter = OTLPSpanExporter(endpoint=endpoint + TRACES_PATH if endpoint else None)
        service = process_environment.foreign("OTEL_SERVICE_NAME") or f"perdure-{process}"
        provider = create_tracer_provider(resource=Resource.create({"service.name": service}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
    _tracer = trace.get_tracer("perdure")


def importable() -> bool:
    """Whether the packages of the extra `traces` are installed."""
    packages = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    try:
        return all(importlib.metadata.version(name) for name in packages)
    except importlib.metadata.PackageNotFoundError:
        return False


def _check_protocol() -> None:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    for name in names:
        if (found := process_environment.foreign(name)) not in ("", "http/protobuf"):
            raise ConfigurationError(
                f"{name}={found!r}: only 'http/protobuf' is supported; use the collector's HTTP port, "
                "usually 4318"
            )


def on() -> bool:
    return _tracer is not None


def flush() -> None:
    """Export the last spans of a process that ends without Python's shutdown."""
    if _tracer is not None:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if hasattr(provider, "force_flush"):
            provider.force_flush(FLUSH_MS)


def span(
    name: str,
    attributes: Attributes = NOTHING,
    *,
    kind: Kind = "internal",
    parent: str | None = None,
    root: bool = False,
) -> AbstractContextManager[Span]:
    """The span of a `with` block. An exception marks it as failed.

    It is a child of the current span; without one, no span is recorded. `parent`: a `traceparent`
    to continue instead; if empty, no span is recorded. `root`: start a trace if there is no current
    span.
    """
    if _tracer is None or parent == "" or not (parent or root or _inside()):
        return _OFF
    return _recorded(_tracer, name, kind, parent, _known(attributes))


@contextlib.contextmanager
def _recorded(
    tracer: "Tracer", name: str, kind: Kind, parent: str | None, attributes: dict[str, Any]
) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        name,
        context=None if parent is None else _context(parent),
        kind=SpanKind[kind.upper()],
        attributes=attributes,
        record_exception=False,  # messages may contain sandbox output; the status has the type
        set_status_on_exception=False,
    ) as recorded:
        try:
            yield Span(recorded)
        except Exception as error:
            from opentelemetry.trace import Status, StatusCode

            recorded.set_attribute("error.type", type(error).__name__)
            recorded.set_status(Status(StatusCode.ERROR))
            raise


def past(name: str, start: datetime, end: datetime) -> None:
    """Record a span of the past, such as a wait, as a child of the current span."""
    if _tracer is not None and end > start and _inside():
        done = _tracer.start_span(name, start_time=_nanoseconds(start))
        done.end(_nanoseconds(end))


@contextlib.contextmanager
def stage(name: str, attributes: Attributes) -> Iterator[Span]:
    """The span of one try of a stage. Inside the block, `above()` names its parent."""
    token = _above.set(carrier().get(PARENT, ""))
    try:
        with span(name, attributes, kind="server") as recorded:
            yield recorded
    finally:
        _above.reset(token)


def above() -> str:
    """The `traceparent` of the rollout's span, parent of the current stage. It outlives every
    try."""
    return _above.get()


def _inside() -> bool:
    from opentelemetry.trace import get_current_span

    return get_current_span().get_span_context().is_valid


def carrier() -> dict[str, str]:
    """Headers with which another process continues the current span; empty without a span."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def _context(parent: str) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({PARENT: parent})


def _known(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(at: datetime) -> int:
    return int(at.timestamp() * 1e9)
