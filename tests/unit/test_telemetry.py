"""Output of processes: JSON log lines, nothing on stdout, one metrics port."""

import json
import re
import subprocess
import sys
import textwrap
from typing import Any

from tests import held_ports


def run(program: str) -> "subprocess.CompletedProcess[bytes]":
    """A fresh process, because logging and the SDK's runtime are set up once per process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=True
    )


def lines(done: "subprocess.CompletedProcess[bytes]") -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_lines_are_bound_to_their_rollout() -> None:
    """Lines of Perdure and of other libraries inside a block carry run, rollout and attempt."""
    done = run("""
        import logging, structlog
        from perdure.settings.settings_tree import Settings
        from perdure.telemetry import bind, configure_logging
        configure_logging("worker-boot")
        with bind("r1", "rollout/r1/a/0", 2):
            structlog.get_logger("perdure.x").info("booted", seconds=1)
            logging.getLogger("library").warning("slow %s", "disk")
        structlog.get_logger("perdure.x").info("idle")
    """)

    ours, library, idle = lines(done)
    assert ours == ours | {"event": "booted", "run": "r1", "attempt": 2, "process": "worker-boot"}
    assert library == library | {"event": "slow disk", "rollout": "rollout/r1/a/0"}
    assert "run" not in idle


def test_the_sdk_does_not_log_to_stdout() -> None:
    """Temporal's core logs to stdout by default, which would break `--json`. Its lines join
    Perdure's instead."""
    done = run("""
        import asyncio, os, sys
        from temporalio.client import Client
        from perdure.settings.settings_tree import Settings
        from perdure.telemetry import configure_logging, temporal_runtime
        configure_logging("cli")
        runtime = temporal_runtime(Settings())
        async def main():
            client = await Client.connect("127.0.0.1:1", lazy=True, runtime=runtime)
            try:
                await client.count_workflows()
            except Exception:
                pass
        asyncio.run(main()); sys.stderr.flush(); os._exit(0)
    """)

    assert done.stdout == b""


def test_our_metrics_are_served() -> None:
    """A worker's metrics are on its Prometheus port, with their labels."""
    with held_ports.held(1) as (port,):
        done = run(f"""
            import os, urllib.request
            from perdure.settings.settings_tree import Settings
            from perdure.telemetry import metrics, temporal_runtime
            runtime = temporal_runtime(Settings(metrics=dict(port={port})))
            metrics.stage("boot", 1.5, queued_s=0.5, cause="SandboxLost")
            metrics.stage("grade", 1.5, queued_s=0.5, cause="RetryHere", tries=4)
            metrics.stage("grade", 1.5, queued_s=0.5, cause="RetryHere", tries=5)
            metrics.stage("grade", 1.5, queued_s=0.5, tries=6)
            metrics.agent_time(total_s=10.0, model_s=4.0)
            url = "http://127.0.0.1:{port}/metrics"
            print(urllib.request.urlopen(url).read().decode(), flush=True); os._exit(0)
        """)

    text = done.stdout.decode()
    assert re.search(r'^perdure_attempts_total{cause="SandboxLost".* 1$', text, re.MULTILINE)
    assert re.findall(r"^perdure_stuck_tries_total{.* (\d+)$", text, re.MULTILINE) == ["1"]
    assert re.search(r"^perdure_environment_ms_total{.* 6000$", text, re.MULTILINE)
