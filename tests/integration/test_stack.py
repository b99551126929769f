"""`perdure up` to `perdure down` with everything real: server, gateway, workers, sandboxes, signals."""

import asyncio
import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.client import Client

from perdure.agents.base import EXEC_ID
from perdure.client import temporal_names
from perdure.client.temporal_client import connect
from perdure.errors import NotFound, SandboxLost
from perdure.instances import instance_catalog
from perdure.sandboxes.base import SandboxInfo
from perdure.sandboxes.host.host_processes import ProcessId
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness, stack_state, temporal_setup
from perdure.stack.stack_state import StackState
from perdure.storage.store_url import open_store
from perdure.types import Grading, Instance, Source, SourceKind
from tests import docs_pages, document_003, held_ports
from tests.stack.made_instances import GOLD
from workers.health_endpoints import wait_for_poller

pytestmark = pytest.mark.temporal

ROOT = Path(__file__).parents[2]
ENDED_WITHIN_MS = 60_000

SLOW = "sleep 1; "
"""CPU work that makes grading a sample long enough to be interrupted."""
ENDLESS = "sleep 600"
PRINTS_5 = GOLD.decode().replace("@@ -1,2 +1,2 @@", "@@ -1,2 +1,3 @@") + "+print(add(2, 3))\n"


@dataclass(frozen=True)
class Home:
    """A private home and the command that uses it."""

    path: Path
    metrics_port: int

    @property
    def settings(self) -> Settings:
        return Settings(home=self.path, metrics={"port": self.metrics_port})

    @property
    def outside(self) -> Path:
        """A user's own folder of modules."""
        return self.path.parent / "outside"

    @property
    def env(self) -> dict[str, str]:
        ours = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        return {
            **clean,
            "PERDURE_HOME": str(self.path),
            "PERDURE_HANDLERS": "my_source,document_handlers",
            "PYTHONPATH": os.pathsep.join([str(self.outside), *inherited]),
            "PERDURE_METRICS__PORT": str(self.metrics_port),
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        # A test run in the background ignores Ctrl-C; a person's shell does not.
        shell = ["env", "--default-signal=INT"]
        return subprocess.Popen(
            [*shell, sys.executable, "-m", "perdure.cli.main", *arguments],
            env=self.env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def perdure(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        with self.start(*arguments) as process:
            out, error = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, out, error)

    def json(self, *arguments: str) -> Any:
        done = self.perdure(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @property
    def state(self) -> StackState:
        state = stack_state.read(self.settings)
        assert state is not None
        return state


def ended(process: ProcessId) -> bool:
    """Wait until the process has ended; the limit is reached only if something is broken."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return not process.alive or bool(poll.poll(ENDED_WITHIN_MS))
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A stack that is up, with one small instance in its store."""
    folder = tmp_path_factory.mktemp("s")
    if missing := BubblewrapProvider(Settings(home=folder / "check")).check():
        pytest.skip("; ".join(missing))
    with held_ports.held(1) as (metrics_port,):
        home = made(folder, metrics_port)
        started = home.perdure("up")
        assert started.returncode == 0, started.stderr
        yield home
        home.perdure("down")


@pytest.fixture(scope="module")
def second(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Another checkout's home beside it."""
    second = made(tmp_path_factory.mktemp("s"), 0)
    yield second
    second.perdure("down")


@pytest.fixture
def other(second: Home) -> Home:
    """The same, with its stack up, even if an earlier test stopped it."""
    started = second.perdure("up")
    assert started.returncode == 0, started.stderr
    return second


def made(folder: Path, metrics_port: int) -> Home:
    tree = folder / "tree"
    tree.mkdir()
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    home = Home(folder / "h", metrics_port)
    home.outside.mkdir()
    (home.outside / "my_source.py").write_text(docs_pages.block("extend.md", "python handler"))
    (home.outside / "document_handlers.py").write_text(document_003.module())
    asyncio.run(_save(home, tree))
    return home


async def _save(home: Home, tree: Path) -> None:
    proof = "python3 -c 'import calc; assert calc.add(2, 3) == 5'"
    commands = {"add": proof, "add-slowly": SLOW + proof, "add-endlessly": ENDLESS}
    for name, command in commands.items():
        instance = Instance(
            instance_id=name,
            dataset="sums",
            problem_statement="add() subtracts.",
            source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
            grading=Grading(protocol="eval_cmd", eval_cmd=command),
            gold_patch=GOLD,
        )
        await instance_catalog.save(open_store(home.settings), instance)


@pytest.fixture
async def client(home: Home) -> Client:
    return await connect(home.state.temporal_address)


def test_a_second_up_finds_the_running_stack(home: Home) -> None:
    """A second `perdure up` starts nothing and answers with the same stack."""
    again = home.json("up")

    assert (again["started_now"], again["pid"], again["status"]) == (False, home.state.pid, "ready")


async def test_server_is_set_up_for_rollouts(home: Home, client: Client) -> None:
    """After `up` our search attributes exist and closed workflows are kept for a week."""
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

    missing = await temporal_setup.register_search_attributes(client)
    described = await client.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=client.namespace)
    )

    assert missing == []
    assert (
        described.config.workflow_execution_retention_ttl.ToTimedelta() == temporal_setup.RETENTION
    )


def test_doctor_finds_everything(home: Home) -> None:
    """On a running stack nothing is missing."""
    report = home.json("doctor")

    assert [f for f in report["findings"] if f["level"] == "missing"] == []


def test_run_prints_one_document(home: Home) -> None:
    """`perdure run --wait --json` answers with the graded rollouts and nothing else on stdout."""
    answer = home.json("run", "sums/add", "--agent", "oracle", "-n", "2", "--wait")

    assert [(r["sample_index"], r["outcome"], r["reward"]) for r in answer["rollouts"]] == [
        (0, "resolved", 1.0),
        (1, "resolved", 1.0),
    ]
    assert set(answer["rollouts"][0]) == {
        *("instance_id", "sample_index", "agent", "status", "outcome", "reward"),
        *("attempts", "seconds", "episode", "model"),
    }
    assert answer["rollouts"][0]["model"] == ""  # the oracle calls none


@pytest.mark.longer
def test_a_run_generates_first_and_is_graded_later(home: Home, tmp_path: Path) -> None:
    """Generating is a run without failures, whose patches can be exported and whose published score
    opens with its incompleteness. One command grades the rest, and changes nothing the second time."""
    made = home.json("run", "sums/add", "--agent", "oracle", "-n", "2", "--no-grade", "--wait")
    run_id = made["run_id"]
    predictions = json.loads(home.perdure("export", run_id, "-f", "preds", "-o", "-").stdout)
    by_status = home.json("status", run_id)["by_status"]
    before = published(home, run_id, tmp_path / "before")
    graded = home.json("grade", run_id)
    again = home.json("grade", run_id)
    after = published(home, run_id, tmp_path / "after")

    assert [one["status"] for one in made["rollouts"]] == ["ungraded", "ungraded"]
    assert by_status == {"ungraded": 2}
    assert "+    return a + b" in predictions["add"]["model_patch"]
    assert before["headline"].startswith("Incomplete: 0 of 2 rollouts have a verdict")
    assert [one["outcome"] for one in graded["rollouts"]] == ["resolved", "resolved"]
    assert again["rollouts"] == []
    assert (after["is_complete"], after["score"]["resolved"]) == (True, 2)
    assert published(home, run_id, tmp_path / "twice") == after
    pages = [(tmp_path / name / "report.html").read_bytes() for name in ("after", "twice")]
    assert pages[0] == pages[1]


async def _save_theirs(home: Home) -> None:
    store = open_store(home.settings)
    known = await instance_catalog.load(store, "sums/add")
    for name in ("good", "bad", "graded", "sampled"):
        update = {"instance_id": name, "dataset": "theirs"}
        await instance_catalog.save(store, known.model_copy(update=update))


@pytest.mark.longer
def test_another_programs_results_are_completed(home: Home, tmp_path: Path) -> None:
    """Its verdicts stay its own and out of our score. A patch without one is graded, an attempt that
    infrastructure ended is sampled. `retry` replaces a verdict by ours."""
    asyncio.run(_save_theirs(home))
    folder, broken = tmp_path / "out", {"exit_status": "APIError", "submission": ""}
    (folder / "sampled").mkdir(parents=True)
    (folder / "sampled" / "sampled.traj.json").write_text(json.dumps({"info": broken}))
    entry = {"model_name_or_path": "their-model", "model_patch": GOLD.decode()}
    names = ("good", "bad", "graded")
    (folder / "preds.json").write_text(json.dumps(dict.fromkeys(names, entry)))
    report = {"resolved_ids": ["good"], "unresolved_ids": ["bad"], "error_ids": ["graded"]}
    (folder / "m.night.json").write_text(json.dumps(report))
    command = ("adopt", str(folder), "--dataset", "theirs", "--run", "adopts", "-a", "oracle")

    done = home.json(*command)
    first = published(home, "adopts", tmp_path / "first")
    again = home.perdure(*command)
    replaced = home.json("retry", "adopts", "--outcome", "adopted")
    (folder / "m.night.json").write_text(json.dumps({**report, "unresolved_ids": []}))
    changed = home.perdure(*command)

    assert {r["instance_id"]: (r["status"], r["outcome"]) for r in done["rollouts"]} == {
        "good": ("adopted", None),
        "bad": ("adopted", None),
        "graded": ("graded", "resolved"),
        "sampled": ("graded", "resolved"),
    }
    agents = {r["instance_id"]: (r["agent"], r["model"]) for r in done["rollouts"]}
    assert agents["sampled"] == ("oracle", "")
    assert agents["graded"] == agents["good"] == ("mini-swe-agent", "their-model")
    assert (first["is_complete"], first["score"]["with_verdict"]) == (False, 2)
    assert first["headline"].startswith("Incomplete: 2 of 4 rollouts have a verdict")
    assert first["headline"].endswith(
        "(2 of SWE-bench): pass@1 75.0 % over 4 instances, 4 of 4 rollouts"
    )
    assert "verdicts kept: 2 of SWE-bench; patches to grade: 1; to sample: 1" in again.stderr
    assert "no verdict: 1 attempt: APIError" in again.stderr
    assert again.returncode == 0
    assert {r["outcome"] for r in replaced["rollouts"]} == {"resolved"}
    assert changed.returncode == 2
    assert "adopted_sha256" in changed.stderr


def published(home: Home, run_id: str, folder: Path) -> Any:
    """The published report. Its files name nothing of this machine."""
    done = home.perdure("report", run_id, "--publish", str(folder))
    assert done.returncode == 0, done.stderr
    texts = [(folder / name).read_text() for name in ("report.json", "report.html")]
    assert not [text for text in texts if str(home.path) in text or socket.gethostname() in text]
    return json.loads(texts[0])


def test_a_data_source_from_outside(home: Home) -> None:
    """The handler that docs/extend.md prints reads its rows, prepares sandboxes and gives the verdict."""
    row = {"id": "sum", "task": "add() subtracts.", "tree": str(home.outside.parent / "tree")}
    row |= {"program": "calc.py", "prints": "5", "gold": PRINTS_5, "data_source": "prints"}
    rows = home.outside / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")

    oracle = home.json("run", str(rows), "--agent", "oracle", "--wait")
    nop = home.json("run", "rows/sum", "--agent", "nop", "--wait")

    assert [r["rollouts"][0]["outcome"] for r in (oracle, nop)] == ["resolved", "unresolved"]
    episode = f"{oracle['run_id']}/rollouts/sum/0"
    store = Path(home.settings.store_url.removeprefix("file://"))
    booted = json.loads((store / "runs" / episode / "attempts/1/sandbox.json").read_bytes())
    assert booted["metadata"]["python"].startswith("Python 3.")


def test_a_task_without_a_repository(home: Home) -> None:
    """The row that docs/extend.md prints: its result is a folder, which no diff contains."""
    rows = home.outside / "research.jsonl"
    rows.write_text(docs_pages.block("extend.md", "json task"))

    oracle = home.json("run", str(rows), "--agent", "oracle", "--wait")
    nop = home.json("run", "research/primes-1", "--agent", "nop", "--wait")
    packed = subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", "show", f"{oracle['run_id']}/primes-1", "--artifacts"],
        env=home.env, check=True, capture_output=True,
    ).stdout  # fmt: skip

    assert [r["rollouts"][0]["outcome"] for r in (oracle, nop)] == ["resolved", "unresolved"]
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert tar.extractfile("work/out/count").read() == b"168\n"  # type: ignore[union-attr]  # a file


def rows_of(home: Home, source: str) -> str:
    """A file with one row of this data source, whose `add` subtracts."""
    row: dict[str, Any] = {
        "instance_id": source,
        "problem_statement": "add() subtracts.",
        "data_source": source,
    }
    row |= {"source": {"kind": "directory", "path": str(home.outside.parent / "tree")}}
    test = "diff --git a/t.py b/t.py\nnew file mode 100644\n--- /dev/null\n+++ b/t.py\n@@ -0,0 +1 @@\n+1\n"
    row |= {
        "patch": GOLD.decode(),
        "test_patch": test,
        "FAIL_TO_PASS": ["t"],
        "PASS_TO_PASS": [],
        "test_cmd": "true",
    }
    rows = home.outside / f"{source}.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    return str(rows)


def test_document_003s_handler_runs_as_it_is_printed(home: Home) -> None:
    """Only its import path is changed: its own `run` is the agent, its own `eval` the verdict."""
    printed = ROOT.parent / "shared" / "spec"
    for spec in printed.glob("003_*.txt"):
        assert document_003.DOCUMENT in spec.read_text()
    done = home.json("run", rows_of(home, "my_agent"), "--agent", "nop", "--wait")

    assert [r["outcome"] for r in done["rollouts"]] == ["resolved"]


@pytest.mark.parametrize(
    ("name", "said"), [("broken", "(runtime, metadata, config)"), ("raises", "KeyError: 'image'")]
)
def test_a_failing_hook_is_named(home: Home, name: str, said: str) -> None:
    """The failure names the handler and the hook."""
    done = home.perdure("run", rows_of(home, name), "--agent", "nop", "--wait", "--json")

    assert f"`init` of the handler '{name}'" in done.stdout + done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.longer
def test_a_cpython_row_as_a_folder(home: Home) -> None:
    """Two commits of a repository, `./configure && make test`, in a plain folder: no image is needed.
    The base's own suite passes, which is the upper bound, and fails with the merge's tests."""
    tree, task = home.outside.parent / "upstream", home.outside / "tasks" / "python__cpython-1"
    task.mkdir(parents=True)
    base, merge = cpython_repository(tree)
    row: dict[str, Any] = {"repo": "python/cpython", "base_commit": base, "merge_commit": merge}
    row |= {"source": {"kind": "git", "url": str(tree)}, "ignore": ["flaky"]}
    (task / "row.json").write_text(json.dumps(row))
    (task / "problem.md").write_text("add() subtracts.")

    oracle = home.json("run", str(task.parent), "--agent", "oracle", "--wait")
    nop = home.json("run", "tasks/python__cpython-1", "--agent", "nop", "--wait")
    suite = home.json("run", "tasks/python__cpython-1", "--agent", "base_suite", "--wait")
    (report, *_) = home.json("report", nop["run_id"], suite["run_id"])["runs"]

    ended = [run["rollouts"][0]["outcome"] for run in (oracle, nop, suite)]
    assert ended == ["resolved", "unresolved", "resolved"]
    assert (report["resolved_share"]["mean"], report["bounds"]["base_suite"]) == (0.0, 1.0)


def cpython_repository(tree: Path) -> tuple[str, str]:
    """A merge that fixes Lib/calc.py and adds its test; the suite obeys TESTOPTS. Base and merge."""
    git = ["git", "-C", str(tree), "-c", "user.name=u", "-c", "user.email=u@x"]
    suite = "import sys\nassert sys.argv[1:] == ['--ignore', 'flaky']\nsys.path.insert(0, 'Lib')\n"
    makefile = "test:\n\ttest -f configured\n\tpython3 Lib/test/suite.py $(TESTOPTS)\n"
    files = {
        "configure": "#!/bin/sh\ntouch configured\n",
        "Makefile": makefile,
        "Lib/calc.py": "def add(a, b):\n    return a - b\n",
        "Lib/test/suite.py": suite,
    }
    fixed = {
        "Lib/calc.py": "def add(a, b):\n    return a + b\n",
        "Lib/test/suite.py": f"{suite}import calc\nassert calc.add(2, 3) == 5\n",
    }
    (tree / "Lib" / "test").mkdir(parents=True)
    subprocess.run([*git, "init", "-q"], check=True)
    commits = []
    for state in (files, fixed):
        for name, text in state.items():
            (tree / name).write_text(text)
        (tree / "configure").chmod(0o755)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
        found = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
        commits.append(found.strip())
    return commits[0], commits[1]


def test_no_other_user_reads_the_home(home: Home) -> None:
    """Database, logs, journal, sockets and results of a running stack are its user's alone."""
    assert home.path.stat().st_mode & 0o077 == 0
    mounted = {"environments", "sandboxes", "tools"}
    for folder in [path for path in home.path.iterdir() if path.name not in mounted]:
        closed_whole = (
            folder.name == "git"
        )  # git makes the files of a repository, whose folder is closed
        for path in (folder, *(folder.iterdir() if closed_whole else folder.rglob("*"))):
            if "locks" not in path.parts:
                assert path.stat().st_mode & 0o077 == 0, path


def test_show_prints_the_rollout_and_its_patch_byte_for_byte(home: Home) -> None:
    """`perdure show` says how a rollout ended, and --patch prints only the diff."""
    run_id = home.json("run", "sums/add", "--agent", "oracle", "--new", "--wait")["run_id"]

    told = home.perdure("show", f"{run_id}/add")
    patch = home.perdure("show", f"{run_id}/add", "--patch").stdout

    assert "graded, resolved" in told.stdout
    assert "none was called" in told.stdout
    assert "+    return a + b\n" in patch
    assert patch.startswith("diff --git a/calc.py")


@pytest.mark.longer
def test_an_interrupted_run_continues_and_is_joined(home: Home) -> None:
    """Ctrl-C does not stop a run and says how to follow it again; the same command joins it."""
    command = ("run", "sums/add-slowly", "--agent", "oracle", "-n", "12", "-c", "1")
    with home.start(*command) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " running" in line and " 0 running" not in line:  # a group starts whole
                break
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()

    again = home.perdure(*command)

    assert (process.returncode, "Detached; the run continues." in told) == (130, True)
    assert any(line.startswith("Joined: ") for line in again.stderr.splitlines())
    assert "12 rollouts" in again.stdout


def test_runs_can_be_listed_exported_and_cancelled(home: Home) -> None:
    """A run that was started detached shows up in `status`, and `cancel` ends it."""
    started = home.json("run", "sums/add-endlessly", "-a", "nop", "-n", "4", "--detach")
    run_id = started["run_id"]
    end = time.monotonic() + 300
    while home.json("status", run_id)["total"] != 4:
        assert time.monotonic() < end, "the run is not prepared"
        time.sleep(part_readiness.PAUSE_S)

    home.json("cancel", run_id)
    watched = home.perdure("watch", run_id)

    listed = {run["run_id"]: run for run in home.json("status")["runs"]}
    assert run_id in listed
    assert watched.returncode in (0, 1)
    assert listed[run_id]["by_status"] == {"cancelled": 4}


def test_cancelling_a_finished_rollout_changes_nothing(home: Home) -> None:
    """Cancelling a closed rollout or run exits with 1 and one line that says how it ended."""
    run_id = home.json("run", "sums/add", "--agent", "oracle", "--wait")["run_id"]

    rollout = home.perdure("cancel", f"{run_id}/add/0")
    run = home.perdure("cancel", run_id)

    assert (rollout.returncode, run.returncode) == (1, 1)
    assert "had ended before (resolved, reward 1)" in rollout.stderr
    assert "had ended before (completed)" in run.stderr


def test_worker_serves_temporals_metrics_and_ours(home: Home) -> None:
    """One port of the worker serves the metrics of Temporal's SDK and of Perdure."""
    with urllib.request.urlopen(f"http://127.0.0.1:{home.metrics_port}/metrics") as answer:
        text = answer.read().decode()

    assert "temporal_worker_task_slots_available" in text


def test_killed_part_is_started_again(home: Home) -> None:
    """After kill -9 of the gateway the supervisor starts another one, and its state says why."""
    before = home.state.children["gateway"]
    os.kill(before.pid, signal.SIGKILL)
    assert ended(before.process)

    asyncio.run(_restarted(home, "gateway", before.restarts + 1))

    after = home.state.children["gateway"]
    assert (after.last_exit, after.pid != before.pid) == ("killed by SIGKILL", True)
    assert asyncio.run(part_readiness.answers(f"{home.state.gateway_url}/healthz"))


async def _restarted(home: Home, name: str, times: int) -> None:
    async with asyncio.timeout(ENDED_WITHIN_MS / 1000):
        while home.state.children[name].restarts < times:
            await asyncio.sleep(part_readiness.PAUSE_S)
        await part_readiness.wait_for_http(f"{home.state.gateway_url}/healthz")


COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
STAGE_QUEUES = {
    "worker-workflows": (temporal_names.WORKFLOWS_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
    "worker-boot": (temporal_names.BOOT_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    "worker-agent": (temporal_names.AGENT_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    "worker-grade": (temporal_names.GRADE_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    "worker-io": (temporal_names.IO_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
}


@pytest.mark.longer
@pytest.mark.parametrize("service", STAGE_QUEUES)
async def test_compose_worker_polls_its_stage(service: str, home: Home, client: Client) -> None:
    """The command of each worker service polls its queue, and ends cleanly at SIGTERM."""
    command = [sys.executable, *COMPOSE["services"][service]["command"][1:]]
    env = {
        **home.env,
        "TEMPORAL_ADDRESS": home.state.temporal_address,
        "PERDURE_METRICS__PORT": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), home.env["PYTHONPATH"]]),
    }
    queue, kind = STAGE_QUEUES[service]
    process = await asyncio.create_subprocess_exec(*command, env=env, cwd=ROOT)
    ended = asyncio.create_task(process.wait())
    identity = f"{process.pid}@{socket.gethostname()}"  # the SDK's default
    polls = asyncio.create_task(wait_for_poller(client, queue, kind, identity))
    try:
        await asyncio.wait({ended, polls}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert (polls.done(), process.returncode) == (True, None)
    finally:
        polls.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()

    assert await ended == 0


@pytest.mark.longer
def test_two_homes_run_side_by_side(home: Home, other: Home) -> None:
    """A second checkout's stack picks other ports."""
    mine, theirs = home.state, other.state

    assert mine.temporal_address != theirs.temporal_address
    assert mine.ui_url != theirs.ui_url


@pytest.mark.longer
def test_a_killed_supervisor_leaves_no_process(other: Home) -> None:
    """After kill -9 of the supervisor its children end, and `up` works again, twice at once."""
    killed = other.state
    os.kill(killed.pid, signal.SIGKILL)
    left = [name for name, c in killed.children.items() if not ended(c.process)]

    both = [other.start("up"), other.start("up")]
    said = [command.communicate()[1] for command in both]

    assert left == []
    assert [command.returncode for command in both] == [0, 0]
    assert sorted("Already running" in text for text in said) == [False, True]


@pytest.mark.longer
def test_a_run_survives_down_and_up(home: Home, other: Home) -> None:
    """`down` in the middle of a run ends its sandboxes and processes and not those of another stack;
    after the next `up` the run finishes."""
    provider = BubblewrapProvider(Settings(home=other.path))
    command = ("run", "sums/add", "-a", "tests.slow_oracle:SlowOracle", "-n", "4", "-c", "2")
    run_id = other.json(*command, "--detach")["run_id"]
    asyncio.run(_agent_at_work(provider))
    before = other.state
    down = other.perdure("down")
    left = [box for box in asyncio.run(provider.list()) if box.alive]
    after = [name for name, c in before.children.items() if not ended(c.process)]

    assert (left, after, ended(before.supervisor), home.state.alive) == ([], [], True, True)
    assert down.stdout.startswith("Stopped: ")
    assert other.perdure("down").stdout == "Nothing is running.\n"

    other.perdure("up")
    rollouts = other.json("watch", run_id)["rollouts"]

    assert [rollout["outcome"] for rollout in rollouts] == ["resolved"] * 4


async def _agent_at_work(provider: BubblewrapProvider) -> None:
    async with asyncio.timeout(ENDED_WITHIN_MS / 1000):
        while not [box for box in await provider.list() if await _works(provider, box)]:
            await asyncio.sleep(part_readiness.PAUSE_S)


async def _works(provider: BubblewrapProvider, box: SandboxInfo) -> bool:
    try:
        status = await (await provider.attach(box.identity)).poll(EXEC_ID)
    except (NotFound, SandboxLost):  # not started yet, or over
        return False
    return not status.done
