"""Panels and alerts of infra read what processes of a live stack really serve."""

import asyncio
import functools
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from perdure.client import temporal_names
from perdure.types import RolloutRequest
from tests import held_ports, promql
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import running
from tests.stack.wait_until import until
from tests.workflows import dev_server

THRESHOLD = re.compile(r" (?:==|[<>]=?) [\d.]+$")
BACKLOG = "approximate_backlog_count"
Ask = Callable[[promql.Reads], Awaitable[list[Any]]]
RARE = {"temporal_request_failure_total", "perdure_stuck_tries_total"}
"""Served only when Temporal has refused a call, or a stage has failed many times."""
GPU_SHARES = (4845 / (4845 + 35690), 0.996, 0.930)
"""What the recorded samples give for each expression about GPUs."""


async def _metrics(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(url)).text


@pytest.mark.temporal
@pytest.mark.longer
async def test_every_expression_reads_what_a_live_stack_serves(tmp_path: Path) -> None:
    """Metrics and labels, after one rollout that is solved, one that cannot boot, and a refused call."""
    if missing := why_not_here():
        pytest.skip(missing)
    with held_ports.held(1) as (port,):
        async with running(tmp_path / "stack", workers=0) as stack, AsyncExitStack() as more:
            await stack.start_worker(PERDURE_METRICS__PORT=str(port))
            targets = f"127.0.0.1:{port}", urlsplit(stack.plan.gateway_url).netloc
            ask = await more.enter_async_context(_prometheus(tmp_path / "prometheus", *targets))
            await stack.episode(await stack.start("measured"))
            nowhere = RolloutRequest(run_id="nowhere", instance="toy/nowhere", agent="nop")
            await stack.start_by_hand(
                temporal_names.ROLLOUT, nowhere.workflow_id, nowhere.model_dump(mode="json")
            )
            await stack.episode(nowhere)
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.post(f"{stack.plan.gateway_url}/v1/chat/completions", json={})
            served = promql.served(
                await _metrics(f"http://127.0.0.1:{port}/metrics"),
                await _metrics(f"{stack.plan.gateway_url}/metrics"),
            )
            ours = [one for one in promql.expressions() if not _of_others(one)]
            drawn = [one for one in ours if all(served.get(metric) for metric in one.metrics)]
            if ask is not None:
                for one in drawn:
                    await until(functools.partial(ask, one), f"Prometheus draws {one.where}")

    missed = [miss for one in ours for miss in one.misses(served | dict.fromkeys(RARE))]
    assert missed == []
    assert served["perdure_attempts_total"] == {"stage", "cause"} | _everywhere(served)


@asynccontextmanager
async def _prometheus(folder: Path, *targets: str) -> AsyncIterator[Ask | None]:
    """Asks a real Prometheus that scrapes these addresses; None where the program is missing.

    It answers with the lines that it draws, none until it has scraped. An alert has no line until it is
    raised, and only has to be understood.
    """
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    folder.mkdir()
    job = {"job_name": "perdure", "static_configs": [{"targets": list(targets)}]}
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with held_ports.held(1) as (port,):
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )

        async def ask(one: promql.Reads) -> list[Any]:
            url = f"http://127.0.0.1:{port}/api/v1/query"
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                try:
                    answer = await client.get(url, params={"query": one.expression})
                except httpx.TransportError:  # it starts
                    return []
            assert answer.status_code in (200, 503), f"{one.where}: {answer.text}"
            if answer.status_code == 503:
                return []
            lines: list[Any] = answer.json()["data"]["result"]
            return lines or [None] * bool(THRESHOLD.search(one.expression))

        try:
            yield ask
        finally:
            process.kill()
            process.wait()


@pytest.mark.longer  # the server counts its queues once a minute
async def test_queue_depth_reads_what_temporal_serves() -> None:
    """A real server, and three workflows that no worker takes."""
    with held_ports.held(1) as (metrics,):
        async with dev_server.serving("--metrics-port", str(metrics)) as client:
            for number in range(3):
                await client.start_workflow("Nobodys", id=f"{number}", task_queue="nobodys-queue")

            async def waiting() -> str:
                text = await _metrics(f"http://127.0.0.1:{metrics}/metrics")
                counts = [line for line in text.splitlines() if line.startswith(BACKLOG)]
                return text if any('"nobodys_queue"' in line for line in counts) else ""

            served = promql.served(await until(waiting, "Temporal counts the queue"))
    (depth,) = [one for one in promql.expressions() if BACKLOG in one.metrics]

    assert depth.misses(served) == []


def _everywhere(served: dict[str, set[str] | None]) -> set[str]:
    """Labels that the SDK puts on all metrics of a worker."""
    return (served["perdure_tokens_total"] or set()) - {"agent"}


async def test_expressions_of_hosts_read_what_node_exporter_serves() -> None:
    """A real node_exporter of this host."""
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None:
        pytest.skip("no node_exporter here (Debian: apt-get install prometheus-node-exporter)")
    with held_ports.held(1) as (port,):
        exporter = subprocess.Popen(
            [program, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL
        )
        try:

            async def answers() -> str:
                try:
                    return await _metrics(f"http://127.0.0.1:{port}/metrics")
                except httpx.TransportError:
                    return ""

            served = promql.served(await until(answers, "node_exporter answers"))
        finally:
            exporter.kill()
            exporter.wait()
    of_hosts = [one for one in promql.expressions() if _reads(one, "node_")]

    assert of_hosts
    assert [miss for one in of_hosts for miss in one.misses(served)] == []


async def test_gpu_panels_draw_recorded_samples(tmp_path: Path) -> None:
    """The exporter's names and labels. Where there is a Prometheus, it draws one line per GPU, although
    an instance of the GPU has samples of its own."""
    text = (Path(__file__).parent / "dcgm_exporter.txt").read_text()
    of_gpus = [one for one in promql.expressions() if _reads(one, "DCGM_")]
    served = promql.served(text)
    assert [one.where for one in of_gpus] == ["GPU memory in use", "GPU compute", "GPU compute"]
    assert [miss for one in of_gpus for miss in one.misses(served)] == []
    async with _serving(text) as exporter, _prometheus(tmp_path / "prometheus", exporter) as ask:
        if ask is not None:
            for one, share in zip(of_gpus, GPU_SHARES, strict=True):
                (line,) = await until(functools.partial(ask, one), f"Prometheus draws {one.where}")
                assert line["metric"] == {"Hostname": "ub20-a100-k8s", "gpu": "0"}
                assert float(line["value"][1]) == pytest.approx(share, abs=0.001)


@asynccontextmanager
async def _serving(text: str) -> AsyncIterator[str]:
    """Answer each request with this text; yields `host:port`."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write((head + text).encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        yield ":".join(map(str, server.sockets[0].getsockname()))


def _of_others(one: promql.Reads) -> bool:
    """Served by node_exporter, by dcgm-exporter or by Temporal's server."""
    return any(_reads(one, prefix) for prefix in ("node_", "DCGM_", BACKLOG))


def _reads(one: promql.Reads, prefix: str) -> bool:
    return any(metric.startswith(prefix) for metric in one.metrics)
