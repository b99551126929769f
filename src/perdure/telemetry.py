"""Logging and metrics of a process, and the Temporal SDK's runtime.

Owns names and setup. All logs go to stderr, so that stdout has only a command's output. Temporal's
SDK and structlog are imported inside functions, so that commands start fast.
"""

import faulthandler
import logging
import signal
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from perdure.settings.settings_tree import Settings

if TYPE_CHECKING:
    from temporalio.common import MetricMeter
    from temporalio.runtime import Runtime

STACKS_SIGNAL = signal.SIGUSR1

STUCK_TRIES = 5
"""An activity that has failed this often is stuck: the pauses between its tries took half a
minute."""

SECONDS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]


class Metric(NamedTuple):
    """A metric of a worker. `perdure.gateway.gateway_metrics` has the gateway's."""

    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str


METRICS = {
    "perdure_stage_seconds": Metric("histogram", "s", "Time in a stage, by stage and outcome."),
    "perdure_queue_seconds": Metric("histogram", "s", "Wait for a free slot, by stage."),
    "perdure_attempts": Metric("counter", "", "Stages that did not succeed, by cause."),
    "perdure_stuck_tries": Metric(
        "counter", "", "Tries of stages that failed after many others, by stage and cause."
    ),
    "perdure_rollouts": Metric("counter", "", "Finished rollouts, by agent, status and outcome."),
    "perdure_tokens": Metric("counter", "", "Sampled tokens of finished rollouts, by agent."),
    "perdure_sandboxes_alive": Metric("gauge", "", "Live sandboxes of this host, by provider."),
    "perdure_seats": Metric("gauge", "", "Seats of this host."),
    "perdure_seats_free": Metric("gauge", "", "Free seats of this host."),
    "perdure_backlog": Metric("gauge", "", "Tasks that no worker has taken, by stage."),
    "perdure_backlog_age_seconds": Metric("gauge", "s", "Wait of the oldest such task, by stage."),
    "perdure_environment_ms": Metric("counter", "ms", "Agent time outside model calls."),
    "perdure_model_ms": Metric("counter", "ms", "Agent time inside model calls."),
}
"""The ratio of environment time to model time determines how many agents one engine can serve."""


class WorkerMetrics:
    """Records metrics with the Temporal SDK's meter, so that one port serves both. Without a meter
    it does nothing."""

    def __init__(self) -> None:
        self._instruments: dict[str, Any] = {}

    def use(self, meter: "MetricMeter") -> None:
        """Record with `meter` from now on."""
        make = {
            "counter": meter.create_counter,
            "gauge": meter.create_gauge,
            "histogram": meter.create_histogram_float,
        }
        self._instruments = {
            name: make[metric.kind](name, metric.help, metric.unit)
            for name, metric in METRICS.items()
        }

    def stage(
        self, stage: str, seconds: float, queued_s: float, cause: str = "", tries: int = 1
    ) -> None:
        """Record a stage that ended. `cause`: why it failed; empty if it succeeded. `tries`: with
        this one."""
        outcome = "failed" if cause else "ok"
        self._call("perdure_stage_seconds", seconds, stage=stage, outcome=outcome)
        self._call("perdure_queue_seconds", max(queued_s, 0.0), stage=stage)
        if cause:
            self._call("perdure_attempts", 1, stage=stage, cause=cause)
        if cause and tries >= STUCK_TRIES:
            self._call("perdure_stuck_tries", 1, stage=stage, cause=cause)

    def rollout(self, agent: str, status: str, outcome: str, tokens: int) -> None:
        """Record a rollout that has its episode."""
        self._call("perdure_rollouts", 1, agent=agent, status=status, outcome=outcome)
        self._call("perdure_tokens", tokens, agent=agent)

    def agent_time(self, total_s: float, model_s: float) -> None:
        """Record an agent's time. `total_s` excludes waits for an engine, and `model_s` is the part
        inside model calls."""
        self._call("perdure_environment_ms", round(max(total_s - model_s, 0.0) * 1000))
        self._call("perdure_model_ms", round(model_s * 1000))

    def sandboxes_alive(self, provider: str, count: int) -> None:
        self._call("perdure_sandboxes_alive", count, provider=provider)

    def seats(self, most: int, taken: int) -> None:
        """Record the seats of this host."""
        self._call("perdure_seats", most)
        self._call("perdure_seats_free", max(most - taken, 0))

    def backlog(self, stage: str, count: int, age_s: float) -> None:
        """Record the backlog of a stage's queue, over all hosts."""
        self._call("perdure_backlog", count, stage=stage)
        self._call("perdure_backlog_age_seconds", round(age_s), stage=stage)

    def _call(self, name: str, value: float, **labels: str) -> None:
        verb = {"counter": "add", "gauge": "set", "histogram": "record"}[METRICS[name].kind]
        if instrument := self._instruments.get(name):
            getattr(instrument, verb)(value, labels)


metrics = WorkerMetrics()
"""The metrics of this process. `temporal_runtime` sets the meter."""


def temporal_runtime(settings: Settings) -> "Runtime":
    """The SDK's runtime. Its logs and metrics join Perdure's logs and the port `metrics.port`.

    Create one per process, before the first client. Otherwise the SDK logs to stdout.
    """
    from temporalio import activity, workflow
    from temporalio.runtime import (
        LogForwardingConfig,
        LoggingConfig,
        PrometheusConfig,
        TelemetryConfig,
        TelemetryFilter,
    )
    from temporalio.runtime import Runtime as TemporalRuntime

    # The record's fields already contain the context, so keep it out of the message.
    workflow.logger.workflow_info_on_message = False
    activity.logger.activity_info_on_message = False
    log_config = LoggingConfig(
        filter=TelemetryFilter(core_level="WARN", other_level="ERROR"),
        forwarding=LogForwardingConfig(logger=logging.getLogger("temporal.core")),
    )
    prometheus = None
    if settings.metrics.port:
        prometheus = PrometheusConfig(
            bind_address=f"{settings.metrics.host}:{settings.metrics.port}",
            counters_total_suffix=True,
            durations_as_seconds=True,
            histogram_bucket_overrides={
                name: SECONDS for name, metric in METRICS.items() if metric.kind == "histogram"
            },
        )
    runtime = TemporalRuntime(telemetry=TelemetryConfig(logging=log_config, metrics=prometheus))
    if prometheus is not None:
        metrics.use(runtime.metric_meter)
    return runtime


def configure_logging(process: str) -> None:
    """Send structlog's and the standard library's records to stderr: JSON lines, or text on a terminal.

    From then on, `STACKS_SIGNAL` makes the process write the stacks of all its threads to stderr.
    """
    import structlog

    faulthandler.register(STACKS_SIGNAL, all_threads=True)

    renderer: Any = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    # These libraries log every request, which would bury the lines about rollouts.
    for noisy in ("httpx", "httpcore", "botocore", "urllib3", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(process=process)


def bind(run: str, rollout: str, attempt: int) -> AbstractContextManager[None]:
    """Add the rollout to every log line inside the block."""
    import structlog

    return structlog.contextvars.bound_contextvars(run=run, rollout=rollout, attempt=attempt)
