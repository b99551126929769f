"""Prometheus metrics of a gateway's engines, read from the pool at each scrape."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from perdure.engines.engine_state import EngineState
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.pooled_engine import PooledEngine


class _Gauge(NamedTuple):
    name: str
    help: str
    value: Callable[[EnginePool, PooledEngine], float]


GAUGES = (
    _Gauge("agents", "Sessions with a lease on it.", lambda p, s: p.leases.agents(s.record.name)),
    _Gauge("capacity", "Most sessions that it may hold.", lambda _, s: s.capacity.agents),
    _Gauge("calls", "Calls that run on it.", lambda _, s: len(s.running)),
    _Gauge("generation", "Generation of its current start.", lambda _, s: s.record.generation),
    _Gauge(
        "policy_version", "Policy version of its weights; -1: unknown.", lambda _, s: _version(s)
    ),
    _Gauge("kv_used", "Share of its KV cache in use.", lambda _, s: s.health.vitals.kv_used),
    _Gauge(
        "prefix_hits",
        "Prompt tokens found in its prefix cache.",
        lambda _, s: s.health.vitals.cache_hits,
    ),
    _Gauge("prefix_queries", "Prompt tokens.", lambda _, s: s.health.vitals.cache_queries),
)


def _version(engine: PooledEngine) -> float:
    return -1 if engine.record.version is None else engine.record.version


def _labels(engine: PooledEngine) -> list[str]:
    return [engine.record.name, engine.record.model]


class _Collector:
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        pool, name = self._pool, "perdure_engine_{}".format
        for gauge in GAUGES:
            family = GaugeMetricFamily(name(gauge.name), gauge.help, labels=["engine", "model"])
            for engine in pool.engines.values():
                family.add_metric(_labels(engine), gauge.value(pool, engine))
            yield family
        states = GaugeMetricFamily(
            name("state"), "1 for its current state.", labels=["engine", "model", "state"]
        )
        for engine in pool.engines.values():
            for state in EngineState:
                is_it = float(engine.record.state is state)
                states.add_metric([*_labels(engine), state.value], is_it)
        yield states
        waiting = GaugeMetricFamily(
            name("waiting_calls"), "Calls that wait for an engine.", labels=["model"]
        )
        models = (engine.record.model for engine in pool.engines.values())
        for model in {*models, *pool.waiting}:
            waiting.add_metric([model], pool.waiting[model])
        yield waiting
        yield GaugeMetricFamily(
            name("resumed_completions"),
            "Broken completions that another engine continued.",
            pool.resumed,
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
    """The pool's metrics as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(_Collector(pool))
    return generate_latest(registry)
