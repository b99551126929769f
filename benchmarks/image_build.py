"""Measures an image build: seconds and bytes, cold and cached, next to the builder's own command line.

    python -m benchmarks.image_build [--builders podman,docker] [--rounds N] [--context-mb N] [--json]

A build copies a context of random bytes into a small base image and runs one command. Cold: new content.
Cached: the same content again. Each round alternates between Perdure and the plain tool, with the same
Dockerfile. `x plain`: our seconds for each of the tool's. The bytes are those of the context and of the
built image.
"""

import argparse
import asyncio
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scratch_folder import scratch_folder
from perdure.instances import build_contexts
from perdure.instances.environment_builder import Environments
from perdure.sandboxes.base import Network
from perdure.sandboxes.image_builds import ImageBuilder
from perdure.sandboxes.providers.podman import usable_runtime
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers
from perdure.storage.local_store import LocalStore
from perdure.types import Build, Environment, Instance, Source, SourceKind
from tests import small_image

BASE = "localhost/perdure-bench/base:1"
PLAIN = "localhost/perdure-bench/plain"
HEAD = "builder | build | s | plain s | x plain | context MB | image MB"


async def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    with scratch_folder("pb-", keep=False) as folder:
        root = folder / "root"
        small_image.write_programs(root, small_image.PROGRAMS)
        archive = small_image.write_archive(root, folder / "base.tar")
        for name in options.builders.split(","):
            settings = Settings(home=folder / name, store=str(folder / name / "store"))
            builder = home_providers.provider(settings, name)
            if not isinstance(builder, ImageBuilder) or (missing := builder.check()):
                print(f"{name}: not measured: {missing}", file=sys.stderr)
                continue
            _tool(name, "import", str(archive), BASE)
            try:
                bench = Bench(settings, builder, folder / f"{name}-context", options.context_mb)
                for number in range(options.rounds):
                    await bench.round(number)
                rows += bench.rows()
            finally:
                _tool(name, "rmi", "--force", BASE)
    if options.json:
        print(json.dumps({"load": os.getloadavg(), "rows": rows}))
        return
    print(HEAD)
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))
    print(f"load {os.getloadavg()[0]:.0f}")


class Bench:
    def __init__(
        self, settings: Settings, builder: ImageBuilder, folder: Path, context_mb: int
    ) -> None:
        self._builder, self._folder, self._mb = builder, folder, context_mb
        self._store = LocalStore(settings.home / "store")
        self._root = settings.home / "environments"
        self._times: dict[str, tuple[list[float], list[float]]] = {
            "cold": ([], []),
            "cached": ([], []),
        }
        self._bytes = 0

    async def round(self, number: int) -> None:
        self._write_context()
        row = Instance(
            instance_id=str(number),
            dataset="made",
            problem_statement="x",
            source=Source(kind=SourceKind.IMAGE),
            environment=Environment(build=Build(path=str(self._folder))),
        )
        instance = await build_contexts.store_contexts(self._store, row)
        image, tag = instance.environment.image or "", f"{PLAIN}:{number}"
        for kind, (ours, plain) in self._times.items():
            steps = [
                (ours, functools.partial(self._ours, instance)),
                (plain, functools.partial(self._plain, tag)),
            ]
            for times, step in steps if (number + (kind == "cached")) % 2 else steps[::-1]:
                began = time.perf_counter()
                await step()
                times.append(time.perf_counter() - began)
        self._bytes = await self._builder.image_size(image) or 0
        await self._builder.remove_image(image)
        _tool(self._builder.name, "rmi", "--force", tag)

    def _write_context(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / "data").write_bytes(os.urandom(self._mb << 20))
        text = f"FROM {BASE}\nCOPY data /data\nRUN sha256sum /data > /sum\n"
        (self._folder / "Dockerfile").write_text(text)

    async def _ours(self, instance: Instance) -> None:
        environments = Environments(self._root, self._store, self._builder)
        await environments.prepare(instance, network=Network.NONE)

    async def _plain(self, tag: str) -> None:
        command = ("build", "--network", "none", "--tag", tag, str(self._folder))
        await asyncio.to_thread(_tool, self._builder.name, *command)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "builder": self._builder.name,
                "build": kind,
                "s": round(statistics.median(ours), 3),
                "plain_s": round(statistics.median(plain), 3),
                "x_plain": round(statistics.median(ours) / statistics.median(plain), 2),
                "context_mb": self._mb,
                "image_mb": round(self._bytes / 2**20, 1),
            }
            for kind, (ours, plain) in self._times.items()
        ]


_runtime = functools.cache(usable_runtime)


def _tool(name: str, *arguments: str) -> None:
    """A podman gets the runtime and cgroup manager that work on this host, as ours does."""
    general: tuple[str, ...] = ("--cgroup-manager", "cgroupfs") if name == "podman" else ()
    if name == "podman" and (runtime := _runtime()):
        general += ("--runtime", runtime)
    done = subprocess.run([name, *general, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stderr[-2000:]}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--builders", default="podman,docker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context-mb", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
