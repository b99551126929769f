"""Propagates traces through Temporal, and gives each workflow a span that replays do not repeat.

Temporal's own interceptor puts the current span into headers of workflows and activities. The code
that does the work creates the spans of stages and model calls (`perdure.tracing`).
"""

import asyncio
from typing import Any

import opentelemetry.context
from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from temporalio import workflow
from temporalio.client import Interceptor as ClientInterceptor
from temporalio.contrib.opentelemetry import OpenTelemetryInterceptor
from temporalio.worker import (
    ExecuteWorkflowInput,
    Interceptor,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
)

from perdure.client import temporal_names

SPANS = {
    temporal_names.ROLLOUT: "rollout",
    temporal_names.GROUP: "group",
    temporal_names.RUN: "run",
}
"""Workflow type -> name of its span. Other workflows have no span."""
RUN_ID_PREFIX = "run/"
"""Prefix of the workflow ids of runs."""


class WorkflowSpans(ClientInterceptor, Interceptor):
    """Creates the spans of workflows. As a client interceptor, it applies to the client's workers
    too."""

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        return _Spanned


def interceptors() -> list[ClientInterceptor]:
    """Interceptors for `Client.connect`, the outermost first."""
    return [OpenTelemetryInterceptor(), WorkflowSpans()]


class _Spanned(WorkflowInboundInterceptor):
    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:
        info = workflow.info()
        if info.workflow_type not in SPANS:
            return await super().execute_workflow(input)
        span = _begin(SPANS[info.workflow_type], info, input.args)
        # Not detached, because the context ends with the workflow's task.
        opentelemetry.context.attach(trace.set_span_in_context(span))
        try:
            result = await super().execute_workflow(input)
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            span.end()
            raise
        except workflow.ContinueAsNewError:
            span.end()
            raise
        except asyncio.CancelledError:
            # An eviction from the worker's cache cancels too, and then the next worker ends the
            # span.
            if workflow.cancellation_reason() is not None:
                span.end()
            raise
        span.set_attributes(_told(result))
        span.end()
        return result


def _begin(name: str, info: workflow.Info, args: Any) -> trace.Span:
    """Start the span. A rollout of a run begins its own trace, linked to the run's, because one
    trace for a whole run would be too large to read."""
    current = trace.get_current_span().get_span_context()
    apart = (
        name != "run" and info.root is not None and info.root.workflow_id.startswith(RUN_ID_PREFIX)
    )
    attributes = {"perdure.workflow_id": info.workflow_id, "temporal.run_id": info.run_id}
    request = args[0] if args else None
    for field in ("run_id", "instance", "agent"):
        if isinstance(value := getattr(request, field, None), str):
            attributes[f"perdure.{field}"] = value
    return trace.get_tracer("perdure").start_span(
        name,
        context=opentelemetry.context.Context() if apart else None,
        kind=SpanKind.SERVER,
        attributes=attributes,
        links=[Link(current)] if apart and current.is_valid else None,
    )


def _told(result: Any) -> dict[str, Any]:
    """Span attributes from a rollout's result."""
    found = {
        name: getattr(result, name, None) for name in ("status", "outcome", "reward", "tokens")
    }
    return {
        f"perdure.{name}": str(value) if isinstance(value, str) else value
        for name, value in found.items()
        if value is not None
    }
