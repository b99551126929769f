"""The files for Ray clusters agree with each other, with Ray's schema, and with what AWS says."""

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkout_paths import ROOT

FOLDER = ROOT / "infra/ray"
CLUSTER: dict[str, Any] = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text()))


def test_rays_schema_accepts_the_cluster() -> None:
    """`ray up` refuses a config with a field that it does not know."""
    jsonschema = pytest.importorskip("jsonschema")
    try:
        ray = distribution("ray")
    except PackageNotFoundError:
        pytest.skip("Ray is not installed")
    schema = Path(str(ray.locate_file("ray/autoscaler/ray-schema.json")))

    jsonschema.validate(CLUSTER, json.loads(schema.read_text()))


def test_spot_nodes_are_spot_and_the_head_is_not() -> None:
    """Only engines may be preempted: the head holds the manager and the tables."""
    types = CLUSTER["available_node_types"]
    spot = {
        name
        for name, one in types.items()
        if one["node_config"].get("InstanceMarketOptions", {}).get("MarketType") == "spot"
    }

    assert spot == {"gpu_spot"}
    assert CLUSTER["head_node_type"] not in spot


def test_the_policy_selects_the_engines() -> None:
    """The network policy names the label that every engine pod of the cluster carries."""
    cluster, policy = MANIFESTS
    selected = policy["spec"]["podSelector"]["matchLabels"]

    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["template"]["metadata"]["labels"] == selected


def test_files_that_are_named_exist() -> None:
    """What the image copies and what a node starts is in this repository."""
    dockerfile = (FOLDER / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile, re.MULTILINE)

    assert all((ROOT / name).exists() for line in copied for name in line.split())
    started = re.findall(r"/app/(infra/\S+)", " ".join(CLUSTER["worker_start_ray_commands"]))
    assert started
    assert all(os.access(ROOT / name, os.X_OK) for name in started)


class Metadata(BaseHTTPRequestHandler):
    """AWS's metadata service of a node with a notice; asked without a token it refuses."""

    def do_PUT(self) -> None:
        self._say(200, b"token")

    def do_GET(self) -> None:
        allowed = self.headers.get("X-aws-ec2-metadata-token") == "token"
        known = self.path == "/latest/meta-data/spot/instance-action"
        self._say(200 if allowed and known else 401, b'{"action": "terminate"}')

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_spot_notice_becomes_a_drain(tmp_path: Path, metadata: str) -> None:
    """The node's own id is drained, with less time than AWS gives."""
    for name, script in (("ray", 'echo "$@"'), ("python3", "echo 0123abcd")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    said = subprocess.run(
        [FOLDER / "spot_notice", "10.0.0.1:6379"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "METADATA": metadata},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert said.startswith("drain-node --address 10.0.0.1:6379 --node-id 0123abcd --reason ")
    assert "--deadline-remaining-seconds 110" in said
