"""Panels and alerts of infra read what processes of a live stack really serve."""

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from perdure.client import names
from perdure.types import RolloutRequest
from tests import held_ports, promql
from tests.stack.host import why_not_here
from tests.stack.stack import running
from tests.stack.waiting import until

RARE = {"temporal_request_failure_total"}
"""Served only when Temporal has refused a call."""


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
        async with running(tmp_path / "stack", workers=0) as stack:
            await stack.start_worker(PERDURE_METRICS__PORT=str(port))
            await stack.episode(await stack.start("measured"))
            nowhere = RolloutRequest(run_id="nowhere", instance="toy/nowhere", agent="nop")
            await stack.start_by_hand(
                names.ROLLOUT, nowhere.workflow_id, nowhere.model_dump(mode="json")
            )
            await stack.episode(nowhere)
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.post(f"{stack.plan.gateway_url}/v1/chat/completions", json={})
            served = promql.served(
                await _metrics(f"http://127.0.0.1:{port}/metrics"),
                await _metrics(f"{stack.plan.gateway_url}/metrics"),
            )
    ours = [one for one in promql.expressions() if not _of_hosts(one)]

    missed = [miss for one in ours for miss in one.misses(served | dict.fromkeys(RARE))]
    assert missed == []
    assert served["perdure_attempts_total"] == {"stage", "cause"} | _everywhere(served)


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
    of_hosts = [one for one in promql.expressions() if _of_hosts(one)]

    assert of_hosts
    assert [miss for one in of_hosts for miss in one.misses(served)] == []


def _of_hosts(one: promql.Reads) -> bool:
    return any(metric.startswith("node_") for metric in one.metrics)
