"""The Kubernetes double with other clients: unmodified kubectl, restarts, the API's own rules."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests import service_harness
from tests.doubles.kubernetes_server import serving
from tests.service_harness import KUBERNETES

NAMESPACE = "perdure-sandboxes"
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "one", "labels": {"app": "x"}},
    "spec": {
        "activeDeadlineSeconds": 600,
        "containers": [{"name": "c", "image": "i", "command": ["sleep", "600"]}],
    },
}


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    async with service_harness.serving(KUBERNETES, tmp_path / "server", monkeypatch) as (server, _):
        yield server


async def kubectl(server: Any, *words: str, given: bytes = b"") -> tuple[int, bytes, bytes]:
    """The exit code and both outputs of the real program."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is missing; apt-get install kubernetes-client")
    process = await asyncio.create_subprocess_exec(
        *(program, "--kubeconfig", str(server.kubeconfig), "--namespace", NAMESPACE, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"HOME": str(server.state), "PATH": "/usr/bin:/bin"},
    )
    out, err = await process.communicate(given)
    assert process.returncode is not None
    return process.returncode, out, err


async def made(server: Any) -> None:
    """A pod whose command runs, created by a plain HTTP client."""
    import aiohttp

    (cluster,) = json.loads(server.kubeconfig.read_text())["clusters"]
    pods = f"{cluster['cluster']['server']}/api/v1/namespaces/{NAMESPACE}/pods"
    async with aiohttp.ClientSession() as session:
        async with session.post(pods, json=POD) as answer:
            assert answer.status == 201
        while True:
            async with session.get(f"{pods}/one") as answer:
                if (await answer.json())["status"]["phase"] == "Running":
                    return
            await asyncio.sleep(0.02)


async def test_kubectl_lists_and_describes_what_runs(server: Any) -> None:
    """The unmodified program finds a pod by its label, and reads its fields."""
    await made(server)
    code, out, err = await kubectl(server, "get", "pods", "-l", "app=x", "-o", "json")

    assert code == 0, err
    assert [pod["status"]["phase"] for pod in json.loads(out)["items"]] == ["Running"]


async def test_kubectl_deletes_and_waits_for_the_end(server: Any) -> None:
    """A delete that waits returns, and nothing is left."""
    await made(server)
    server.settings["delete_s"] = 0.3
    code, _, err = await kubectl(server, "delete", "pod", "one")

    assert (code, server.sandboxes.all()) == (0, []), err


async def test_kubectl_runs_a_command_inside(server: Any) -> None:
    """Standard input and its end, both outputs and the exit code travel over the v5 socket."""
    await made(server)
    line = "tr a-z A-Z; echo why >&2; exit 3"
    code, out, err = await kubectl(
        server, "exec", "-i", "one", "--", "sh", "-c", line, given=b"said"
    )
    if b"Upgrade request required" in err or b"unable to upgrade" in err:
        pytest.skip("this kubectl speaks SPDY only")

    assert (code, out, err.splitlines()[0]) == (3, b"SAID", b"why")


async def test_a_pod_outlives_its_server(server: Any, tmp_path: Path) -> None:
    """Another server on the same folder knows it and runs commands in it."""
    await made(server)
    async with serving(tmp_path / "server") as (again, _):
        (record,) = again.sandboxes.all()
        box = await again.guests.found(record["id"])
        assert box is not None

        assert (await box.exec("echo up")).stdout == b"up\n"


async def test_the_active_deadline_is_only_lowered(server: Any) -> None:
    """As in the real API, an update that gives a pod more time is refused and names the field."""
    await made(server)
    ends = []
    for seconds in (700, 500):
        change = json.dumps({"spec": {"activeDeadlineSeconds": seconds}})
        words = ("patch", "pod", "one", "--type", "merge", "-p", change)
        ends.append(await kubectl(server, *words))

    assert [code for code, _, _ in ends] == [1, 0], ends
    assert b"activeDeadlineSeconds" in ends[0][2]
