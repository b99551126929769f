"""How many requests each step of a sandbox needs, because each takes long far from the service."""

import re
from pathlib import Path

import pytest

from tests.service_harness import Bench

LARGE = 100_000
"""Bytes: too many to send with the order."""

ONCE_A_PROCESS = "POST /modal.client.ModalClient/EnvironmentGetOrCreate"
"""Modal's SDK asks for its environment in the first boot of a process, and remembers it."""

ROUTER = "POST /modal.task_command_router.TaskCommandRouter"
MODAL_EXEC = [
    f"{ROUTER}/TaskExecStart", f"{ROUTER}/TaskExecStdinWrite", f"{ROUTER}/TaskExecStdioRead"
]  # fmt: skip
"""Modal's service takes a command, its standard input and a look at its output separately."""

EXPECTED = {
    "e2b": {
        "boot": ["GET /*/sandboxes", "POST /*/sandboxes", "POST /process.Process/Start"],
        "exec": ["POST /process.Process/Start"],
        "small file": ["POST /process.Process/Start"],
        "large file": ["POST /files", "POST /process.Process/Start"],
        "kill": ["GET /*/sandboxes", "DELETE /sandboxes/*"],
    },
    "daytona": {
        "boot": [
            "GET /api/sandbox/*",
            "POST /api/sandbox",
            "POST /toolbox/*/process/execute",
        ],
        "exec": ["POST /toolbox/*/process/execute"],
        "small file": ["POST /toolbox/*/process/execute"],
        "large file": ["POST /toolbox/*/files/bulk-upload", "POST /toolbox/*/process/execute"],
        "kill": ["GET /api/sandbox/*", "DELETE /api/sandbox/*"],
    },
    "modal": {
        "boot": [
            "POST /modal.client.ModalClient/ImageGetOrCreate",
            "POST /modal.client.ModalClient/SandboxCreateV2",
            "POST /modal.client.ModalClient/SandboxGetCommandRouterAccess",
            *MODAL_EXEC,
        ],
        "exec": MODAL_EXEC,
        "small file": MODAL_EXEC,
        "large file": [
            f"{ROUTER}/TaskExecStart",
            f"{ROUTER}/TaskExecStdinWriteStream",
            f"{ROUTER}/TaskExecWait",
            *MODAL_EXEC,
        ],
        "kill": [
            "POST /modal.client.ModalClient/SandboxGetFromNameV2",
            "POST /modal.client.ModalClient/SandboxTerminateV2",
            "POST /modal.client.ModalClient/SandboxWaitV2",
        ],
    },
}


class Requests:
    """The requests since the last call, in order, without their names."""

    def __init__(self, bench: Bench) -> None:
        self._log = bench.server.faults.log
        self._seen = len(self._log)

    def new(self) -> list[str]:
        lines = [entry["line"] for entry in self._log[self._seen :]]
        self._seen = len(self._log)
        return [
            re.sub(r"/[^/ A-Z]*[0-9][^/ A-Z]*(?=/|$)", "/*", line)
            for line in lines
            if line != ONCE_A_PROCESS
        ]


@pytest.mark.longer
async def test_no_step_costs_more_requests_than_it_must(bench: Bench, tmp_path: Path) -> None:
    """A boot looks, creates and sets up. A command, an upload and a kill need their minimum."""
    (tmp_path / "large").write_bytes(b"x" * LARGE)
    requests, found = Requests(bench), dict[str, list[str]]()
    async with bench.box() as box:
        first, *rest = requests.new()
        found["boot"] = [first, *(line for line in rest if "GET" not in line)]  # is it up yet?
        await box.exec("true")
        found["exec"] = requests.new()
        await box.put("small", b"x")
        found["small file"] = requests.new()
        await box.put("large", tmp_path / "large")
        found["large file"] = requests.new()
    found["kill"] = requests.new()

    assert found == EXPECTED[bench.service.name]
