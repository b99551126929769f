"""Decides which nodes get a worker, how many seats each has, and what to request from the autoscaler."""

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from perdure.types import Frozen

Node = Mapping[str, Any]
"""One entry of `ray.nodes()`."""
_VALUE = r"[a-zA-Z0-9](?:[\w.-]{0,61}[a-zA-Z0-9])?"
SELECTOR = re.compile(rf"!?(?:{_VALUE}|in\({_VALUE}(?:, ?{_VALUE})*\))", re.ASCII)
"""The label selectors that Ray allows: `v`, `!v`, `in(v, w)` and `!in(v, w)`."""


class WorkersPlan(Frozen):
    environment: dict[str, str]
    """Each worker's variables: its settings, Temporal's and the store's."""
    home: str
    """The home on each node; `{node}` becomes the node's name, `{id}` the end of its id."""
    cpus_per_rollout: float = Field(1.0, gt=0)
    """CPUs per seat."""
    spare_cpus: float = Field(0.0, ge=0)
    """CPUs of each node that workers leave to engines. If placement groups hold more, they keep it."""
    resource: str = ""
    """Use only nodes that offer this custom resource."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Use only nodes whose labels match: one `SELECTOR` per key."""
    most_rollouts: int = Field(0, ge=0)
    """We ask the autoscaler for at most this many rollouts; 0: we ask for nothing."""
    idle_s: float = Field(300.0, ge=0)
    """Seconds without a rollout after which the autoscaler gets a node back."""

    def fits(self, node: Node) -> bool:
        """Whether this node should get a worker, if its CPUs allow for one."""
        labels = node.get("Labels") or {}
        return bool(
            node["Alive"]
            and node["Resources"].get("CPU", 0.0) > 0
            and (not self.resource or node["Resources"].get(self.resource, 0) > 0)
            and all(_selects(each, labels.get(key)) for key, each in self.labels.items())
        )

    def seats(self, node: Node, held_cpus: float) -> int:
        """`held_cpus`: the node's CPUs that placement groups hold."""
        cpus: float = node["Resources"].get("CPU", 0.0)
        free = cpus - max(self.spare_cpus, held_cpus)
        return max(0, math.floor(free / self.cpus_per_rollout + 1e-9))

    def no_seat(self, node: Node, held_cpus: float) -> str:
        """Why the node has no seat, with the fix."""
        cpus = node["Resources"].get("CPU", 0.0)
        return (
            f"no seat: of its {cpus:g} CPUs, placement groups (engines) hold {held_cpus:g} and "
            f"--spare-cpus keeps {self.spare_cpus:g} free; a seat needs {self.cpus_per_rollout:g}. "
            "Lower --spare-cpus or --cpus-per-rollout, or `perdure engines up --cpus-per-replica`"
        )

    def variables(self, node: Node, seats: int) -> dict[str, str]:
        """The variables of the worker on this node."""
        home = self.home.replace("{node}", node["NodeName"]).replace("{id}", node["NodeID"][-8:])
        return {**self.environment, "PERDURE_HOME": home, "PERDURE_SLOTS__AGENT": str(seats)}

    def bundles(self, nodes: int, rollouts: int, seats: int) -> list[dict[str, float]]:
        """The resources of this many rollouts, plus the CPUs that these nodes keep for engines.

        Empty while the workers have enough `seats`: their actors keep their nodes, and Ray might answer
        a request with a node that we are giving back, which would then stay. We ask for at least one
        rollout: without any worker, no rollout would reach the queue that is counted.
        """
        only = {self.resource: 0.001} if self.resource else {}
        wanted = min(max(rollouts, 1), self.most_rollouts)
        if wanted <= seats:
            return []
        spare = [{"CPU": self.spare_cpus, **only}] * nodes if self.spare_cpus else []
        return [{"CPU": self.cpus_per_rollout, **only}] * wanted + spare


def _selects(selector: str, label: str | None) -> bool:
    """Matches as Ray does: a node without the label passes every `!`."""
    terms = selector.removeprefix("!")
    values = terms[3:-1].split(",") if terms.startswith("in(") else [terms]
    return (label in [value.strip() for value in values]) != selector.startswith("!")
