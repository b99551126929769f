"""Sidecars with a real database, Debian's Redis, in podman and docker: names, isolation, limits, health
checks, deadlines and kills; a Harbor task with docker-compose.yaml end to end.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.graders.artifact_transfer import pack_sidecar_artifacts
from perdure.instances.rows.row_import import import_rows
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.in_place_grading import RESULT, STARTED
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.sandboxes.providers.docker.provider import DockerProvider
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.sandboxes.sidecar_boot import SidecarFailed
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import Grade, Healthcheck, Limits, RolloutRequest, SharedFolder, Sidecar
from tests.checkout_paths import ROOT
from tests.images import debian, sidecar_mcp
from tests.images.podman_storage import Podman

IMAGE = "localhost/perdure-test/redis:1"
PACKAGES = ("git", "patch", "python3", "redis-server")
SERVE = ("redis-server", "--save", "", "--protected-mode", "no", "--dir", "/tmp")
PING = Healthcheck(command=("redis-cli", "-h", "db", "ping"), interval_s=1, timeout_s=60)
DB = Sidecar(image=IMAGE, command=SERVE, healthcheck=PING, aliases=("database",))
SPEC = SandboxSpec(
    workdir="/tmp",
    image=IMAGE,
    limits=Limits(memory_mb=512),
    labels={"run": "r", "rollout": "x", "attempt": "1"},
    sidecars={"db": DB},
)


@pytest.fixture(scope="module")
def archive() -> Path:
    if missing := debian.why_not():
        pytest.skip(missing)
    return debian.archive(ROOT / ".perdure/test-images", PACKAGES)


@dataclass(frozen=True)
class Engine:
    """A provider, and what its own program reports about containers."""

    provider: SandboxProvider
    command: Sequence[str]
    env: Mapping[str, str]

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.command, *arguments],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def containers(self, *filters: str) -> list[str]:
        found = self("ps", "--all", "--no-trunc", "--format", "{{.Names}}", *filters)
        return sorted(found.split())

    def state(self, container: str) -> str:
        return self("container", "inspect", "--format", "{{.State.Status}}", container)


@pytest.fixture(params=["podman", "docker"])
def engine(
    request: pytest.FixtureRequest, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    settings = Settings(home=tmp_path / "home")
    if request.param == "podman":
        podman: Podman = request.getfixturevalue("podman")
        env, command = podman.env, ["podman"]
        provider: SandboxProvider = PodmanProvider(settings)
    else:
        env = {"DOCKER_HOST": request.getfixturevalue("docker_address")}
        command, provider = ["docker"], DockerProvider(settings)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    made = Engine(provider, command, env)
    if IMAGE not in made("images", "--format", "{{.Repository}}:{{.Tag}}"):
        made("import", str(archive), IMAGE)
    yield made
    for name in made.containers():
        made("rm", "--force", name)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


async def test_a_sandbox_reaches_its_sidecars_by_name_and_nothing_else(engine: Engine) -> None:
    """A database answers under its name and its alias once `create` returns. Commands see neither its
    process nor a network beyond loopback. A kill leaves no container."""
    box = await engine.provider.create(SPEC, "box")
    again = await engine.provider.create(SPEC, "box")
    set_ = await again.exec("redis-cli -h db set answer 42", check=True)
    get = await box.exec("redis-cli -h database get answer", check=True)
    seen = await box.exec("cat /proc/[0-9]*/comm; pkill redis; kill -9 -1; true")
    links = await box.exec("ls /sys/class/net; tail -n +3 /proc/net/dev | cut -d: -f1", check=True)
    alive = await box.exec("redis-cli -h db ping", check=True)
    listed = await engine.provider.list({"run": "r"})
    await engine.provider.kill("box")

    assert (set_.stdout, get.stdout, alive.stdout) == (b"OK\n", b"42\n", b"PONG\n")
    assert b"redis" not in seen.stdout
    assert set(links.stdout.split()) == {b"lo"}
    assert [one.identity for one in listed] == ["box"]
    assert engine.containers() == []


async def test_sidecars_start_in_order(engine: Engine) -> None:
    """A job that fills the database runs once the database is healthy, and is over before the boot."""
    fill = Sidecar(
        image=IMAGE,
        command=("redis-cli", "-h", "db", "set", "filled", "yes"),
        depends_on={"db": "healthy"},
        completes=True,
    )
    spec = replace(SPEC, sidecars={"fill": fill, "db": DB})
    async with await engine.provider.create(spec, "box") as box:
        found = await box.exec("redis-cli -h db get filled", check=True)

    assert found.stdout == b"yes\n"


async def test_containers_share_folders(engine: Engine) -> None:
    """A folder begins with the files of the first image that has some there, as a Docker volume does.
    What one container writes, the others read. A kill removes it."""
    first = SharedFolder(name="data", target="/etc/apt")
    writer = DB.model_copy(
        update={
            "command": (
                "sh",
                "-c",
                "echo made >/etc/apt/made; exec redis-server --protected-mode no --dir /tmp",
            ),
            "folders": (first, SharedFolder(name="more", target="/more")),
        }
    )
    reader = Sidecar(
        image=IMAGE,
        command=("sh", "-c", "cp /data/made /more/copied; ! touch /data/refused"),
        folders=(
            SharedFolder(name="data", target="/data", read_only=True),
            SharedFolder(name="more", target="/more"),
        ),
        depends_on={"db": "healthy"},
        completes=True,
    )
    folders = (
        SharedFolder(name="data", target="/in", read_only=True),
        SharedFolder(name="more", target="/more"),
    )
    spec = replace(SPEC, sidecars={"db": writer, "reader": reader}, folders=folders)
    async with await engine.provider.create(spec, "box") as box:
        files = await box.exec(
            "cat /in/made /more/copied; ls /in; df -m /more | tail -1", check=True
        )
        own = await box.exec("echo own >/more/own && cat /more/own", check=True)
        refused = await box.exec("touch /in/refused")

    said = files.stdout.decode().splitlines()
    assert said[:2] == ["made", "made"]
    assert "apt.conf.d" in said
    assert (own.stdout, refused.status.ok) == (b"own\n", False)
    assert engine.containers() == []
    if engine.provider.name == "docker":
        assert engine("volume", "ls", "--quiet") == ""
    else:
        assert said[-1].split()[1] == str(SPEC.limits.disk_mb)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": ("sh", "-c", "echo cannot open the disk; exit 3")}, "code 3: cannot open the disk"),
        ({"healthcheck": PING.model_copy(update={"command": ("false",), "timeout_s": 1})}, "not healthy"),
        ({"command": ("python3", "-c", "b'x' * 400_000_000"), "memory_mb": 64}, "code 1?[137]"),
    ],
    ids=["exits", "unhealthy", "memory"],
)  # fmt: skip
async def test_a_failed_sidecar_is_no_sandbox(
    engine: Engine, changes: dict[str, Any], said: str
) -> None:
    """The error is for a retry, and has the last lines of the log. Nothing is left."""
    spec = replace(SPEC, sidecars={"db": DB.model_copy(update=changes)})
    with pytest.raises(SidecarFailed, match=said):
        await engine.provider.create(spec, "box")

    assert engine.containers() == []
    assert await engine.provider.list() == []


async def test_a_deadline_ends_sidecars_without_any_worker(engine: Engine) -> None:
    box = await engine.provider.create(SPEC, "box")
    (database,) = [name for name in engine.containers() if name.endswith(".db")]
    await box.touch(1)
    await eventually(lambda: engine.state(database) == "exited")
    await engine.provider.kill("box")

    assert engine.containers() == []


async def test_a_sidecar_that_died_stays_dead(engine: Engine) -> None:
    """As in Harbor: the agent and the tests meet a refused connection."""
    box = await engine.provider.create(SPEC, "box")
    (database,) = [name for name in engine.containers() if name.endswith(".db")]
    engine("kill", database)
    await eventually(lambda: engine.state(database) == "exited")
    again = await engine.provider.create(SPEC, "box")
    refused = await again.exec("redis-cli -h db ping")
    await box.kill()

    assert not refused.status.ok
    assert engine.containers() == []


BOOT = """
import asyncio, sys
from pathlib import Path
from tests.images import test_sidecars as t

provider = {"podman": t.PodmanProvider, "docker": t.DockerProvider}[sys.argv[1]]
never = t.DB.model_copy(update={"healthcheck": t.PING.model_copy(update={"command": ("false",), "retries": 999})})
spec = t.replace(t.SPEC, sidecars={"db": never})
asyncio.run(provider(t.Settings(home=Path(sys.argv[2]))).create(spec, "box"))
"""


async def test_a_worker_killed_in_the_boot_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    """The sandbox is listed, so a sweep kills it; a new boot of the same identity works too."""
    worker = subprocess.Popen(
        [sys.executable, "-c", BOOT, engine.provider.name, str(tmp_path / "home")],
        env={**os.environ, **engine.env, "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
    )
    try:
        await eventually(lambda: any(name.endswith(".db") for name in engine.containers()))
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    listed = [one.identity for one in await engine.provider.list()]
    async with await engine.provider.create(SPEC, "box") as box:
        await box.exec("redis-cli -h db ping", check=True)

    assert listed == ["box"]
    assert engine.containers() == []


# -- a Harbor task ------------------------------------------------------------------------------------

TASK = """\
version = "1.0"

[verifier]
environment_mode = "{mode}"
timeout_sec = 120.0

[environment]
docker_image = "{image}"
workdir = "/opt"
"""
COMPOSE = f"""\
services:
  db:
    image: {IMAGE}
    command: {json.dumps(SERVE)}
    healthcheck: {{test: redis-cli -h db ping, interval: 1s, timeout: 60s}}
"""
SOLUTION = "redis-cli -h db set answer 42; redis-cli -h db get answer >/logs/artifacts/answer\n"
TESTS = {
    "shared": '[ "$(redis-cli -h db get answer)" = 42 ] && good=1 || good=0\n',
    "separate": textwrap.dedent("""\
        [ -z "$(redis-cli -h db get answer)" ] || exit 1
        redis-cli -h db set answer "$(cat /logs/artifacts/answer)"
        [ "$(redis-cli -h db get answer)" = 42 ] && good=1 || good=0
        """),
}


@pytest.fixture
def services(engine: Engine, tmp_path: Path) -> Services:
    return Services(Settings(home=tmp_path / "home", store=str(tmp_path / "store")))


COLLECTED = """\
[[artifacts]]
source = "/opt/kept"
service = "db"
exclude = ["*.log"]
[[verifier.collect]]
service = "db"
command = "mkdir /opt/kept; redis-cli get answer > /opt/kept/answer; touch /opt/kept/a.log"
"""
SEEN = '[ "$(ls /opt/kept)" = answer ] && [ "$(cat /opt/kept/answer)" = 42 ] && good=1 || good=0\n'


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


async def imported(services: Services, folder: Path, mode: str, collected: str = "") -> str:
    files = {
        "task.toml": TASK.format(mode=mode, image=IMAGE) + collected,
        "instruction.md": "Set answer to 42 in the database.\n",
        "environment/docker-compose.yaml": COMPOSE,
        "solution/solve.sh": f"#!/bin/bash\nmkdir -p /logs/artifacts\n{SOLUTION}",
        "tests/test.sh": f"#!/bin/bash\n{SEEN if collected else TESTS[mode]}echo $good >/logs/verifier/reward.txt\n",
    }
    write_files(folder, files)
    (ref,) = (await import_rows(services.store, folder)).refs
    return ref


def attempt_of(engine: Engine, ref: str, agent: str) -> Attempt:
    request = RolloutRequest(
        run_id=agent.rpartition(":")[2], instance=ref, agent=agent, sandbox=engine.provider.name
    ).model_copy(update={"grade_empty_patch": True})
    return Attempt(request=request, attempt=1, workflow_run_id="00000000")


async def played(services: Services, attempt: Attempt) -> Grade:
    """One rollout's stages, as its workflow calls them."""
    stages = Stages(services)
    for stage in (stages.boot, stages.run_agent, stages.capture, stages.grade):
        await ActivityEnvironment().run(stage, attempt)
    key = f"{store_keys.attempt(attempt.request, 1)}/grade-00000000.json"
    grade = await stage_checkpoints.read(services.store, key, Grade)
    assert grade is not None
    return grade


@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_a_task_with_a_database(
    engine: Engine, services: Services, tmp_path: Path, mode: str
) -> None:
    """Tests of a shared verifier query the database that the agent changed. A separate verifier has
    an empty one, and the agent's artifacts."""
    ref = await imported(services, tmp_path / "task", mode)
    gold, nothing = [
        await played(services, attempt_of(engine, ref, agent)) for agent in ("oracle", "nop")
    ]

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert (nothing.outcome, nothing.reward) == ("unresolved", 0.0)
    assert engine.containers() == []


async def test_a_separate_verifier_sees_what_a_sidecar_leaves(
    engine: Engine, services: Services, tmp_path: Path
) -> None:
    """Its command runs in the database's container, from which the artifacts come."""
    ref = await imported(services, tmp_path / "task", "separate", COLLECTED)
    gold, nothing = [
        await played(services, attempt_of(engine, ref, agent)) for agent in ("oracle", "nop")
    ]

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert (nothing.outcome, nothing.reward) == ("unresolved", 0.0)


@pytest.fixture
async def gateway_services(engine: Engine, tmp_path: Path) -> AsyncIterator[Services]:
    """With a gateway and an engine, for agents that need a model."""
    home = tmp_path / "home"
    async with (
        ScriptedEngine() as scripted,
        LocalGateway(home, engine={"url": scripted.url, "kind": "vllm"}) as gateway,
    ):
        settings = {
            "home": home,
            "engine": {"url": scripted.url, "kind": "vllm"},
            "gateway": {"url": gateway.url},
            "sandbox": {"row_hosts": "a.example"},
        }
        found = Services(Settings.model_validate(settings))
        yield found
        await found.gateway.aclose()


def with_mcp(folder: Path, networks: str) -> None:
    """A task whose sidecar is an MCP server. `networks`: lines of its table `environment`."""
    files = {
        "task.toml": TASK.format(mode="shared", image=IMAGE) + networks + sidecar_mcp.CONFIG,
        "instruction.md": "Ask the vault for the word.\n",
        "environment/docker-compose.yaml": f"services: {{vault: {{image: '{IMAGE}', "
        'command: [python3, /srv/vault.py], volumes: ["./vault.py:/srv/vault.py:ro"]}}\n',
        "environment/vault.py": sidecar_mcp.SERVER,
        "tests/test.sh": f"#!/bin/bash\n{sidecar_mcp.TEST}echo $good >/logs/verifier/reward.txt\n",
    }
    write_files(folder, files)


LISTED = 'network_mode = "allowlist"\nallowed_hosts = ["a.example"]\n'


@pytest.mark.parametrize("networks", ["", LISTED], ids=["plain", "allowlist"])
async def test_an_agent_calls_the_tool_of_a_sidecar(
    engine: Engine,
    gateway_services: Services,
    tmp_path: Path,
    networks: str,
) -> None:
    """The address is a service of the compose file. The call uses neither the gateway nor the proxy."""
    with_mcp(tmp_path / "task", networks)
    (ref,) = (await import_rows(gateway_services.store, tmp_path / "task")).refs
    agent = f"{sidecar_mcp.__name__}:ToolCaller"
    grade = await played(gateway_services, attempt_of(engine, ref, agent))

    assert (grade.outcome, grade.reward, grade.reason) == ("resolved", 1.0, "")
    assert engine.containers() == []


async def test_a_sidecars_dead_server_leaves_no_verdict(
    engine: Engine, gateway_services: Services, tmp_path: Path
) -> None:
    """The server ended in a call. The attempt names it, and no verdict follows."""
    with_mcp(tmp_path / "task", "")
    (ref,) = (await import_rows(gateway_services.store, tmp_path / "task")).refs
    attempt = attempt_of(engine, ref, f"{sidecar_mcp.__name__}:ServerKiller")
    stages = Stages(gateway_services)
    await ActivityEnvironment().run(stages.boot, attempt)
    run = await ActivityEnvironment().run(stages.run_agent, attempt)
    await ActivityEnvironment().run(stages.destroy, attempt)

    assert "nothing listened at http://vault:8000/mcp, MCP server 'vault', when" in run.broke
    assert engine.containers() == []


async def test_artifacts_of_a_sidecar_are_bounded_and_optional(engine: Engine) -> None:
    """Absent ones are left out, as are those of a sidecar that has ended."""
    box = await engine.provider.create(SPEC, "box")
    await box.sidecar_exec("db", ["sh", "-c", "head -c 3000000 /dev/zero > /opt/big"], timeout_s=60)
    large = await pack_sidecar_artifacts(box, "db", {"/opt/big": ()}, output_mb=1)
    kept = await pack_sidecar_artifacts(box, "db", {"/opt/big": ()}, output_mb=4)
    absent = await pack_sidecar_artifacts(box, "db", {"/opt/absent": ()}, output_mb=1)
    (database,) = [name for name in engine.containers() if name.endswith(".db")]
    engine("kill", database)
    await eventually(lambda: engine.state(database) == "exited")
    ended = await pack_sidecar_artifacts(box, "db", {"/opt/big": ()}, output_mb=4)
    await box.kill()

    assert (large.data, large.refused[:19]) == (b"", "artifacts_too_large")
    assert (len(kept.data) > 3_000_000, kept.refused) == (True, "")
    assert (absent.data, absent.refused, ended.data, ended.refused) == (b"", "", b"", "")


async def test_tests_never_run_twice_in_the_agents_sandbox(
    engine: Engine, services: Services, tmp_path: Path
) -> None:
    """A capture that finds tests without a result asks for a new attempt."""
    ref = await imported(services, tmp_path / "task", "shared")
    attempt = attempt_of(engine, ref, "oracle")
    stages, key = Stages(services), store_keys.attempt(attempt.request, 1)
    for stage in (stages.boot, stages.run_agent):
        await ActivityEnvironment().run(stage, attempt)
    await services.store.put(f"{key}/{STARTED}", b"")
    with pytest.raises(ApplicationError, match="left no result") as caught:
        await ActivityEnvironment().run(stages.capture, attempt)
    await ActivityEnvironment().run(stages.destroy, attempt)

    assert caught.value.type == "SandboxLost"
    assert not await services.store.exists(f"{key}/{RESULT}")
    assert engine.containers() == []
