"""docker-compose.yml as it is, but for services whose images only a registry has.

Temporal's dev server stands in for Temporal on PostgreSQL, moto for SeaweedFS, a scripted engine for yours.
Nothing is published, so that another stack of this host keeps its ports. Debian 12's podman has no health
checks without systemd, starts no chain of services, and knows no `host-gateway`; so the services start here
in the order that their `depends_on` asks for, without the host's name.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.checkout_paths import ROOT
from tests.images.podman_storage import Podman
from tests.stack.gated_engine import script

IMAGE = "localhost/perdure"
STAND_INS = "localhost/perdure-stand-ins"
LEFT_OUT = ("grafana", "postgres", "prometheus", "temporal-schema", "temporal-ui")
NOT_TAKEN = ("build", "depends_on", "env_file", "extra_hosts", "healthcheck", "ports", "profiles")
TESTS = f"{ROOT}/tests:/app/tests:ro"
"""The tests' agent, which workers and callers import."""
DEV_SERVER = ["temporal", "server", "start-dev", "--headless", "--ip", "0.0.0.0"]
ENGINE = ["python", "-m", "perdure.testing.scripted_engine", "--host", "0.0.0.0", "--port", "8000"]
READY_S = 120.0
PAUSE_S = 0.2
WHOLE: Mapping[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def services(folder: Path) -> dict[str, dict[str, Any]]:
    found = {name: _ours(s) for name, s in WHOLE["services"].items() if name not in LEFT_OUT}
    found["temporal"] = _stand_in(DEV_SERVER, networks=found["temporal"]["networks"])
    found["temporal-namespace"]["image"] = STAND_INS
    found["s3"] = _stand_in(["python", "-m", "tests.s3_server"], volumes=[TESTS])
    scripts = folder / "scripts.json"
    scripts.write_text(json.dumps(script()))
    command = [*ENGINE, "--scripts", "/scripts.json"]
    found["engine"] = _stand_in(command, volumes=[f"{scripts}:/scripts.json:ro"])
    return found


def _ours(service: Mapping[str, Any]) -> dict[str, Any]:
    """Unpublished, with absolute paths; services of our image find the tests and the engine too."""
    kept = {key: value for key, value in service.items() if key not in NOT_TAKEN}
    volumes = [volume.replace("./", f"{ROOT}/", 1) for volume in service.get("volumes", ())]
    if service["image"] != "perdure":
        return {**kept, "volumes": volumes}
    environment = {**service["environment"], "PERDURE_ENGINE__URL": "http://engine:8000"}
    return {**kept, "image": IMAGE, "environment": environment, "volumes": [*volumes, TESTS]}


def _stand_in(command: list[str], **fields: Any) -> dict[str, Any]:
    return {"image": STAND_INS, "command": command, "stop_signal": "SIGKILL", **fields}


@dataclass(frozen=True)
class Compose:
    podman: Podman
    folder: Path
    started: list[str] = field(default_factory=list)

    def up(self) -> None:
        """Every service but `cli`; a finished one has ended without an error."""
        found = services(self.folder)
        (self.folder / "docker-compose.yml").write_text(
            yaml.safe_dump({**WHOLE, "services": found})
        )
        waiting = {name: _needs(name) & set(found) for name in found if name != "cli"}
        while waiting:
            wave = sorted(name for name, needs in waiting.items() if needs <= set(self.started))
            assert wave, waiting
            self("up", "--detach", *wave)
            self.started.extend(wave)
            for name in wave:
                waiting.pop(name)
                self._wait(name, WHOLE["services"].get(name, {}))

    def run(self, *command: str) -> str:
        """What a command of the `cli` service says."""
        return self("run", "--rm", "--no-deps", "-T", "cli", *command)

    def down(self) -> None:
        self("down", "--volumes", "--timeout", "30")

    def name(self, service: str) -> str:
        return f"{self.folder.name}_{service}_1"

    def __call__(self, *arguments: str) -> str:
        command = ["podman-compose", "-f", str(self.folder / "docker-compose.yml"), *arguments]
        done = subprocess.run(
            command,
            env={**os.environ, **self.podman.env},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr)[-4000:]}"
        return done.stdout

    def _wait(self, name: str, service: Mapping[str, Any]) -> None:
        """Until it has ended, if it is to end, or its health check passes."""
        check = service.get("healthcheck", {}).get("test", ["", ""])
        if service.get("restart") == "on-failure":
            state = ["inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}"]
            self._until(lambda: self.podman(*state, self.name(name)) == "exited 0", name)
        elif check[1] == "python":
            self._until(lambda: self.podman.does("exec", self.name(name), *check[1:]), name)

    def _until(self, ready: Any, name: str) -> None:
        end = time.monotonic() + READY_S
        while not ready():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{name}: {self.podman('logs', '--tail', '20', self.name(name))}"
                )
            time.sleep(PAUSE_S)


def _needs(name: str) -> set[str]:
    return set(WHOLE["services"].get(name, {}).get("depends_on", ()))
