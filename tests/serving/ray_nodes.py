"""Ray nodes as operators start them: one `ray start` each, on loopback, killed as machines die."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from perdure.serving.ray_cluster import ENVIRONMENT, process_tree

LOOPBACK = "127.0.0.1"
PATIENCE_S = 120.0
STARTS = 4
RAY = (sys.executable, "-m", "ray.scripts.scripts")
QUICK = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_agent_register_timeout_ms": "120000",
}
"""A lost node is noticed after ten seconds, and a busy one does not count as lost."""
AUTOSCALER = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",  # as `ray up` and KubeRay set it
    "RAY_CLOUD_INSTANCE_ID": "f" * 51 + "00000",  # what its fake cloud calls the head
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
SPOT, RESERVED = "market=spot", "market=reserved"
"""Labels of nodes."""
LISTS = (
    *("cluster_synced_files", "initialization_commands", "setup_commands"),
    *("head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
)
"""What Ray's autoscaler wants to find in its settings."""


class RayNodes:
    """A head that may die and come back at the same address, and its nodes."""

    def __init__(
        self, folder: Path, autoscaling: Mapping[str, float] | None = None, /, **head: str
    ) -> None:
        """`head`: further variables of the head, such as where it keeps its tables. `autoscaling`: what
        each node offers that Ray's own autoscaler starts here, up to two of them, spot or reserved."""
        self._folder, self._head_env, self._autoscaling = folder, head, autoscaling
        self._processes: list[subprocess.Popen[bytes]] = []
        self._temp = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets want short paths
        self.address = f"{LOOPBACK}:{_port_below_the_ephemeral()}"
        self.head = self.start_head()

    def start_head(self) -> "subprocess.Popen[bytes]":
        # Ray takes the nodes around a lost head, on the same host here, for a head that runs.
        (self._temp / "ray_current_cluster").unlink(missing_ok=True)
        port = self.address.rsplit(":", 1)[1]
        words = ["--head", "--port", port, "--num-cpus", "0", "--num-gpus", "0"]
        words += ["--temp-dir", str(self._temp), "--include-dashboard", "false"]
        env = self._head_env
        if self._autoscaling is not None:
            words += ["--autoscaling-config", str(self._autoscaling_config(self._autoscaling))]
            env = {**env, **AUTOSCALER}
        self.head = self._start("head", *words, **env)
        return self.head

    def _autoscaling_config(self, offered: Mapping[str, float]) -> Path:
        path = self._folder / "autoscaling.json"
        kinds: dict[str, dict[str, Any]] = {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0}
        }
        for label in (RESERVED, SPOT):
            key, value = label.split("=")
            kinds[value] = {"resources": offered, "labels": {key: value}, "node_config": {}}
            kinds[value] |= {"min_workers": 0, "max_workers": 2}
        config = {
            "cluster_name": "fake",
            "max_workers": 2,
            "idle_timeout_minutes": 0.05,
            **{name: {} for name in ("docker", "auth", "file_mounts")},
            **{name: [] for name in LISTS},
            "provider": {
                "type": "external",  # under its own name, a file that the wheel lacks is read
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": self.address,
                "disable_node_updaters": True,
                "use_node_id_as_ip": True,
                "launch_multiple": True,
            },
            "available_node_types": kinds,
            "head_node_type": "ray.head.default",
        }
        path.write_text(json.dumps(config))
        return path

    def add(self, *words: str, **variables: str) -> "subprocess.Popen[bytes]":
        """A node with one logical GPU. `words`: more of `ray start`, such as its name."""
        about = ["--address", self.address, "--num-cpus", "1", "--num-gpus", "1"]
        return self._start("node", *about, *words, **variables)

    def _start(self, name: str, *words: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Ray allows its own start half a minute, too little on a busy machine; then start it again."""
        for _ in range(STARTS):
            process, log = self._spawn(name, *words, **variables)
            if _has_started(process, log):
                return process
            self.kill(process)
        pytest.fail(f"Ray did not start: {log.read_text()[-2000:]}")

    def _spawn(
        self, name: str, *words: str, **variables: str
    ) -> "tuple[subprocess.Popen[bytes], Path]":
        path = self._folder / f"{name}-{len(self._processes)}.log"
        common = ("--node-ip-address", LOOPBACK, "--object-store-memory", str(80 << 20))
        with path.open("wb") as log:
            process = subprocess.Popen(
                [*RAY, "start", "--block", "--disable-usage-stats", *common, *words],
                env={**os.environ, **ENVIRONMENT, **QUICK, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process, path

    def kill(self, node: "subprocess.Popen[bytes]") -> None:
        """All its processes at once, as with a machine that loses power."""
        self.signal_all(node, signal.SIGKILL)

    def signal_all(self, node: "subprocess.Popen[bytes]", number: int) -> None:
        """Returns when the node has ended."""
        for pid in process_tree(node.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        node.wait()

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                self.kill(process)
        shutil.rmtree(self._temp, ignore_errors=True)


def _has_started(process: "subprocess.Popen[bytes]", log: Path) -> bool:
    end = time.monotonic() + PATIENCE_S
    while b"Ray runtime started" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _port_below_the_ephemeral() -> int:
    """A port that no outgoing connection takes while the head is down."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
