"""`python -m benchmarks.hosts`: rollouts a minute of 1, 2 and 4 played hosts, each capped by CPU quota.

Temporal, the S3 server, the gateway and the engine run outside the caps; the table shows how busy each of
them was. Nobody tells a host where the gateway is. Needs root.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temporalio.client import Client

from benchmarks import toy
from benchmarks.measuring import own_seconds
from benchmarks.options import add_output
from benchmarks.perdure_stack import DATASET, Home
from benchmarks.scratch import scratch_folder
from perdure.client.api import Perdure
from perdure.settings.tree import Settings
from perdure.stack import ports, temporal_setup
from perdure.stack.plan import Addresses, Plan
from perdure.types import RolloutRequest
from tests.hosts.played import GROUPS, Host, Network, network, why_not
from tests.paths import ROOT

AGENT = "benchmarks.overhead.bash_agent:BashAgent"
TURNS = 4
SHARES = 1 << 15
"""Weight of each host and of the parts outside, so that other work of this machine does not decide."""
NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight")
WARM_CORES = 1.9
"""Cap while a host starts: less than a sandbox may use, so that none sets a quota above `--cores`."""
BOOT_S = 600.0
ENV = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass
class Sample:
    """One number of hosts."""

    hosts: int
    rollouts: int
    right: int
    seconds: float
    host_cores: list[float]
    """Of each host: CPU seconds a second."""
    outside_cores: dict[str, float]
    each: list[int] = field(default_factory=list)
    """Rollouts that each host ran."""

    @property
    def rate(self) -> float:
        return self.rollouts / self.seconds * 60


@dataclass
class Outside:
    """The parts that all hosts share."""

    net: Network
    folder: Path
    store: str
    s3_url: str
    engine_url: str
    temporal: str
    processes: dict[str, "subprocess.Popen[bytes]"]

    def environment(self, home: Path) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": "/root",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PYTHONUNBUFFERED": "1",
            "PERDURE_CONFIG": os.devnull,
            "PERDURE_HOME": str(home),
            "PERDURE_STORE": self.store,
            "PERDURE_S3_ENDPOINT_URL": self.s3_url,
            "PERDURE_SECRET": "the one secret of all hosts",
            "TEMPORAL_ADDRESS": self.temporal,
            **ENV,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if missing := why_not():
        print(missing, file=sys.stderr)
        return 1
    os.environ.update(ENV)
    with (
        scratch_folder("perdure-hosts-", keep=options.keep) as folder,
        network(folder / "net") as net,
        _outside(net, folder, options) as outside,
    ):
        samples = asyncio.run(_measure(outside, options))
    if options.json:
        document = [vars(one) | {"per_minute": one.rate} for one in samples]
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(_table(samples, options))
    return 0 if all(one.right == one.rollouts for one in samples) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts")
    parser.add_argument("--hosts", type=_numbers, default=(1, 2, 4), metavar="1,2,4")
    parser.add_argument("--cores", type=float, default=0.2, help="cap of each host")
    parser.add_argument("--rollouts", type=int, default=20, help="for each host")
    parser.add_argument("--seats", type=int, default=4, help="of each host")
    add_output(parser)
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in text.split(",")))


# --- the parts outside ---------------------------------------------------------------------------


@contextlib.contextmanager
def _outside(net: Network, folder: Path, options: argparse.Namespace) -> Iterator[Outside]:
    """Temporal, S3, the engine and a gateway, each a process in one group of its own."""
    group = GROUPS / "cpu" / f"{net.bridge}-outside"
    group.mkdir()
    (group / "cpu.shares").write_text(str(SHARES))
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, argv: Sequence[str], env: dict[str, str], **more: Any) -> None:
        joined = ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group / "cgroup.procs"), *argv]
        with (folder / f"{name}.log").open("wb") as log:
            given: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            processes[name] = subprocess.Popen(joined, env=env, cwd=ROOT, **given | more)

    try:
        python = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONUNBUFFERED": "1"}
        s3 = [sys.executable, "-m", "benchmarks.memory_s3", "--latency", "0", "--host", net.outside]
        start("s3", s3, python, stdout=subprocess.PIPE)
        script = folder / "script.json"
        script.write_text(json.dumps(toy.script(TURNS)))
        engine_port, temporal_port, ui_port, gateway_port = (ports.free_port() for _ in range(4))
        engine = [sys.executable, "-m", "perdure.testing.scripted_engine", "--host", net.outside]
        engine += ["--port", str(engine_port), "--scripts", str(script)]
        start("engine", engine, python)
        url = json.loads(processes["s3"].stdout.readline())["url"]  # type: ignore[union-attr]  # a pipe
        address = f"{net.outside}:{temporal_port}"
        addresses = Addresses(
            address, temporal_port, ui_port, gateway_port=gateway_port, engine_port=0
        )
        home = folder / "outside"
        settings = Settings(home=home, store="s3://bench/store", s3_endpoint_url=url)
        home.mkdir()
        spec = Plan(settings, ROOT, addresses).temporal()
        argv = ["0.0.0.0" if part == ports.LOOPBACK else part for part in spec.argv]
        start("temporal", argv, {**os.environ, **spec.env})
        outside = Outside(
            net,
            folder,
            settings.store_url,
            url,
            f"http://{net.outside}:{engine_port}",
            address,
            processes,
        )
        gateway = {
            "PERDURE_GATEWAY__HOST": "0.0.0.0",
            "PERDURE_GATEWAY__PORT": str(gateway_port),
            "PERDURE_ENGINE__URL": outside.engine_url,
            "PERDURE_ENGINE__KIND": "vllm",
        }
        command = [sys.executable, "-m", "perdure.gateway"]
        start("gateway", command, {**outside.environment(home), **gateway})
        yield outside
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(0.1)
        group.rmdir()


# --- the measurement -----------------------------------------------------------------------------


async def _measure(outside: Outside, options: argparse.Namespace) -> list[Sample]:
    home = Home(
        outside.folder / "outside", outside.engine_url, store=outside.store, s3=outside.s3_url
    )
    most = max(options.hosts)
    await home.add_toys(toy.make_tree(outside.folder / "tree"), options.rollouts * most)
    settings = Settings(home=home.folder, temporal={"address": outside.temporal})
    client = await temporal_setup.wait_for_temporal(outside.temporal, settings)
    await temporal_setup.register_search_attributes(client)
    hosts: list[Host] = []
    samples = []
    for count in options.hosts:
        while len(hosts) < count:
            hosts.append(await _host(outside, NAMES[len(hosts)], options))
        for host in hosts:
            host.cap(WARM_CORES)
        await _play(client, f"warm-{count}", 2 * count * options.seats)
        for host in hosts:
            host.cap(options.cores)
        samples.append(await _sample(outside, client, hosts, options))
        print(_line(samples[-1], samples[0]), file=sys.stderr, flush=True)
    return samples


async def _host(outside: Outside, name: str, options: argparse.Namespace) -> Host:
    host = outside.net.add(name)
    (GROUPS / "cpu" / host.group / "cpu.shares").write_text(str(SHARES))
    host.cap(WARM_CORES)
    env = outside.environment(host.home) | {"PERDURE_SLOTS__AGENT": str(options.seats)}
    host.start("worker", [sys.executable, "-m", "workers.all"], env)
    end = time.monotonic() + BOOT_S
    while "this host serves" not in host.log("life", 1 << 20):
        if time.monotonic() > end:
            raise RuntimeError(f"{name} does not work: {host.log('worker')}")
        await asyncio.sleep(0.2)
    return host


async def _sample(
    outside: Outside, client: Client, hosts: Sequence[Host], options: argparse.Namespace
) -> Sample:
    before = [host.cpu_seconds for host in hosts]
    parts = {name: own_seconds(one.pid) for name, one in outside.processes.items()}
    began = time.monotonic()
    right, places = await _play(client, f"run-{len(hosts)}", options.rollouts * len(hosts))
    seconds = time.monotonic() - began
    return Sample(
        hosts=len(hosts),
        rollouts=options.rollouts * len(hosts),
        right=right,
        seconds=seconds,
        host_cores=[(h.cpu_seconds - b) / seconds for h, b in zip(hosts, before, strict=True)],
        outside_cores={
            name: (own_seconds(one.pid) - parts[name]) / seconds
            for name, one in outside.processes.items()
        },
        each=[places.count(host.name) for host in hosts],
    )


async def _play(client: Client, run: str, count: int) -> tuple[int, list[str]]:
    """How many rollouts were right, and the host of each."""
    perdure = Perdure(client)
    requests = [
        RolloutRequest(run_id=run, instance=f"{DATASET}/{name}", agent=AGENT)
        for name in (toy.instance_ids(10_000)[k % count] for k in range(count))
    ]
    requests = [
        request.model_copy(update={"sample_index": k}) for k, request in enumerate(requests)
    ]
    handles = [await perdure.start_rollout(request) for request in requests]
    found = await asyncio.gather(*(handle.result() for handle in handles))
    places = await asyncio.gather(*(_place(client, request) for request in requests))
    return sum(episode.reward == 1.0 for episode in found), places


async def _place(client: Client, request: RolloutRequest) -> str:
    """The host that watched its agent."""
    history = client.get_workflow_handle(request.workflow_id).fetch_history_events()
    async for event in history:
        queue = event.activity_task_scheduled_event_attributes.task_queue.name
        if queue.startswith("agent-runs@"):
            return queue.partition("@")[2].rpartition("-")[0]
    return ""


# --- the report ----------------------------------------------------------------------------------


def _line(sample: Sample, first: Sample) -> str:
    linear = sample.rate / first.rate / (sample.hosts / first.hosts)
    hosts = " ".join(f"{cores:.2f}" for cores in sample.host_cores)
    parts = " ".join(f"{name} {cores:.2f}" for name, cores in sample.outside_cores.items())
    spread = "/".join(map(str, sample.each))
    return (
        f"| {sample.hosts} | {sample.right}/{sample.rollouts} | {sample.rate:.1f} | {linear:.2f} "
        f"| {spread} | {hosts} | {parts} |"
    )


def _table(samples: Sequence[Sample], options: argparse.Namespace) -> str:
    load = os.getloadavg()[1]
    return "\n".join(
        [
            f"{options.rollouts} rollouts a host, {options.seats} seats, cap {options.cores:g} core,"
            f" {TURNS} turns; load of the machine {load:.0f} on {os.cpu_count()} cores",
            "| hosts | right | a minute | of linear | on each | cores of each | cores outside |",
            "|---|---|---|---|---|---|---|",
            *(_line(sample, samples[0]) for sample in samples),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
