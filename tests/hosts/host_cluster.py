"""A cluster of played hosts: one Temporal, one S3 and one engine outside of them, gateways on some.

No process of a host is told where a gateway or another worker is.
"""

import hashlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from perdure.client import temporal_names
from perdure.rollouts.activity_messages import HostState
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_ports, temporal_setup
from perdure.stack.stack_plan import Addresses, Plan
from perdure.stack.stack_ports import free_port
from perdure.types import RolloutRequest
from tests.checkout_paths import ROOT
from tests.hosts.network_hosts import Host, Network, network
from tests.s3_server import S3Server, with_bucket
from tests.stack.gated_engine import HeldEngine
from tests.stack.made_instances import add_instances
from tests.stack.running_stack import BEAT_S, Stack
from tests.stack.stack_process import answering
from tests.stack.wait_until import until

BUCKET = "hosts"
BOOT_S = 900.0
"""A host of a busy machine is up by then."""
POLLS = "polls its queues"
LEAVE = """
import asyncio
from perdure.settings.settings_loader import load_settings
from perdure.stack import home_providers, host_life
asyncio.run(home_providers.kill_all(load_settings(), print))
host_life.end(load_settings())  # if it has not left by itself
"""


@dataclass
class Cluster:
    net: Network
    stack: Stack
    """Temporal, and what rollouts are asked through; it has no gateway and no worker."""
    s3: S3Server
    hosts: dict[str, Host] = field(default_factory=dict)

    def environment(self, seats: int) -> dict[str, str]:
        """What each host is told: Temporal, the store, the secret; of gateways and workers, nothing."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": "/root",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PYTHONUNBUFFERED": "1",
            "PERDURE_CONFIG": os.devnull,
            "PERDURE_HOME": str(self.net.folder / "home"),
            "PERDURE_STORE": f"s3://{BUCKET}",
            "PERDURE_S3_ENDPOINT_URL": self.s3.url,
            "PERDURE_SECRET": "the one secret of all hosts",
            "PERDURE_SLOTS__AGENT": str(seats),
            "TEMPORAL_ADDRESS": self.stack.plan.addresses.temporal_address or "",
            **{name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        }

    async def add(self, name: str, *, seats: int, roles: str = "", gateway: bool = False) -> Host:
        """Boot a host with its worker; returns when the worker polls."""
        host = self.hosts[name] = self.net.add(name)
        env = self.environment(seats)
        if gateway:
            engine = {
                "PERDURE_ENGINE__URL": self.stack.engine.url,
                "PERDURE_ENGINE__KIND": "vllm",
                "PERDURE_GATEWAY__HOST": "0.0.0.0",
            }
            host.start("gateway", [sys.executable, "-m", "perdure.gateway"], {**env, **engine})
            await until(
                lambda: "gateway listens" in host.log("gateway"), f"{name}'s gateway", BOOT_S
            )
        await self.start_worker(host, seats=seats, roles=roles)
        return host

    async def start_worker(self, host: Host, *, seats: int, roles: str = "") -> None:
        """Returns when it polls."""
        polling = host.log("worker", 1 << 20).count(POLLS)
        env = self.environment(seats)
        host.start("worker", [sys.executable, "-m", "workers", *roles.split()], env)
        polls = f"{host.name}'s worker polls"
        await until(lambda: host.log("worker", 1 << 20).count(POLLS) > polling, polls, BOOT_S)

    async def leave(self, host: Host) -> None:
        """End its sandboxes and its signs of life, as `perdure down` does."""
        host.start("leave", [sys.executable, "-c", LEAVE], self.environment(1))
        left = host.processes.pop("leave")
        await until(lambda: left.poll() is not None, f"{host.name} leaves", BOOT_S)
        assert left.returncode == 0, host.log("leave")

    def host_name(self, host: Host) -> str:
        """As `host_of` says it there."""
        own = (host.disk / "run" / "host").read_text().split()[0]
        return f"{host.name}-{hashlib.sha256(f'{host.home} {own}'.encode()).hexdigest()[:6]}"

    async def state(self, host: Host) -> HostState:
        handle = self.stack.client.get_workflow_handle(temporal_names.host_id(self.host_name(host)))
        state: HostState = await handle.query("state", result_type=HostState)
        return state

    async def places(self, request: RolloutRequest, activity: str) -> list[str]:
        """The hosts that have begun this activity of a rollout, in order."""
        history = await self.stack.handle(request).fetch_history()
        kinds = {
            event.event_id: event.activity_task_scheduled_event_attributes.activity_type.name
            for event in history.events
        }
        started = [event.activity_task_started_event_attributes for event in history.events]
        return [
            one.identity.rpartition("@")[2]
            for one in started
            if one.scheduled_event_id and kinds[one.scheduled_event_id] == activity
        ]

    async def where(self, request: RolloutRequest) -> str:
        """The host whose disk has the rollout's sandbox, or empty."""
        for name, host in self.hosts.items():
            root = host.disk / "sandboxes"
            digest = self.stack.identity(request, "agent").rpartition("-agent-")[0]
            if host.first.poll() is None and any(root.glob(f"*/{digest}-agent-*")):
                return name
        return ""

    def last_words(self) -> str:
        return "\n".join(
            f"--- {name} {part}\n{host.log(part)}"
            for name, host in self.hosts.items()
            for part in ("worker", "gateway", "life")
        )


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Cluster]:
    """Without hosts yet. Nothing of it remains afterwards."""
    async with AsyncExitStack() as parts:
        net = parts.enter_context(network(folder / "net"))
        s3 = parts.enter_context(with_bucket(BUCKET, net.outside))
        engine = HeldEngine(host=net.outside)
        await parts.enter_async_context(engine)
        temporal, ui = free_port(), free_port()
        address = f"{net.outside}:{temporal}"
        addresses = Addresses(address, temporal, ui, gateway_port=18001, engine_port=0)
        settings = Settings(home=folder / "outside", store=f"s3://{BUCKET}", s3_endpoint_url=s3.url)
        plan = Plan(settings, ROOT, addresses, engine=engine.url)
        stack = Stack(settings.home, plan, engine, client=None, beat_s=BEAT_S)  # type: ignore[arg-type]  # set below
        try:
            spec = plan.temporal()
            argv = ["0.0.0.0" if part == stack_ports.LOOPBACK else part for part in spec.argv]
            settings.home.mkdir(parents=True)
            process = stack.spawn(replace(spec, argv=tuple(argv)))
            await answering(process, temporal_setup.wait_for_temporal(address, settings))
            stack.client = await temporal_setup.wait_for_temporal(address, settings)
            await temporal_setup.register_search_attributes(stack.client)
            await add_instances(folder / "outside", stack.store)
            yield Cluster(net, stack, s3)
        finally:
            engine.let_go()
            for host in net.hosts:
                host.lose()
            await stack.stop()
