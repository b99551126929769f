"""The cluster's files agree with the code they start: commands, attributes, metrics, settings."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.client.search_attributes import TYPE_NAMES
from perdure.gateway.metrics import Metrics as GatewayMetrics
from perdure.settings import Settings
from perdure.telemetry import METRICS

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: s for name, s in COMPOSE["services"].items() if s["image"] == "perdure"}


def test_namespace_script_registers_every_search_attribute() -> None:
    """A server set up by infra/temporal knows the same attributes as one from `perdure up`."""
    script = (ROOT / "infra/temporal/setup_namespace.sh").read_text()
    table = dict(re.findall(r"^(Perdure\w+) (\w+)$", script, re.MULTILINE))

    assert table == TYPE_NAMES


@pytest.mark.parametrize("service", OURS)
def test_services_start_modules_that_exist(service: str) -> None:
    """Each `python -m` of the compose file names a module that can be run."""
    command = OURS[service]["command"]
    if command[:2] == ["python", "-m"]:
        found = importlib.util.find_spec(command[2])
        assert found is not None, command
    else:
        assert command[0] == "perdure" or (ROOT / command[1]).is_file()


def test_every_stage_has_a_service() -> None:
    """No queue of ours is left without a worker."""
    from workers.process import STAGES

    commands = [" ".join(service["command"]) for service in OURS.values()]

    assert [f"python -m workers.{s}" in commands for s in STAGES] == [True] * len(STAGES)


def test_compose_sets_only_settings_that_exist() -> None:
    """A variable of the compose file that nobody reads would be a silent mistake."""
    names = {f"PERDURE_{name.upper()}" for name in Settings.model_fields}
    given = {v for s in OURS.values() for v in s["environment"] if v.startswith("PERDURE_")}

    assert given - names == set()


def test_mounted_files_exist() -> None:
    """Every host path the compose file mounts is in the repository."""
    mounts = [m for s in COMPOSE["services"].values() for m in s.get("volumes", ())]
    paths = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]

    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_dashboard_draws_metrics_that_exist() -> None:
    """Each panel asks for a metric that some process serves."""
    dashboard = json.loads((ROOT / "infra/grafana/dashboards/perdure.json").read_text())
    asked = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    gateway = set(re.findall(r"^# TYPE (\S+)", GatewayMetrics().text().decode(), re.MULTILINE))
    suffixes = ("", "_total", "_bucket")
    served = {name + suffix for name in (*METRICS, *gateway) for suffix in suffixes}

    assert set(re.findall(r"\bperdure_\w+", asked)) - served == set()
