"""Harbor and Perdure run the same tasks: same rewards, same artifacts.

Harbor is the package from PyPI with its own docker environment, on the same engine and the same
images as Perdure. The images are made of this host's Debian programs; no registry is asked. Harbor
takes several times as long as Perdure, so its results are in `harbor_results.json`. It runs only the
tasks in FRESH again. PERDURE_TEST_HARBOR=record runs and records those without a result, and tests
nothing.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from benchmarks.peers.peer_environments import Unavailable
from perdure.errors import InstanceError, NotFound
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_import import import_rows
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from tests import docker_engine
from tests.images import harbor_oracle
from tests.images.harbor_oracle import Harbor, Result
from tests.images.harbor_tasks import TASKS, Task
from tests.images.played_stages import played

pytestmark = [pytest.mark.registry, pytest.mark.timeout(5400)]
AGENTS = ("oracle", "nop")
RECORDS = os.environ.get("PERDURE_TEST_HARBOR") == "record"
BATCH = 8
"""Tasks that are recorded together."""
FRESH = ("agent-timeout", "collect-separate", "left-running")
ROW_HOSTS = "a.example,*.b.example,192.0.2.0/24,2001:db8::1"
"""All that the tasks list. By default, Perdure refuses a task that lists hosts, and names this setting."""
TASK = {task.name: task for task in TASKS}


@pytest.fixture(scope="module")
def harbor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbor]:
    if missing := docker_engine.why_not():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("harbor")
    with docker_engine.running("overlay2") as address, pytest.MonkeyPatch.context() as patch:
        try:
            found = harbor_oracle.install(folder, address)
        except Unavailable as error:
            pytest.skip(str(error))
        harbor_oracle.make_images(address, docker_engine.IMAGE, folder / "images")
        patch.setenv("DOCKER_HOST", address)
        patch.setenv("PERDURE_DOCKER__IMAGE", docker_engine.IMAGE)  # runs the proxy of builds
        patch.setenv("PERDURE_SANDBOX__ROW_HOSTS", ROW_HOSTS)
        if RECORDS:
            _record(found)
            pytest.skip(
                "Harbor's results are recorded, and it removed base images: test without it"
            )
        yield found


def _record(harbor: Harbor) -> None:
    known = harbor_oracle.recorded()
    for agent in AGENTS:
        lacking = [task for task in TASKS if (task.name, agent) not in known]
        for start in range(0, len(lacking), BATCH):
            found = harbor.run(lacking[start : start + BATCH], agent)
            harbor_oracle.record({(name, agent): one for name, one in found.items()})


@dataclass(frozen=True)
class Both:
    harbor: Result
    perdure: Result


@pytest.fixture(scope="module")
def results(
    harbor: Harbor, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Both]:
    """By task and agent."""
    folder = tmp_path_factory.mktemp("tasks")
    home = tmp_path_factory.mktemp("home")
    for task in TASKS:
        task.write(folder)
    services = Services(Settings(home=home, store=str(home / "store")))
    theirs = of_harbor(harbor)
    pairs = [*theirs]

    async def ours() -> list[Result]:
        seats = asyncio.Semaphore(harbor_oracle.TRIALS)

        async def one(name: str, agent: str) -> Result:
            async with seats:
                return await _of_perdure(services, folder / name, agent)

        return await asyncio.gather(*(one(*pair) for pair in pairs))

    return {
        pair: Both(theirs[pair], one) for pair, one in zip(pairs, asyncio.run(ours()), strict=True)
    }


def of_harbor(harbor: Harbor) -> dict[tuple[str, str], Result]:
    """Its results by task and agent."""
    again = harbor.run([TASK[name] for name in FRESH], "oracle")
    fresh = {(name, "oracle"): one for name, one in again.items()}
    return {**harbor_oracle.recorded(), **fresh}


async def _of_perdure(services: Services, folder: Path, agent: str) -> Result:
    report = await import_rows(services.store, folder)
    if not report.refs:
        return Result({}, {}, report.rows[0].problem)
    (ref,) = report.refs
    try:
        grade, attempt = await played(services, ref, agent, sandbox="docker")
    except ApplicationError as error:
        failed = {} if error.type == "ConfigurationError" else {f"failed: {error.type}": 0.0}
        return Result(failed, {}, error.message)
    packed = b""
    with contextlib.suppress(NotFound):
        packed = (await services.store.get(f"{attempt}/artifacts.tar")).data
    rewards = grade.named_rewards or {"reward": grade.rewards.partial}
    return Result(rewards, harbor_oracle.members(packed), f"{grade.outcome}: {grade.reason}")


@pytest.mark.parametrize("pair", sorted(harbor_oracle.recorded()), ids="-".join)
def test_rewards_and_artifacts_are_harbors(
    results: dict[tuple[str, str], Both], pair: tuple[str, str]
) -> None:
    """Of a task that `differs`, Perdure refuses all: then there is no reward at all."""
    both = results[pair]

    if TASK[pair[0]].differs:
        assert (both.perdure.rewards, both.perdure.artifacts) == ({}, {})
    else:
        assert both.perdure == both.harbor


def test_harbors_record_is_true(harbor: Harbor, results: dict[tuple[str, str], Both]) -> None:
    """Harbor gives the same again."""
    known = harbor_oracle.recorded()
    found = {name: results[name, "oracle"].harbor for name in FRESH}

    assert found == {name: known[name, "oracle"] for name in FRESH}


def test_the_tasks_are_decided_by_what_the_agent_did(
    results: dict[tuple[str, str], Both],
) -> None:
    """Agreement proves nothing if both systems give every task the same reward."""
    both = [name for name, agent in results if agent == "nop"]
    decided = [
        name
        for name in both
        if results[name, "oracle"].harbor.rewards != results[name, "nop"].harbor.rewards
    ]

    assert len(decided) > len(both) * 2 / 3


REFUSED = {
    "steps": '[[steps]]\nname = "a"\n',
    "environment.tpu": '[environment]\ntpu = {type = "v6e", topology = "2x2"}\n',
    "verifier.environment.tpu": '[verifier.environment]\ntpu = {type = "v6e", topology = "2x2"}\n',
    "verifier.environment.skills_dir": '[verifier.environment]\nskills_dir = "/skills"\n',
    "verifier.environment.healthcheck": '[verifier.environment.healthcheck]\ncommand = "true"\n',
    "verifier.environment.mcp_servers": '[[verifier.environment.mcp_servers]]\nname = "a"\n'
    'transport = "stdio"\ncommand = "true"\n',
}
"""Key or table -> a task that uses it."""


def keys_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """All keys of `task.toml`, with the tables that lead to them."""
    tables = schema["$defs"]

    def below(table: Mapping[str, Any], path: str) -> Iterator[str]:
        for key, value in table.get("properties", {}).items():
            named = re.findall(r"#/\$defs/(\w+)", json.dumps(value))
            inner = [tables[name] for name in named if "properties" in tables[name]]
            for one in inner:
                yield from below(one, f"{path}{key}.")
            if not inner:
                yield path + key

    return below(schema, "")


def test_every_key_of_the_schema_is_in_a_task_or_refused(harbor: Harbor, tmp_path: Path) -> None:
    known = {*REFUSED, *(key for task in TASKS for key in task.keys)}
    keys = [*keys_of(harbor.schema())]
    missing = [
        key for key in keys if not any(key == one or key.startswith(f"{one}.") for one in known)
    ]

    assert len(keys) > 100
    assert missing == []
    for key, toml in REFUSED.items():
        folder = Task("refused", toml).write(tmp_path)
        with pytest.raises(InstanceError, match=rf"does not support `{key}"):
            to_instance({"data_source": "harbor", "task_folder": str(folder)}, "h", 1)


def perdure(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in the folder, with a home below it."""
    foreign = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env = {**clean, "PERDURE_HOME": str(folder / "home")}
    argv = [sys.executable, "-m", "perdure.cli.main", *arguments]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.temporal
def test_a_newcomers_first_try(harbor: Harbor, tmp_path: Path) -> None:
    """`harbor task init`, three lines filled in, `perdure run ./hello`."""
    harbor("task", "init", "demo/hello", "-p", str(tmp_path), "--no-pytest")
    task = tmp_path / "hello"
    with (task / "solution/solve.sh").open("a") as script:
        script.write("\necho done > out\n")
    with (task / "tests/test.sh").open("a") as script:
        script.write("\n[ -e out ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n")
    toml = (task / "task.toml").read_text()
    (task / "task.toml").write_text(toml.replace("artifacts = []", 'artifacts = ["/app/out"]'))

    try:
        done = [
            perdure(
                tmp_path, "run", "./hello", "-a", agent, "--sandbox", "docker", "--wait", "--json"
            )
            for agent in AGENTS
        ]
    finally:
        perdure(tmp_path, "down")

    assert [one.returncode for one in done] == [0, 0], [one.stderr[-2000:] for one in done]
    outcomes = [json.loads(one.stdout)["rollouts"][0]["outcome"] for one in done]
    assert outcomes == ["resolved", "unresolved"]


async def test_what_harbor_writes_is_imported_as_it_is(harbor: Harbor, tmp_path: Path) -> None:
    for number, options in enumerate(([], ["--verifier-mode", "shared"], ["--no-pytest"])):
        harbor("task", "init", f"demo/task-{number}", "-p", str(tmp_path / "tasks"), *options)

    report = await import_rows(LocalStore(tmp_path / "store"), tmp_path / "tasks")

    assert [row.problem for row in report.rows] == ["", "", ""]


async def test_the_examples_in_harbors_package_are_imported(harbor: Harbor, tmp_path: Path) -> None:
    """They lack what its commands fill in: instructions."""
    (package,) = harbor.program.parent.parent.glob("lib/python*/site-packages/harbor")
    folders = {path.parent for path in package.rglob("task.toml")}
    for number, folder in enumerate(sorted(folders)):
        made = shutil.copytree(folder, tmp_path / "tasks" / f"{number}-{folder.parent.name}")
        (made / "instruction.md").touch()
        if not (made / "tests/test.sh").exists():
            shutil.copytree(folder / "pytest-tests", made / "tests")

    report = await import_rows(LocalStore(tmp_path / "store"), tmp_path / "tasks")

    assert len(report.rows) >= 5
    assert [row.problem for row in report.rows if row.problem] == []
