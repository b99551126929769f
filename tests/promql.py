"""What a PromQL expression reads: its metrics, and the labels that it takes from each."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.checkout_paths import ROOT

DASHBOARD = ROOT / "infra/grafana/dashboards/perdure.json"
ALERTS = ROOT / "infra/prometheus/alerts.yml"

FROM_PROMETHEUS = {"instance", "job", "up"}
"""Labels and a metric that a scrape adds."""
_METRIC = re.compile(
    r"\b((?:perdure|temporal|node|DCGM_FI)_\w+|approximate_backlog_count|up)\b(\{[^}]*\})?"
)
_BY = re.compile(r"\bby\s*\(([^)]*)\)")
_WORDS = {
    *("by", "sum", "max", "min", "count", "rate", "deriv", "increase", "histogram_quantile"),
}


@dataclass(frozen=True)
class Reads:
    """One expression."""

    where: str
    expression: str
    metrics: dict[str, set[str]]
    """Metric -> labels in its selector."""
    by: set[str]

    def misses(self, served: Mapping[str, set[str] | None]) -> list[str]:
        """What it reads and `served` lacks. `served`: metric -> its labels; None: it has no sample yet."""
        wrong = []
        for metric, selected in self.metrics.items():
            if metric not in served and metric not in FROM_PROMETHEUS:
                wrong.append(f"{self.where}: no metric {metric}")
            labels = served.get(metric)
            if labels is not None and (lacks := (selected | self.by) - labels - FROM_PROMETHEUS):
                wrong.append(f"{self.where}: {metric} has no label {', '.join(sorted(lacks))}")
        return wrong


def reads(where: str, expression: str) -> Reads:
    """Raises: ValueError for a word that is no metric of ours and no known function."""
    found: dict[str, set[str]] = {}
    for metric, selector in _METRIC.findall(expression):
        found.setdefault(metric, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    by = {label.strip() for group in _BY.findall(expression) for label in group.split(",")}
    rest = re.sub(r"\[[^\]]*\]", "", _BY.sub("by", _METRIC.sub("", expression)))
    if unknown := set(re.findall(r"[a-zA-Z_]\w*", rest)) - _WORDS:
        raise ValueError(f"{where}: unknown words {sorted(unknown)} in {expression}")
    return Reads(where, expression, found, by)


def expressions() -> list[Reads]:
    """Of every panel and every alert."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    drawn = [reads(p["title"], t["expr"]) for p in panels for t in p["targets"]]
    groups: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"]
    return drawn + [reads(r["alert"], r["expr"]) for group in groups for r in group["rules"]]


def served(*texts: str) -> dict[str, set[str] | None]:
    """Metric -> labels of its samples, in what processes answer at /metrics."""
    found: dict[str, set[str] | None] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
            for suffix in suffixes.get(family.type, ("",)):
                found.setdefault(family.name + suffix, None)
            for sample in family.samples:
                found[sample.name] = (found.get(sample.name) or set()) | set(sample.labels)
    return found
