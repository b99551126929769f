"""Tasks that are folders: Harbor's published layout, and plain ones with a file per long field."""

import json
from pathlib import Path

import pytest

from perdure.agents.base import AgentTask
from perdure.agents.oracle import Oracle
from perdure.errors import InstanceError
from perdure.graders.protocols.reward_file import RewardFileGrader, reward_of
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_import import import_rows
from perdure.storage.local_store import LocalStore
from perdure.types import Instance, LimitChanges, Sampling, SourceKind
from tests.unit.instances.made_rows import write_harbor

PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\r\n+b\r\n"


def read(folder: Path) -> Instance:
    return to_instance({"data_source": "harbor", "task_folder": str(folder)}, "h", 4)


def test_a_harbor_task(tmp_path: Path) -> None:
    """Instruction, image, folder, limits and tests are the task's; the tests are hidden files."""
    instance = read(write_harbor(tmp_path / "add", "img:1", "/work"))
    grading = instance.grading

    assert (instance.instance_id, instance.problem_statement) == ("add", "add() subtracts.\n")
    assert (instance.environment.image, instance.environment.workdir) == ("img:1", "/work")
    assert instance.phases.grade.limits == LimitChanges(cpus=1, memory_mb=2048, disk_mb=1024)
    assert instance.phases.agent.network is None
    assert set(grading.files) == {".perdure-tests/test.sh", ".perdure-tests/check.py"}
    assert grading.timeout_s == 120.0
    RewardFileGrader().validate(instance)


def test_the_verifiers_variables_are_set(tmp_path: Path) -> None:
    """`verifier.env` reaches the tests and nothing else."""
    folder = write_harbor(tmp_path / "add", "img:1")
    task = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(task.replace("[verifier]", '[verifier]\nenv = {A = "x y"}'))

    instance = read(folder)

    assert instance.grading.files[".perdure-tests/test.sh"].startswith(
        b"export A='x y'\n#!/bin/bash"
    )
    assert instance.environment.env == {}


def test_the_oracle_runs_the_solution(tmp_path: Path) -> None:
    """Only the oracle runs a solution that is a script."""
    instance = read(write_harbor(tmp_path / "add", "img:1"))
    task = AgentTask(instance, "/app", None, "", "m", Sampling(), 60.0)

    launch = Oracle().launch(task)

    assert launch.files["/home/agent/solution/solve.sh"].startswith(b"sed -i")
    assert launch.argv[:2] == ("bash", "-c")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('\n[[steps]]\nname = "a"\n', "`steps`"),
        ("\n[more]\na = 1\n", "`more`"),
        ('\n[environment.healthcheck]\ncommand = "x"\n', "`environment.healthcheck`"),
        ("gpus = 1\n", "`environment.gpus`"),
        ('os = "windows"\n', "`environment.os = 'windows'`, only 'linux'"),
        ('network_mode = "allowlist"\n', "only 'public' and 'no-network'"),
        ('\n[solution]\nenv = {A = "1"}\ntimeout_sec = 3\n', "`solution.timeout_sec`"),
        ('env = {KEY = "${KEY}"}\n', "`environment.env.KEY` takes a value from the host"),
        ("= 3\n", "its task.toml"),
    ],
)
def test_what_is_not_done_is_refused(tmp_path: Path, more: str, said: str) -> None:
    """A key of task.toml that Perdure would ignore is refused by its name."""
    with pytest.raises(InstanceError, match=r"^row 4") as caught:
        read(write_harbor(tmp_path / "add", "img:1", more=more))

    assert said in str(caught.value)


def test_all_that_is_not_done_is_refused_at_once(tmp_path: Path) -> None:
    more = 'gpus = 1\nos = "windows"\n\n[[steps]]\nname = "a"\n'
    folder = write_harbor(tmp_path / "add", "", more=more)
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")

    with pytest.raises(InstanceError) as caught:
        read(folder)

    for name in ("steps", "environment.gpus", "environment.os", "several containers", "image"):
        assert name in str(caught.value)


EMPTY_DEFAULTS = """mcp_servers = []
gpu_types = []
network_mode = "no-network"
os = "Linux"

[environment.env]

[solution.env]
"""
"""What Harbor writes for what a task does not use, and names for what Perdure does anyway."""


def test_empty_values_and_other_names_of_the_default_pass(tmp_path: Path) -> None:
    plain = read(write_harbor(tmp_path / "plain" / "add", "img:1"))
    folder = write_harbor(tmp_path / "add", "img:1", more=EMPTY_DEFAULTS)
    task = (folder / "task.toml").read_text()
    modes = '[verifier]\nenvironment_mode = "separate"\nuser = "root"\ncollect = []'
    (folder / "task.toml").write_text("artifacts = []\n" + task.replace("[verifier]", modes))

    assert read(folder) == plain


def test_a_verifier_with_an_image_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = write_harbor(tmp_path / "add", "img:1")
    task = (folder / "task.toml").read_text()
    separate = task.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    (folder / "task.toml").write_text(separate)
    (folder / "tests" / "Dockerfile").write_text("FROM x\n")

    with pytest.raises(InstanceError, match="tests/Dockerfile"):
        read(folder)


@pytest.mark.parametrize(
    ("more", "agent", "grade"),
    [
        ("allow_internet = true\n", "host", "host"),
        ('network_mode = "public"\n', "host", "host"),
        ('network_mode = "no-network"\nallow_internet = true\n', None, None),
        ("", None, None),
    ],
)
def test_each_phase_has_its_network(
    tmp_path: Path, more: str, agent: str | None, grade: str | None
) -> None:
    phases = read(write_harbor(tmp_path / "add", "img:1", more=more)).phases

    assert (phases.agent.network, phases.grade.network) == (agent, grade)


def test_a_phase_overrides_the_environments_network(tmp_path: Path) -> None:
    folder = write_harbor(tmp_path / "add", "img:1", more='network_mode = "public"\n')
    task = (folder / "task.toml").read_text()
    own = task.replace("[agent]", '[agent]\nnetwork_mode = "no-network"')
    (folder / "task.toml").write_text(own)
    phases = read(folder).phases

    assert (phases.agent.network, phases.grade.network) == (None, "host")


def test_the_solutions_variables_are_set(tmp_path: Path) -> None:
    more = '\n[solution.env]\nA = "x y"\n'
    instance = read(write_harbor(tmp_path / "add", "img:1", more=more))

    assert instance.gold_script["solve.sh"].startswith(b"export A='x y'\nsed -i")


def test_a_task_needs_an_image_that_exists(tmp_path: Path) -> None:
    """Perdure builds no images, so the message says how to build and name one."""
    folder = write_harbor(tmp_path / "add", "")

    with pytest.raises(InstanceError, match="docker build -t NAME environment"):
        read(folder)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (b"1\n", 1.0),
        (b"0.25", 0.25),
        (b'{"reward": 0.5, "style": 1}', 0.5),
        (b'{"score": 1}', 1.0),
        (b'{"a": 1, "b": 1}', None),
        (b"-1", None),
        (b"NaN", None),
        (b"true", None),
        (b"", None),
    ],
)
def test_rewards(text: bytes, reward: float | None) -> None:
    """A number from 0 to 1, an object's `reward` or its only value; any other content is no reward."""
    assert reward_of(text) == reward


async def test_plain_folders(tmp_path: Path) -> None:
    """Each file is one field of the row, byte for byte; a folder of such folders is a dataset."""
    folder = tmp_path / "tasks" / "mine-1"
    (folder / "repo").mkdir(parents=True)
    (folder / "problem.md").write_text("It breaks.")
    (folder / "gold.patch").write_bytes(PATCH.encode())
    (folder / "row.json").write_text(json.dumps({"eval_cmd": "pytest -x"}))
    (tmp_path / "tasks" / "broken").mkdir()
    (tmp_path / "tasks" / "broken" / "row.json").write_text("[]")
    store = LocalStore(tmp_path / "store")

    report = await import_rows(store, tmp_path / "tasks")
    stored = await store.get("instances/tasks/mine-1.json")
    instance = Instance.model_validate_json(stored.data)

    assert report.refs == ["tasks/mine-1"]
    assert report.problems == ["row 1, the folder broken: row.json is not an object"]
    assert instance.gold_patch == PATCH.encode()
    assert instance.source.kind is SourceKind.DIRECTORY
    assert instance.source.path == str(folder / "repo")
