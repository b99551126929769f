"""Tasks that are folders: Harbor's published layout, and plain ones with a file per long field."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from perdure.agents.base import AgentTask
from perdure.agents.oracle import Oracle
from perdure.agents.prompt_template import default_template
from perdure.errors import ConfigurationError, InstanceError
from perdure.graders.protocols.reward_file import RewardFileGrader, parse_reward_file
from perdure.instances import base_trees, build_contexts, instance_catalog
from perdure.instances.environment_builder import check_image
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_import import import_rows
from perdure.sandboxes.providers.kubernetes.provider import KubernetesProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Build,
    Collect,
    Healthcheck,
    Instance,
    LimitChanges,
    McpServer,
    Sampling,
    SourceKind,
)
from tests.unit.instances.made_rows import write_compose, write_harbor

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
    assert (instance.agent_timeout_s, grading.timeout_s) == (60.0, 120.0)
    assert list(instance.artifacts) == ["/logs/artifacts"]
    RewardFileGrader().validate(instance)


PRINTS = "#!/usr/bin/env python3\nimport os\nprint(os.environ['A'])\n"
"""A script that bash cannot read."""


def output(files: Mapping[str, bytes], script: str, folder: Path) -> str:
    """What the script prints, if it is run as the sandbox runs it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / script).chmod(0o755)
    return subprocess.check_output([folder / script], text=True)


def test_the_verifiers_variables_are_set(tmp_path: Path) -> None:
    """`verifier.env` reaches the tests and nothing else. Their first line names the interpreter."""
    folder = write_harbor(tmp_path / "add", "img:1")
    task = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(task.replace("[verifier]", '[verifier]\nenv = {A = "x y"}'))
    (folder / "tests/test.sh").write_text(PRINTS)

    instance = read(folder)

    assert output(instance.grading.files, ".perdure-tests/test.sh", tmp_path / "out") == "x y\n"
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
        ("\n[environment.healthcheck]\nretries = 2.5\n", "`environment.healthcheck`: retries"),
        ("gpus = 100\n", "`environment.gpus`: 'any:100'"),
        ("skills_dir = 3\n", "skills_dir"),
        ('os = "windows"\n', "`environment.os = 'windows'`, only 'linux'"),
        ('network_mode = "private"\n', "only 'public' and 'no-network' and 'allowlist'"),
        ('allowed_hosts = ["a.example"]\n', "`environment.allowed_hosts` needs `network_mode"),
        ('network_mode = "allowlist"\nallowed_hosts = ["http://a.example"]\n', "not an entry"),
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


def test_a_list_of_hosts_is_the_phases_own_or_its_environments(tmp_path: Path) -> None:
    """As in Harbor, `agent` and `verifier` override the policy of the environment."""
    more = 'network_mode = "allowlist"\nallowed_hosts = ["PyPI.org", "2001:db8::1"]\n'
    folder = write_harbor(tmp_path / "add", "img:1", more=more)
    task = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(
        task.replace("[verifier]", '[verifier]\nnetwork_mode = "no-network"')
    )

    phases = read(folder).phases

    assert phases.agent.network == ("2001:db8::1", "pypi.org")
    assert phases.grade.network is None


def test_all_that_is_not_done_is_refused_at_once(tmp_path: Path) -> None:
    more = 'gpus = -1\nos = "windows"\n\n[[steps]]\nname = "a"\n'
    folder = write_harbor(tmp_path / "add", "", more=more)
    write_compose(folder, "services: {db: {image: 'db:1', privileged: true, volumes: ['/d:/d']}}")

    with pytest.raises(InstanceError) as caught:
        read(folder)

    for name in ("steps", "environment.gpus", "environment.os", "db.privileged", "db.volumes"):
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
    modes = '[verifier]\nenvironment_mode = "shared"\nuser = "root"\ncollect = []'
    (folder / "task.toml").write_text("artifacts = []\n" + task.replace("[verifier]", modes))

    assert read(folder) == plain


SERVERS = """
[[environment.mcp_servers]]
name = "docs"
transport = "streamable-http"
url = "http://docs:8000/mcp"
headers = {Authorization = "Bearer ${DOCS}"}

[[environment.mcp_servers]]
name = "calc"
transport = "stdio"
command = "calculator"
args = ["--exact"]
"""


@pytest.mark.parametrize(
    ("host", "in_sandbox"),
    [
        ("docs", True),
        ("library", True),
        ("papers", True),
        ("Papers", True),
        ("localhost", True),
        ("main", True),
        ("docs.example", False),
    ],
)
def test_a_server_of_the_tasks_own_containers_is_in_the_sandbox(
    tmp_path: Path, host: str, in_sandbox: bool
) -> None:
    """Named by service, host name, network alias, or loopback. The gateway reaches only others."""
    more = SERVERS.replace("docs:8000", f"{host}:8000")
    folder = write_harbor(tmp_path / "add", "img:1", more=more)
    services = "services: {docs: {image: 'docs:1', hostname: PAPERS, networks: {default: {aliases: [library]}}}}"
    write_compose(folder, services)
    servers = read(folder).mcp_servers

    assert servers["docs"].in_sandbox is in_sandbox
    assert servers["docs"].is_behind_gateway is not in_sandbox
    assert not servers["calc"].is_behind_gateway


def test_agents_get_the_instruction_as_it_is(tmp_path: Path) -> None:
    """As in Harbor. It is no issue, and its folder may be no repository."""
    instance = read(write_harbor(tmp_path / "add", "img:1"))

    assert default_template(instance) == "{problem_statement}"


def test_the_folder_of_skills_is_read(tmp_path: Path) -> None:
    instance = read(write_harbor(tmp_path / "add", "img:1", more='skills_dir = "/skills"\n'))

    assert instance.skills_dir == "/skills"


def test_mcp_servers_are_read(tmp_path: Path) -> None:
    docs = {"url": "http://docs:8000/mcp", "headers": {"Authorization": "Bearer ${DOCS}"}}
    calc = {"command": "calculator", "args": ["--exact"]}
    instance = read(write_harbor(tmp_path / "add", "img:1", more=SERVERS))

    assert instance.mcp_servers == {
        "docs": McpServer.model_validate(docs),
        "calc": McpServer.model_validate(calc),
    }


def test_a_server_without_a_transport_speaks_sse(tmp_path: Path) -> None:
    """Harbor's default."""
    more = SERVERS.replace('transport = "streamable-http"', "")

    assert (
        read(write_harbor(tmp_path / "add", "img:1", more=more)).mcp_servers["docs"].type == "sse"
    )


COMPOSE = "services:\n  db: {image: redis}\n"


def test_artifacts_of_services_are_read(tmp_path: Path) -> None:
    """As in Harbor, one that overlaps an earlier one is left out, and the agent's container is first."""
    entries = (
        '{source = "/a", service = "db", exclude = ["*.log"]}, {source = "/a/b", service = "db"}, '
        '{source = "/c/d", service = "db"}, "/c", {source = "/logs/artifacts", service = "db"}, '
        '{source = "/c/d", service = "db", destination = "e"}'
    )
    hook = '\n[[verifier.collect]]\ncommand = "dump"\nservice = "db"\nuser = 999\n'
    task = separate(write_harbor(tmp_path / "add", "img:1", more=hook), entries)
    write_compose(task, COMPOSE)
    instance = read(task)

    assert instance.artifacts == {"/logs/artifacts": (), "/c": ()}
    assert instance.sidecar_artifacts == {"db": {"/a": ("*.log",), "/c/d": ()}}
    assert instance.grading.collect == (Collect(command="dump", service="db", user="999"),)


def test_a_provider_that_cannot_reach_into_sidecars_is_refused(tmp_path: Path) -> None:
    """Before the run."""
    task = separate(write_harbor(tmp_path / "add", "img:1"), '{source = "/a", service = "db"}')
    write_compose(task, COMPOSE)

    with pytest.raises(ConfigurationError, match="kubernetes cannot do: use --sandbox podman"):
        check_image(read(task), KubernetesProvider(Settings(home=tmp_path)))


def separate(folder: Path, artifacts: str, more: str = "") -> Path:
    """The task with a verifier of its own, whose image is built from tests/Dockerfile."""
    task = (folder / "task.toml").read_text()
    mode = '[verifier]\nenvironment_mode = "separate"\nenv = {A = "1"}'
    (folder / "task.toml").write_text(
        f"artifacts = [{artifacts}]\n" + task.replace("[verifier]", mode) + more
    )
    (folder / "tests/Dockerfile").write_text("FROM x\nWORKDIR /grading\nCOPY . /tests/\n")
    return folder


def test_tests_in_an_image_of_their_own(tmp_path: Path) -> None:
    """The agent's work reaches them as artifacts. Their limits and variables are their own."""
    more = "\n[verifier.environment]\nmemory_mb = 512\nenv = {B = '2'}\n"
    entries = '"/app/out", {source = "/app/b", exclude = ["*.o"]}'
    instance = read(separate(write_harbor(tmp_path / "add", "img:1"), entries, more))
    verifier = instance.grading.verifier

    assert verifier is not None
    assert instance.artifacts == {"/logs/artifacts": (), "/app/out": (), "/app/b": ("*.o",)}
    assert (verifier.cwd, verifier.has_tests) == ("/grading", True)
    assert verifier.environment.build == Build(path=str(tmp_path / "add/tests"))
    assert verifier.environment.env == {"A": "1", "B": "2"}
    assert instance.phases.grade.limits == LimitChanges(memory_mb=512)
    assert instance.grading.files == {}
    RewardFileGrader().validate(instance)


@pytest.mark.parametrize("mode", ['environment_mode = "separate"', "environment = {cpus = 1}"])
def test_a_separate_verifier_has_a_fresh_environment(tmp_path: Path, mode: str) -> None:
    """Without an image of its own it is the agent's, with the tests and the artifacts."""
    folder = write_harbor(tmp_path / "add", "img:1", "/work")
    task = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(task.replace("[verifier]", f"[verifier]\n{mode}"))
    instance = read(folder)
    verifier = instance.grading.verifier

    assert verifier is not None
    assert (verifier.environment.image, verifier.cwd) == ("img:1", "/work")
    assert ".perdure-tests/test.sh" in instance.grading.files
    assert list(instance.artifacts) == ["/logs/artifacts"]


@pytest.mark.parametrize(
    ("artifacts", "said"),
    [
        ('"out"', "'out' is not an absolute path"),
        ('"/"', "'/' is not an absolute path below /"),
        ('{source = "/app/x", service = "db"}', "/app/x is in the service 'db', which"),
    ],
)
def test_artifacts_that_cannot_be_kept_are_refused(
    tmp_path: Path, artifacts: str, said: str
) -> None:
    with pytest.raises(InstanceError, match=said):
        read(separate(write_harbor(tmp_path / "add", "img:1"), artifacts))


@pytest.mark.parametrize(
    ("more", "permits"),
    [
        ("allow_internet = true\n", True),
        ('network_mode = "public"\n', True),
        ('network_mode = "no-network"\nallow_internet = true\n', False),
        ("", False),
    ],
)
def test_a_permitted_network_is_noted_and_not_given(
    tmp_path: Path, more: str, permits: bool
) -> None:
    """Every task that Harbor writes permits one; a run says that its sandboxes have none."""
    instance = read(write_harbor(tmp_path / "add", "img:1", more=more))

    assert (instance.phases.agent.network, instance.phases.grade.network) == (None, None)
    assert ("permits_network" in instance.metadata) is permits


def test_a_phase_overrides_the_environments_network(tmp_path: Path) -> None:
    folder = write_harbor(tmp_path / "add", "img:1", more='network_mode = "public"\n')
    task = (folder / "task.toml").read_text()
    for table in ("agent", "verifier"):
        task = task.replace(f"[{table}]", f'[{table}]\nnetwork_mode = "no-network"')
    (folder / "task.toml").write_text(task)

    assert "permits_network" not in read(folder).metadata


def test_the_solutions_variables_are_set(tmp_path: Path) -> None:
    more = '\n[solution.env]\nA = "x y"\n'
    folder = write_harbor(tmp_path / "add", "img:1", more=more)
    (folder / "solution/solve.sh").write_text(PRINTS)

    assert output(read(folder).gold_script, "solve.sh", tmp_path / "out") == "x y\n"


@pytest.mark.parametrize(
    ("begins", "shown"),
    [
        ("<!-- a canary GUID 1 -->\n# canary\n\n", "add() subtracts.\n"),
        ("# Title\n<!-- canary -->\n", "# Title\n<!-- canary -->\nadd() subtracts.\n"),
    ],
)
def test_leading_canaries_are_not_shown(tmp_path: Path, begins: str, shown: str) -> None:
    """They mark text that no model may be trained on; as in Harbor, the agent does not see them."""
    folder = write_harbor(tmp_path / "add", "img:1")
    (folder / "instruction.md").write_text(f"{begins}add() subtracts.\n")

    assert read(folder).problem_statement == shown


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("trajectory.json", "trajectory.json continues"),
        ("tests/data/.harborignore", ".harborignore leaves out files"),
    ],
)
def test_files_that_harbor_uses_and_perdure_does_not(tmp_path: Path, file: str, said: str) -> None:
    folder = write_harbor(tmp_path / "add", "img:1")
    (folder / "environment/Dockerfile").unlink()
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("{}")

    with pytest.raises(InstanceError, match=said):
        read(folder)


def test_the_tests_may_be_only_in_their_image(tmp_path: Path) -> None:
    image = '[verifier.environment]\ndocker_image = "t:1"\nworkdir = "/srv"\n'
    folder = write_harbor(tmp_path / "add", "img:1", more=image)
    (folder / "tests/test.sh").unlink()
    instance = read(folder)

    assert instance.grading.files == {}
    RewardFileGrader().validate(instance)


def test_an_images_own_workdir_is_read_when_it_runs(tmp_path: Path) -> None:
    """As in Harbor, the Dockerfile beside a `docker_image` counts for nothing."""
    image = '[verifier.environment]\ndocker_image = "t:1"\n'
    folder = write_harbor(tmp_path / "add", "img:1", "", more=image)
    (folder / "environment/Dockerfile").write_text("FROM a\nWORKDIR /other\nUSER b\n")
    instance = read(folder)

    assert instance.environment.workdir == ""
    assert instance.grading.verifier is not None
    assert instance.grading.verifier.cwd == ""


async def test_files_beside_an_image_are_copied_into_its_workdir(tmp_path: Path) -> None:
    """As in Harbor, if there is neither a Dockerfile nor a compose file."""
    folder = write_harbor(tmp_path / "tasks/add", "img:1", "/work")
    (folder / "environment/Dockerfile").unlink()
    (folder / "environment/data.txt").write_text("d")
    store = LocalStore(tmp_path / "store")
    (ref,) = (await import_rows(store, folder)).refs
    build = (await instance_catalog.load(store, ref)).environment.build

    assert build is not None
    assert build.key is not None
    base_trees.unpack((await store.get(build.key)).data, tmp_path / "context")
    text = (tmp_path / "context/Dockerfile").read_text()
    assert text == "FROM img:1\nWORKDIR /work\nCOPY . .\n"
    assert (tmp_path / "context/data.txt").read_text() == "d"
    assert "Dockerfile" in (tmp_path / "context/.dockerignore").read_text().splitlines()


def test_a_shared_verifier_tests_the_agents_own_sandbox(tmp_path: Path) -> None:
    """Unless agent and tests reach different hosts. A separate one never does."""
    folder = write_harbor(tmp_path / "add", "img:1")
    shared = read(folder).grading.in_place
    task = (folder / "task.toml").read_text()
    hosts = '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]'
    (folder / "task.toml").write_text(task.replace("[verifier]", hosts))
    other_hosts = read(folder).grading.in_place
    mode = '[verifier]\nenvironment_mode = "separate"'
    (folder / "task.toml").write_text(task.replace("[verifier]", mode))

    assert (shared, other_hosts, read(folder).grading.in_place) == (True, False, False)


def test_a_health_check_gpus_and_commands_that_collect_are_read(tmp_path: Path) -> None:
    more = """gpus = 2
gpu_types = ["H100", "A100"]

[environment.healthcheck]
command = "ready"
start_period_sec = 9
retries = 2

[[verifier.collect]]
command = "dump"

[[verifier.collect]]
command = "sync"
service = "main"
timeout_sec = 3
"""
    instance = read(write_harbor(tmp_path / "add", "img:1", more=more))

    assert instance.environment.healthcheck == Healthcheck(
        command=("bash", "-c", "ready"), interval_s=5, timeout_s=30, retries=2, start_period_s=9
    )
    assert instance.phases.agent.limits.gpu == "H100:2"
    assert instance.grading.collect == (
        Collect(command="dump"),
        Collect(command="sync", timeout_s=3),
    )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('command = "x"\nservice = "db"\n', "a command is in the service 'db', which"),
        ('command = "x"\nuser = "db"\n', "`user = 'db'`, only 'root'"),
        ("timeout_sec = 3\n", "command"),
    ],
)
def test_commands_that_cannot_collect_are_refused(tmp_path: Path, entry: str, said: str) -> None:
    with pytest.raises(InstanceError, match=f"`verifier.collect`.*{said}"):
        read(write_harbor(tmp_path / "add", "img:1", more=f"\n[[verifier.collect]]\n{entry}"))


@pytest.mark.parametrize("folder", ["environment", "tests"])
def test_an_image_of_another_user_is_refused(tmp_path: Path, folder: str) -> None:
    task = separate(write_harbor(tmp_path / "add", ""), "")
    (task / folder / "Dockerfile").write_text("FROM a\nUSER root\nWORKDIR /b\nUSER agent:agent\n")

    with pytest.raises(InstanceError, match=f"USER of {folder}/Dockerfile is 'agent:agent'"):
        read(task)


def test_an_image_is_built_from_the_dockerfile(tmp_path: Path) -> None:
    """Without `docker_image`. One WORKDIR may be relative to another; other stages' do not count."""
    more = "build_timeout_sec = 90\n"
    folder = write_harbor(tmp_path / "add", "", "", more=more)
    (folder / "environment/Dockerfile").write_text(
        'FROM a AS b\nWORKDIR /b\nFROM b\nworkdir "/srv"\nWORKDIR app\n'
    )
    environment = read(folder).environment

    assert environment.image is None
    assert environment.build == Build(path=str(folder / "environment"), timeout_s=90)
    assert environment.workdir == "/srv/app"


def test_a_task_without_any_image_is_refused(tmp_path: Path) -> None:
    folder = write_harbor(tmp_path / "add", "")
    (folder / "environment/Dockerfile").unlink()

    with pytest.raises(InstanceError, match="no environment/Dockerfile and no"):
        read(folder)


def test_the_workdir_of_a_dockerfile_may_depend_on_its_base(tmp_path: Path) -> None:
    folder = write_harbor(tmp_path / "add", "", "")
    (folder / "environment/Dockerfile").write_text("FROM a\nWORKDIR $X\n")

    assert read(folder).environment.workdir == ""


async def test_the_import_stores_the_build_context_by_its_content(tmp_path: Path) -> None:
    """Two tasks with equal contexts have one image; another byte makes another."""
    for name in ("one", "two", "three"):
        write_harbor(tmp_path / "tasks" / name, "")
    (tmp_path / "tasks/three/environment/more").write_bytes(b"\r\n")
    store = LocalStore(tmp_path / "store")

    report = await import_rows(store, tmp_path / "tasks")
    one, three, two = [(await instance_catalog.load(store, ref)).environment for ref in report.refs]
    assert three.build is not None
    assert three.build.key is not None
    base_trees.unpack((await store.get(three.build.key)).data, tmp_path / "unpacked")

    assert one == two
    assert one.image != three.image
    assert three.image == f"localhost/perdure-build:{three.build.key.rpartition('/')[2][:40]}"
    assert (tmp_path / "unpacked/more").read_bytes() == b"\r\n"
    assert (tmp_path / "unpacked/Dockerfile").is_file()


async def test_a_build_context_that_is_too_large_is_a_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_contexts, "MOST_MB", 1)
    folder = write_harbor(tmp_path / "tasks" / "one", "")
    with (folder / "environment/large").open("wb") as file:
        file.truncate(2 << 20)

    report = await import_rows(LocalStore(tmp_path / "store"), tmp_path / "tasks")

    assert report.refs == []
    assert "row 1: tasks/one: the build context" in report.problems[0]
    assert "has 2 MB, and at most 1 are allowed" in report.problems[0]


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        (b"1\n", {"reward": 1.0}),
        (b".5", {"reward": 0.5}),
        (b'{"reward": 0.5, "style": -3}', {"reward": 0.5, "style": -3.0}),
        (b'{"passed": true}', {"passed": 1.0}),
    ],
)
def test_rewards(text: bytes, rewards: dict[str, float]) -> None:
    """Any finite numbers by name, or one number, as Harbor reads them."""
    assert parse_reward_file(text) == (rewards, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "wrote no reward"),
        (b"NaN", "not a finite number"),
        (b'{"a": 1e999}', "'a' is not a finite number"),
        (b'{"a": "1"}', "'a' is not a finite number"),
        (b'{"a\\u001b[2J": 1}', "printable characters"),
        (b"{}", "at least one reward"),
        (b'{"a": 1', "unreadable"),
        (json.dumps(dict.fromkeys(map(str, range(33)), 1)).encode(), "at most 32 are allowed"),
        (b"9" * 400, "not a finite number"),
        (b'{"a": %s}' % (b"9" * 400), "not a finite number"),
    ],
)
def test_what_is_no_reward_is_told(text: bytes, said: str) -> None:
    """The verdict's reason says what is wrong with the file."""
    found = parse_reward_file(text)

    assert found.rewards == {}
    assert said in found.problem


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
