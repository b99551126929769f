"""An instance: the source of its tree, its environment, and how its patch is graded."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints

from perdure.types.base import Bytes, Frozen
from perdure.types.containers import MAIN, Build, Healthcheck, SharedFolder, Sidecars
from perdure.types.identifier_patterns import Slug
from perdure.types.mcp_servers import McpServers
from perdure.types.resource_limits import Phases
from perdure.types.simulated_users import SimulatedUser


class SourceKind(StrEnum):
    PYPI_SDIST = "pypi-sdist"
    """`requirement` names a source distribution on PyPI, whose tree becomes the base repository."""
    BLOB = "blob"
    """`key` names a tar.gz of the base tree in the store."""
    DIRECTORY = "directory"
    """`path` names a tree on the worker's host (laptop and tests only)."""
    GIT = "git"
    """The `commit` of the repository `url`, which may be a path on the worker's host."""
    EMPTY = "empty"
    """The agent starts in an empty folder: the task has no repository."""
    IMAGE = "image"
    """The tree is already in the environment's image, at `workdir`."""


class Source(Frozen):
    """The source of the base tree. The tree becomes a repository with exactly one commit."""

    kind: SourceKind
    requirement: str | None = None
    key: str | None = None
    path: str | None = None
    url: str | None = None
    commit: str | None = None


class Environment(Frozen):
    """What the repository needs to run. It is prepared once per instance and shared read-only.

    `install`: shell lines that run once in `$REPO`, in a sandbox that reaches the package index and
    sets `$VENV`, `$REPO` and `$WORK` (a scratch directory). `env` is set for the agent and the
    tests.
    """

    image: str | None = None
    build: Build | None = None
    """Makes `image` on a host that lacks it. The import names `image` by the context's digest."""
    python: str = "3.11"
    install: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str = "/testbed"
    """Empty: the WORKDIR of `image`."""
    remove: tuple[str, ...] = ()
    """Absolute paths in the image that would reveal the tests or the fix. Every sandbox removes
    them before the agent or the tests start."""
    sidecars: Sidecars = Field(default_factory=dict)
    """Containers next to the sandbox's own, such as a database, by the name that reaches them."""
    folders: tuple[SharedFolder, ...] = ()
    """Folders that the sandbox's own container shares with sidecars."""
    healthcheck: Healthcheck | None = None
    """Must pass in the agent's sandbox before the agent starts."""

    @property
    def containers(self) -> "tuple[Environment, ...]":
        """This environment, then the images of its sidecars as environments."""
        sidecars = self.sidecars.values()
        return self, *(Environment(image=one.image, build=one.build) for one in sidecars)


class OutputParser(Frozen):
    """A script that runs the tests, and a program that parses its output on the host."""

    run: str
    """Shell lines. `$1` is `arguments`."""
    arguments: str = ""
    program: str
    """Python code. Its arguments are the paths of stdout, of stderr and of the JSON file to write:
    {"tests": [{"name": ..., "status": "PASSED"}]}."""


class CommittedTests(Frozen):
    """Hidden tests as files of a later commit in the image's repository."""

    commit: str
    paths: tuple[str, ...]


class Verifier(Frozen):
    """A separate environment for the tests. They see the instance's artifacts, but not the diff."""

    environment: Environment
    cwd: str
    """The folder in which the tests start. Empty: the WORKDIR of the image."""
    has_tests: bool
    """Its image contains the tests; otherwise `Grading.files` are written as usual."""


class Collect(Frozen):
    """A shell command that runs when the agent has ended, before the artifacts are taken. As in Harbor,
    its failure changes nothing."""

    command: str
    service: str = MAIN
    """The container in which it runs: the sandbox's own, or a sidecar."""
    user: str | None = None
    """User in a sidecar. None: the container's own."""
    timeout_s: float = Field(60.0, gt=0)


class Twin(Frozen):
    """A hidden test with one expectation changed, so that it fails if the test passes.

    A twin is one line of the file as `test_patch` leaves it, and the line that replaces it. Both
    are without the trailing newline. `perdure.graders.twins` chooses and uses twins.
    """

    tests: tuple[str, ...]
    """The FAIL_TO_PASS ids that the twin makes fail: all ids of one test function, or of one
    case of its table."""
    path: str
    line: int
    """1-based line number in the file as `test_patch` leaves it."""
    before: Bytes
    after: Bytes
    rule: str
    """The rule of `expectation_mutation` that made the twin."""
    weak: bool = False
    """A reader who knows the rules could tell it from its original. A success that only weak twins
    checked is marked."""


class TwinDraw(Frozen):
    """Twins that a grading uses together: one for each test function that has any, or
    for each case of its table.

    Calibration has proven exactly these runs under the gold patch, because a twin that fails can
    change what later tests find. `perdure.graders.twins.twin_draw` adds a run of originals only.
    """

    runs: tuple[tuple[Twin, ...], ...]
    """The twins of each run; all other tests of a run are originals."""


def distinct_twins(draws: Iterable[TwinDraw]) -> tuple[Twin, ...]:
    """The twins of all draws, each once."""
    return tuple(dict.fromkeys(twin for draw in draws for run in draw.runs for twin in run))


class Grading(Frozen):
    """The grader's input. All of it is hidden from the agent's sandbox.

    `protocol` names a grader of the registry: `swebench` (F2P / P2P lists), `eval_cmd` (exit code 0
    = resolved), `swepro` (lists, with the row's own parser), `status_map` (the expected status of
    every test), `multi_swe` (three stages) or `reward_file` (a script writes the reward).
    """

    protocol: str = "swebench"
    test_patch: Bytes = b""
    test_cmd: str | None = None
    log_parser: str = "pytest"
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    eval_cmd: str | None = None
    parser: OutputParser | None = None
    """For `swepro`."""
    expected: dict[str, str] = Field(default_factory=dict)
    """For `status_map`: the status of each test after the reference fix."""
    must_not_fail: tuple[str, ...] = ()
    """For `multi_swe`: tests that pass without the fix. They may be missing, but must not fail."""
    files: dict[str, Bytes] = Field(default_factory=dict)
    """Hidden files by path below the workdir. The grader writes them after it applies the diff."""
    tests_from: CommittedTests | None = None
    """Becomes `files` in the grader's sandbox, before later commits are removed."""
    pre_commands: tuple[str, ...] = ()
    """Shell lines that set the tree to its base. If the tree is in an image, they run in the
    agent's sandbox too, before later commits are removed."""
    patch_include: tuple[str, ...] = ()
    """Globs of paths. Only matching paths of a model's diff are graded; all if empty. `*` also
    matches `/`, as in `git apply --include`."""
    patch_exclude: tuple[str, ...] = ()
    """Globs of paths that are dropped from a model's diff, such as `Lib/test/*`."""
    timeout_s: float = 1800.0
    verifier: Verifier | None = None
    """For `reward_file`. None: the tests run in the instance's environment."""
    collect: tuple[Collect, ...] = ()
    in_place: bool = False
    """The tests run in the agent's own sandbox. So they see what it left outside the tree, such as
    the content of a database or a server that still runs."""
    twin_draws: tuple[TwinDraw, ...] = ()
    """The draws that calibration has proven. Each grading picks one per pair."""
    canary: bool = False
    """Calibration has proven that a canary added to `test_patch` fails and disturbs no other test.
    Runners of Python need no proof."""


class Instance(Frozen):
    """One problem: repository state, problem statement, environment and grader.

    It is stored at `instances/<dataset>/<instance_id>.json`. `gold_patch`, `gold_script` and
    `grading` never enter the agent's sandbox, except that the `oracle` agent applies the gold patch
    or runs the script.

    Example:
        Instance(instance_id="click-8.1.3", dataset="first-steps", data_source="release-pair",
                 problem_statement="...", source=Source(kind="blob", key="blobs/sha256/ab/..."),
                 environment=Environment(install=("uv pip install -e .",)),
                 grading=Grading(test_cmd="pytest -rA tests/test_x.py", fail_to_pass=(...,)),
                 gold_patch=b"diff --git ...")
    """

    instance_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    dataset: Slug
    data_source: str = "swebench"
    """Routes the instance to its grader; `swebench` if the row names none."""
    repo: str = ""
    base_commit: str | None = None
    problem_statement: str
    prompt_template: str = ""
    """How agents get the problem statement: `perdure.agents.prompt_template`. Empty: as an issue of a
    repository, or as it is if there is no repository."""
    source: Source
    environment: Environment = Environment()
    grading: Grading = Grading()
    gold_patch: Bytes = b""
    gold_script: dict[str, Bytes] = Field(default_factory=dict)
    """For tasks whose reference solution is a script: `solve.sh` and the files in its folder."""
    artifacts: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Absolute path of a file or folder that is kept in addition to the diff -> tar patterns of
    what to leave out below it. The grader's sandbox gets them at the same paths."""
    sidecar_artifacts: dict[str, dict[str, tuple[str, ...]]] = Field(default_factory=dict)
    """Sidecar -> what is kept from its container, as in `artifacts`."""
    agent_timeout_s: float | None = None
    """The author's time limit for the agent. A request's `agent_budget_s` can only shorten it."""
    phases: Phases = Phases()
    """Requirements of this instance's sandboxes. A request overrides them."""
    mcp_servers: McpServers = Field(default_factory=dict)
    """Servers whose tools the agent may call. The worker's settings must allow the hosts of those
    that are not in the sandbox."""
    skills_dir: str = ""
    """The folder of the task's skills in the sandbox, if it has any. Relative to the workdir, or
    absolute."""
    user: SimulatedUser | None = None
    """Who writes the messages after the task. Hidden from the agent's sandbox."""
    created_at: str | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def ref(self) -> str:
        return f"{self.dataset}/{self.instance_id}"

    @property
    def artifact_paths(self) -> tuple[str, ...]:
        """The paths of all artifacts. The grader's sandbox gets them."""
        sidecars = (path for paths in self.sidecar_artifacts.values() for path in paths)
        return *self.artifacts, *sidecars

    @property
    def reads_sidecars(self) -> bool:
        """Whether something is taken from a sidecar's container, or runs in it."""
        services = (one.service for one in self.grading.collect)
        return bool(self.sidecar_artifacts) or any(name != MAIN for name in services)

    @property
    def environments(self) -> tuple[Environment, ...]:
        """The agent's environment, then the verifier's if it has one; each with its sidecars'."""
        verifier = self.grading.verifier
        tests = verifier.environment.containers if verifier else ()
        return *self.environment.containers, *tests
