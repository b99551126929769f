"""The gateway's Prometheus metrics. Each app has its own registry, so that a test can hold two apps."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Names start with `perdure_gateway_`."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        name = "perdure_gateway_{}".format
        self.turns = Counter(
            name("turns"), "Turns answered.", ["finish_reason", "model"], registry=registry
        )
        self.tokens = Counter(
            name("tokens"), "Tokens of answered turns.", ["kind", "model"], registry=registry
        )
        self.replays = Counter(
            name("replays"), "Retried requests answered from the journal.", registry=registry
        )
        self.retries = Counter(
            name("retries"),
            "Retried requests by outcome: joined a call in flight, repeated a recorded answer,"
            " overtaken by another gateway's answer.",
            ["kind"],
            registry=registry,
        )
        self.replayed_turns = Counter(
            name("replayed_turns"), "Turns answered from an earlier attempt.", registry=registry
        )
        self.echo_changes = Counter(
            name("echo_changes"),
            "Changed answers that agents sent back, by kind of change.",
            ["change"],
            registry=registry,
        )
        self.forks = Counter(
            name("forks"), "Turns that continue an already continued turn.", registry=registry
        )
        self.placeholders = Counter(
            name("placeholders"), "Answers without text or tool calls.", registry=registry
        )
        self.paced = Counter(
            name("paced"), "Calls that waited for their session's rate limit.", registry=registry
        )
        self.bridge_misses = Counter(
            name("bridge_misses"), "Prompts rendered in full.", ["reason"], registry=registry
        )
        self.errors = Counter(name("errors"), "Error answers.", ["code"], registry=registry)
        self.engine_seconds = Histogram(
            name("engine_seconds"), "Seconds on the engine.", buckets=SECONDS, registry=registry
        )
        self.prompt_seconds = Histogram(
            name("prompt_seconds"),
            "Seconds to build the prompt.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1),
            registry=registry,
        )
        self.journal_seconds = Histogram(
            name("journal_seconds"),
            "Seconds to write a record to the journal.",
            buckets=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 1),
            registry=registry,
        )
        self.sessions = Gauge(name("open_sessions"), "Sessions in memory.", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)
