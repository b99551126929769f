"""Measures what an idle sandbox holds on its host: processes, memory, descriptors.

    python -m benchmarks.sandbox.resource_usage [--sandboxes N] [--json]

It uses bubblewrap sandboxes with access to the gateway, each after one command. Memory is the proportional
share (PSS) of the keeper and its descendants, so pages shared with each other and the worker count once.
"""

import argparse
import asyncio
import json
import os
import socket
from pathlib import Path

from benchmarks.scratch_folder import scratch_folder
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.host.host_sandbox import HostSandbox
from perdure.sandboxes.host.procfs import below
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings


async def main() -> None:
    options = _options()
    with scratch_folder("pd-", keep=False) as folder:
        row = await _measure(folder, options.sandboxes)
    if options.json:
        print(json.dumps(row))
    else:
        print(", ".join(f"{name} {value}" for name, value in row.items()), "(a sandbox)")


async def _measure(folder: Path, count: int) -> dict[str, float]:
    provider = BubblewrapProvider(Settings(home=folder / "home"))
    gateway = folder / "gw"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(gateway))
        server.listen()
        spec = SandboxSpec("/testbed", gateway=gateway, labels={"run": "bench"})
        boxes = []
        try:
            for number in range(count):
                box = await provider.create(spec, f"bench-{number}")
                boxes.append(box)
                await box.exec(["true"], check=True)
            pids = [pid for box in boxes for pid in _processes(box)]
            return {
                "sandboxes": count,
                "processes": round(len(pids) / count, 2),
                "PSS in MB": round(sum(map(_pss_kb, pids)) / 1024 / count, 2),
                "descriptors": round(sum(map(_descriptors, pids)) / count, 1),
            }
        finally:
            for box in boxes:
                await box.kill()


def _processes(box: object) -> list[int]:
    assert isinstance(box, HostSandbox)
    assert box.box.keeper is not None
    return [box.box.keeper.pid, *below(box.box.keeper.pid)]


def _pss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox.resource_usage")
    parser.add_argument("--sandboxes", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
