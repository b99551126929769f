"""Whether a process traces, and that tracing costs nothing when it is off."""

import subprocess
import sys
from typing import Any

import pytest

from perdure import tracing
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings

ADDRESS = "http://collector:4318"

OFF = """
import sys
from perdure import tracing
from perdure.settings.settings_tree import Settings

tracing.configure(Settings(), "test")
with tracing.span("turn", {"a": 1}, parent="00-" + "1" * 32 + "-" + "2" * 16 + "-01") as span:
    span.set({"b": 2})
with tracing.stage("boot_sandbox", {}):
    pass
assert tracing.carrier() == {} and tracing.above() == "" and not tracing.on()
print([name for name in sys.modules if name.startswith(("opentelemetry", "temporalio"))])
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT", "SDK_DISABLED"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


def test_without_an_address_nothing_of_opentelemetry_is_loaded() -> None:
    """A process that does not trace imports no OpenTelemetry, and its spans do nothing."""
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    ("settings", "variables", "wanted"),
    [
        ({}, {}, False),
        ({"endpoint": ADDRESS}, {}, True),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": ADDRESS}, True),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ADDRESS}, True),
        ({"endpoint": ADDRESS}, {"OTEL_SDK_DISABLED": "true"}, False),
        ({"endpoint": ADDRESS}, {"OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_an_address_turns_traces_on(
    settings: dict[str, Any],
    variables: dict[str, str],
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Perdure's setting or OpenTelemetry's variables turn it on, and its switches turn it off."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert tracing.wanted(Settings(traces=settings)) is wanted


def test_a_protocol_that_is_not_spoken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would lose every span silently, so the error says what to set."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigurationError, match="http/protobuf"):
        tracing.configure(Settings(traces={"endpoint": ADDRESS}), "test")
