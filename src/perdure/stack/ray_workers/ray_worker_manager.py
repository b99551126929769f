"""Keeps one worker on every node that fits the plan, and asks the autoscaler for more nodes.

The manager is one detached actor per secret, on the head node. If it dies, Ray restarts it with its
plan, and it finds the workers by their names.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import ray
import structlog
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.client.bottlenecks import backlogs
from perdure.client.temporal_client import connect
from perdure.errors import ConfigurationError, PerdureError
from perdure.serving.engine_commands import NAMESPACE
from perdure.serving.ray_placement import draining_nodes
from perdure.settings import process_environment
from perdure.settings.settings_loader import load_settings
from perdure.stack.node_worker import NodeReport, NodeWorker, WorkersReport
from perdure.stack.ray_workers.node_plan import Node, WorkersPlan

POLL_S = 1.0
ANSWER_S = 5.0
"""Timeout for an answer of a worker's actor, in seconds."""
STOP_S = 30.0
"""Seconds that the manager may take to stop, on top of its slowest worker's time."""
END_S = 90.0
"""Seconds that a worker has to end: its grace period, then its agents' sandboxes. After that the
manager kills its actor."""
AGAIN_S = 10.0
"""Seconds before the manager places an actor again that Ray has given up."""
COUNT_S = 10.0
"""Seconds between two counts of waiting activities."""

log = structlog.get_logger("perdure.ray_workers")


class NodeActor:
    """The actor on a node; it runs that node's worker."""

    async def __init__(self, node: str, variables: dict[str, str]) -> None:  # type: ignore[misc]  # Ray awaits it
        process_environment.force(variables)
        self._worker = NodeWorker(node, load_settings())

    async def report(self) -> str:
        return self._worker.report().model_dump_json()

    async def give_back(self) -> bool:
        return await self._worker.give_back()

    async def leave(self) -> None:
        await self._worker.leave()

    async def stop(self) -> None:
        await self._worker.stop()


@dataclass(eq=False)
class Placed:
    """The manager's record of one node's worker."""

    node: Node
    seats: int
    actor: Any
    report: NodeReport | None = None
    problem: str = "its worker is starting"
    busy_at: float = field(default_factory=monotonic)
    task: "asyncio.Task[None] | None" = None
    answered: bool = False
    """The actor has answered once, so Ray has placed it."""
    left: bool = False


class WorkersManager:
    """The manager's actor. Its methods answer at once; its own loop does the work."""

    async def __init__(self, key: str, plan: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._prefix, self._plan = f"{_name(key)}-", WorkersPlan.model_validate_json(plan)
        self._placed: dict[str, Placed] = {}
        self._given_back: set[str] = set()
        self._full: dict[str, str] = {}
        self._waiting, self._counted_at = 0, float("-inf")
        self._client: Client | None = None
        process_environment.force(self._plan.environment)
        self._loop = asyncio.create_task(self._run())

    async def report(self) -> str:
        placed = list(self._placed.values())
        return WorkersReport(
            nodes=tuple(one.report for one in placed if one.report is not None),
            absent=tuple(
                f"{one.node['NodeName']}: {one.problem}" for one in placed if one.report is None
            ),
            full=tuple(self._full.values()),
            waiting=self._waiting,
        ).model_dump_json()

    async def pid(self) -> int:
        return os.getpid()

    async def stop(self, leave: bool) -> None:
        """End all workers, and with `leave` their agents too."""
        self._loop.cancel()
        await asyncio.gather(*(self._end(one, leave) for one in self._placed.values()))
        if self._plan.most_rollouts:
            await asyncio.to_thread(request_resources, bundles=[])

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
            except (PerdureError, ray.exceptions.RayError, RPCError, OSError) as error:
                log.warning("cannot manage the workers now", reason=str(error))
            except Exception:
                log.exception("one round of the workers' manager failed; it continues")
            await asyncio.sleep(POLL_S)

    async def _round(self) -> None:
        nodes = {one["NodeID"]: one for one in await asyncio.to_thread(ray.nodes)}
        nodes = {key: node for key, node in nodes.items() if self._plan.fits(node)}
        draining = await asyncio.to_thread(draining_nodes)
        held = await asyncio.to_thread(_held_cpus)
        for key in self._placed.keys() - nodes.keys():
            del self._placed[key]
        self._given_back &= nodes.keys()
        full: dict[str, str] = {}
        for key, node in nodes.items():
            placed = self._placed.get(key)
            if placed is None:
                seats = self._plan.seats(node, held[key])
                if not seats:
                    full[key] = f"{node['NodeName']}: {self._plan.no_seat(node, held[key])}"
                elif key not in draining and key not in self._given_back:
                    self._placed[key] = await asyncio.to_thread(self._place, key, node, seats)
            elif not placed.left and (placed.task is None or placed.task.done()):
                if key in draining:
                    log.info("a node is leaving: its rollouts move", node=node["NodeName"])
                    placed.task = asyncio.create_task(self._end(placed, leave=True))
                else:
                    placed.task = asyncio.create_task(self._ask(key, placed))
        self._full = full
        if self._plan.most_rollouts and monotonic() - self._counted_at > COUNT_S:
            self._counted_at = monotonic()
            await self._scale(nodes)

    def _place(self, key: str, node: Node, seats: int) -> Placed:
        """Place the node's actor, or find the one that an earlier manager has placed."""
        actor = (
            ray.remote(NodeActor)
            .options(
                name=f"{self._prefix}{key}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=seats * self._plan.cpus_per_rollout,
                max_concurrency=16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False),
            )
            .remote(node["NodeName"], self._plan.variables(node, seats))
        )
        return Placed(node, seats, actor)

    async def _ask(self, key: str, placed: Placed) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                text = await placed.actor.report.remote()
        except TimeoutError:
            placed.report, placed.problem = None, self._unanswered(placed)
        except ray.exceptions.RayError as error:
            placed.report, placed.problem = None, str(error).strip().splitlines()[-1][:300]
            if isinstance(error, ray.exceptions.ActorDiedError):
                await asyncio.sleep(AGAIN_S)
                self._placed.pop(key, None)
        else:
            placed.report, placed.answered = NodeReport.model_validate_json(text), True
            if placed.report.taken:
                placed.busy_at = monotonic()

    def _unanswered(self, placed: Placed) -> str:
        if placed.answered:
            return "its actor does not answer"
        wanted = placed.seats * self._plan.cpus_per_rollout
        return (
            f"waits for {wanted:g} free CPUs; if other Ray tasks hold them, run "
            "`perdure workers up --ray` again with more --spare-cpus"
        )

    async def _end(self, placed: Placed, leave: bool) -> None:
        """End a worker. If Ray has never placed its actor, the actor answers no call and has no worker,
        so it is only killed."""
        placed.left, placed.report, placed.problem = True, None, "it is leaving"
        try:
            if not placed.answered:
                async with asyncio.timeout(ANSWER_S):
                    await placed.actor.report.remote()
            async with asyncio.timeout(END_S):
                await (placed.actor.leave if leave else placed.actor.stop).remote()
        except TimeoutError:
            log.warning("a worker did not end in time", node=placed.node["NodeName"])
        except ray.exceptions.RayError:  # it is gone
            return
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(placed.actor)

    async def _scale(self, nodes: Mapping[str, Node]) -> None:
        self._client = self._client or await connect(settings=load_settings())
        counted = await backlogs(self._client)
        self._waiting = sum(one.count for one in counted if one.stage in ("boot", "grade"))
        taken = sum(one.report.taken for one in self._placed.values() if one.report is not None)
        if self._waiting:
            self._given_back.clear()
            for one in self._placed.values():
                one.busy_at = monotonic()
        else:
            await self._give_back()
        seats = sum(one.seats for one in self._placed.values() if not one.left)
        bundles = self._plan.bundles(len(nodes), taken + self._waiting, seats)
        only = [dict(self._plan.labels)] * len(bundles) if self._plan.labels else None
        await asyncio.to_thread(request_resources, bundles=bundles, bundle_label_selectors=only)

    async def _give_back(self) -> None:
        """Free the nodes that have been idle for `idle_s`, except for one: without any worker, no
        rollout would reach the queue that is counted.

        Ray does not remove a node on which an actor has been placed again. We do not ask an actor that
        never answered: if others hold its CPUs, Ray has not started it, and the call would block.
        """
        idle = [
            key
            for key, one in self._placed.items()
            if one.report is not None and monotonic() - one.busy_at > self._plan.idle_s
        ]
        for key in idle[: len(self._placed) - 1]:
            placed = self._placed[key]
            if await placed.actor.give_back.remote():
                ray.kill(placed.actor)
                del self._placed[key]
                self._given_back.add(key)
            else:
                placed.busy_at = monotonic()


def start(key: str, plan: WorkersPlan) -> Any:
    """Start the manager of this plan. The workers of an earlier plan end first; their agents continue."""
    stop(key, leave=False)
    return (
        ray.remote(WorkersManager)
        .options(
            name=_name(key),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,  # calls wait while the manager starts again
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            max_concurrency=32,
        )
        .remote(key, plan.model_dump_json())
    )


def stop(key: str, *, leave: bool) -> bool:
    """False: there was no manager. Raises: ConfigurationError if it does not answer."""
    if (actor := find(key)) is None:
        return False
    try:
        ray.get(actor.stop.remote(leave), timeout=ANSWER_S + END_S + STOP_S)
    except ray.exceptions.GetTimeoutError:
        raise ConfigurationError(
            "the manager of the workers on Ray does not answer; check the head with `ray status`. Its "
            "workers may still run, so repeat the command"
        ) from None
    finally:
        ray.kill(actor)
    return True


def _held_cpus() -> Counter[str]:
    """CPUs of each node that placement groups hold; engines have one each."""
    held: Counter[str] = Counter()
    for group in ray.util.placement_group_table().values():
        if group["state"] != "REMOVED":
            for index, node in group["bundles_to_node_id"].items():
                held[node] += group["bundles"][index].get("CPU", 0.0)
    return held


def find(key: str) -> Any | None:
    try:
        return ray.get_actor(_name(key), namespace=NAMESPACE)
    except ValueError:
        return None


def _name(key: str) -> str:
    return f"workers-{key}"
