"""What a gateway knows of its engines, for Prometheus: read off the pool when somebody asks."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from perdure.engines.pool.pool import EnginePool, Seat
from perdure.engines.state import EngineState


class _Gauge(NamedTuple):
    name: str
    help: str
    value: Callable[[EnginePool, Seat], float]


GAUGES = (
    _Gauge("agents", "Sessions leased to it.", lambda p, s: p.leases.agents(s.record.name)),
    _Gauge("capacity", "Sessions it may have.", lambda _, s: s.capacity.agents),
    _Gauge("calls", "Calls running on it.", lambda _, s: len(s.running)),
    _Gauge("generation", "Which of its boots serves.", lambda _, s: s.record.generation),
    _Gauge("policy_version", "Of its weights; -1: not known.", lambda _, s: _version(s)),
    _Gauge("kv_used", "Share of its KV cache in use.", lambda _, s: s.watcher.vitals.kv_used),
    _Gauge(
        "prefix_hits",
        "Prompt tokens it did not prefill.",
        lambda _, s: s.watcher.vitals.cache_hits,
    ),
    _Gauge("prefix_queries", "Prompt tokens.", lambda _, s: s.watcher.vitals.cache_queries),
)


def _version(seat: Seat) -> float:
    return -1 if seat.record.version is None else seat.record.version


class _Collector:
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        pool, name = self._pool, "perdure_engine_{}".format
        for gauge in GAUGES:
            family = GaugeMetricFamily(name(gauge.name), gauge.help, labels=["engine"])
            for seat in pool.seats.values():
                family.add_metric([seat.record.name], gauge.value(pool, seat))
            yield family
        states = GaugeMetricFamily(name("state"), "1 for its state.", labels=["engine", "state"])
        for seat in pool.seats.values():
            for state in EngineState:
                is_it = float(seat.record.state is state)
                states.add_metric([seat.record.name, state.value], is_it)
        yield states
        yield GaugeMetricFamily(name("waiting_calls"), "Calls without a seat.", pool.waiting)
        yield GaugeMetricFamily(
            name("resumed_completions"), "Broken completions that went on elsewhere.", pool.resumed
        )
        yield GaugeMetricFamily(
            name("salvaged_tokens"),
            "Tokens of broken completions that were kept.",
            pool.salvaged_tokens,
        )
        yield GaugeMetricFamily(
            name("moved_sessions"), "Sessions that changed engines.", pool.leases.moved
        )


def pool_metrics(pool: EnginePool) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(pool))
    return generate_latest(registry)
