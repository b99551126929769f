"""Places replicas on Ray: one actor per replica, in its own placement group.

The manager makes the decisions. Only this module and `replica_manager` import Ray.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from perdure.engines.weights.weight_publishing import Published
from perdure.serving.engine_commands import NAMESPACE
from perdure.serving.engine_replica import Replica, ReplicaReport
from perdure.serving.replica_plan import EnginePlan
from perdure.settings.settings_tree import Settings


class ReplicaActor:
    """Runs a replica on the node that Ray chose. The server ends with this process."""

    def __init__(self, plan: str, name: str, generation: int) -> None:
        self._plan = EnginePlan.model_validate_json(plan)
        host = self._plan.listen or ray.util.get_node_ip_address()
        self._replica = Replica(self._plan, name, generation, host)
        self._started = False

    async def start(self) -> str:
        """Start the replica and return its node. Repeating this is harmless."""
        if not self._started:
            self._started = True
            await self._replica.start()
        return str(ray.get_runtime_context().get_node_id())

    async def report(self) -> str:
        return self._replica.report().model_dump_json()

    async def tail(self) -> bytes:
        return self._replica.tail()

    async def take(self, published: str, settings: str) -> str:
        return await self._replica.take(
            Published.model_validate_json(published), Settings.model_validate_json(settings)
        )

    async def pid(self) -> int:
        return os.getpid()

    async def stop(self) -> None:
        await self._replica.stop()


@dataclass
class Placed:
    """One start of a replica, from the moment its resources are requested."""

    name: str
    group: Any
    actor: Any

    async def start(self) -> str:
        return str(await self.actor.start.remote())

    async def report(self) -> ReplicaReport:
        return ReplicaReport.model_validate_json(await self.actor.report.remote())

    async def tail(self) -> bytes:
        found: bytes = await self.actor.tail.remote()
        return found

    async def take(self, published: Published, settings: Settings) -> str:
        """Load the published version; return why that failed, or an empty string."""
        told: str = await self.actor.take.remote(
            published.model_dump_json(), settings.model_dump_json()
        )
        return told

    async def stop(self) -> None:
        await self.actor.stop.remote()

    def release(self) -> None:
        """Kill the actor and free its resources."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.util.remove_placement_group(self.group)


def place(plan: EnginePlan, name: str, generation: int, target: str | None) -> Placed:
    """Request resources; Ray starts the actor once a node has them. `target`: the preferred node."""
    group = placement_group(
        [bundle(plan)],
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        _soft_target_node_id=target,
    )
    actor = (
        ray.remote(ReplicaActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",  # it outlives the manager, which finds it again by name
            max_restarts=0,  # a restart needs a new generation, which only the manager gives
            num_cpus=plan.cpus_per_replica,
            num_gpus=plan.gpus_per_replica,
            max_concurrency=16,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        )
        .remote(plan.model_dump_json(), name, generation)
    )
    return Placed(name, group, actor)


def find(name: str) -> Placed | None:
    """A replica's start that an earlier manager placed; None if it is gone."""
    try:
        return Placed(
            name, ray.util.get_placement_group(name), ray.get_actor(name, namespace=NAMESPACE)
        )
    except ValueError:
        return None


def names() -> list[str]:
    """The names of all our actors, running or waiting for resources."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE]


def bundle(plan: EnginePlan) -> dict[str, float]:
    wanted = {"CPU": plan.cpus_per_replica, "GPU": float(plan.gpus_per_replica)}
    return {name: amount for name, amount in wanted.items() if amount} or {"CPU": 0.001}


def room(plan: EnginePlan) -> str:
    """The resources of one replica as text: `8 GPU and 1 CPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in reversed(bundle(plan).items()))


def emptiest(plan: EnginePlan, taken: Iterable[str], draining: Mapping[str, int]) -> str | None:
    """The node with the fewest replicas among those that can hold one; None if there is none."""
    needed, used = bundle(plan), Counter(taken)
    fit = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
        and node["NodeID"] not in draining
        and all(node["Resources"].get(name, 0.0) >= amount for name, amount in needed.items())
    ]
    return min(fit, key=lambda node: (used[node], node), default=None)


def draining_nodes() -> dict[str, int]:
    """Nodes with a preemption notice and their deadlines in Unix milliseconds (0 = none).

    This is a private API of Ray, which Ray's own libraries poll too.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined, unused-ignore]  # compiled; Ray may be absent

    address = ray.get_runtime_context().gcs_address
    found: dict[str, int] = GcsClient(address=address).get_draining_nodes()
    return found
