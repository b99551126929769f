"""The command line and its processes on a Temporal server of the user's own: mTLS, encryption, traces."""

import asyncio
import base64
import json
import os
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.instances import instance_catalog
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.store_url import open_store
from perdure.types import Grading, Instance, Source, SourceKind
from tests.certificates import Authority, issue
from tests.checkout_paths import ROOT
from tests.otlp_receiver import collecting
from tests.stack.made_instances import GOLD
from tests.temporal_proxy import proxied
from tests.workflows import dev_server

pytestmark = [pytest.mark.temporal, pytest.mark.longer]

MARK = "moonlight-over-kyoto"
"""What only the request says."""
PROOF = "python3 -c 'import calc; assert calc.add(2, 3) == 5'"


@dataclass(frozen=True)
class CommandLine:
    """`perdure` with these settings alone."""

    settings: dict[str, str]

    async def __call__(self, *arguments: str) -> Any:
        """Its answer as JSON. Raises AssertionError with its complaint."""
        foreign = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "perdure.cli.main", *arguments, "--json"],
            env=kept | self.settings,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


async def _add_instance(home: Path, tree: Path) -> None:
    tree.mkdir()
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    instance = Instance(
        instance_id="add",
        dataset="sums",
        problem_statement="add() subtracts.",
        source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
        grading=Grading(protocol="eval_cmd", eval_cmd=PROOF),
        gold_patch=GOLD,
    )
    await instance_catalog.save(open_store(Settings(home=home)), instance)


async def test_the_whole_stack_runs_on_an_operators_server(tmp_path: Path) -> None:
    """`up`, `run` and `status` by mTLS with encrypted payloads; the trace begins at the command."""
    home, keys = tmp_path / "h", tmp_path / "codec.keys"
    if missing := BubblewrapProvider(Settings(home=home)).check():
        pytest.skip("; ".join(missing))
    await _add_instance(home, tmp_path / "tree")
    keys.write_text(f"only {base64.b64encode(b'k' * 32).decode()}\n")
    authority = Authority.of(tmp_path)
    ours = issue(tmp_path, "worker", "DNS:worker.example")
    tls = authority.tls()
    tls.load_verify_locations(authority.file)
    tls.verify_mode = ssl.CERT_REQUIRED
    database = tmp_path / "temporal.db"
    with dev_server.running("--db-filename", str(database)) as server, collecting() as collector:
        await server.client()
        async with proxied(server.address, tls) as proxy:
            perdure = CommandLine(
                {
                    "PERDURE_HOME": str(home),
                    "PERDURE_TEMPORAL__ADDRESS": proxy.address,
                    "PERDURE_TEMPORAL__TLS_CA_FILE": str(authority.file),
                    "PERDURE_TEMPORAL__TLS_CERT_FILE": str(ours.certificate),
                    "PERDURE_TEMPORAL__TLS_KEY_FILE": str(ours.key),
                    "PERDURE_TEMPORAL__CODEC_KEYS_FILE": str(keys),
                    "PERDURE_TRACES__ENDPOINT": collector.url,
                }
            )
            try:
                await perdure("up")
                run = await perdure(
                    *("run", "sums", "--agent", "oracle", "--run-id", "operated", "--model", MARK),
                )
                status = await perdure("status", "operated")
            finally:
                await perdure("down")
        stored = b"".join(file.read_bytes() for file in tmp_path.glob("temporal.db*"))

    assert [one["outcome"] for one in run["rollouts"]] == ["resolved"]
    assert status
    assert MARK.encode() not in stored
    assert b"binary/encrypted" in stored
    (command,) = collector.named("perdure run")
    assert [one.name for one in collector.below(command)] == ["run"]
    assert len(collector.named("rollout")) == 1
