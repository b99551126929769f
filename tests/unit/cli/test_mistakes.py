"""Mistakes of newcomers: each is one line that names what was given and the fix, before anything starts.

Each command runs in this process, in a home with one dataset. Mistakes that only a server can tell are
in `tests/workflows/test_mistakes.py`.
"""

import asyncio
import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from botocore.exceptions import NoCredentialsError

from perdure.cli.commands.run_options import FAILURES
from perdure.cli.main import invoke
from perdure.errors import ConfigurationError, StoreUnavailable
from perdure.instances import instance_catalog
from perdure.sandboxes.host import sandbox_programs
from perdure.settings.settings_loader import load_settings
from perdure.stack.error_lines import explain
from perdure.storage.s3_errors import Place
from perdure.storage.store_url import open_store
from perdure.types import (
    Grading,
    GroupRequest,
    Instance,
    RolloutRequest,
    RunRequest,
    Sampling,
    Source,
    SourceKind,
)
from perdure.types.requests import FailureType
from tests.checkout_paths import ROOT

TESTS = ROOT / "tests"

ROW: dict[str, Any] = {
    "instance_id": "a-1",
    "repo": "a/a",
    "source": {"kind": "pypi-sdist", "requirement": "a==1"},
    "base_commit": "0" * 40,
    "problem_statement": "It is broken.",
    "patch": "diff --git a/x b/x\n",
    "test_patch": "diff --git a/t b/t\n",
    "test_cmd": "pytest -rA t.py",
    "FAIL_TO_PASS": ["t"],
    "PASS_TO_PASS": [],
}
FILES: dict[str, str] = {
    "two.jsonl": f"{json.dumps(ROW)}\n{json.dumps({**ROW, 'instance_id': 'b', 'FAIL_TO_PASS': []})}",
    "mute.jsonl": json.dumps({k: v for k, v in ROW.items() if k != "problem_statement"}),
    "torn.jsonl": f'{json.dumps(ROW)}\n{{"instance_id": ',
    "prose.jsonl": json.dumps({**ROW, "patch": "this is not a diff"}),
    "outside.jsonl": json.dumps({**ROW, "instance_id": "../../etc/x"}),
    "twice.jsonl": f"{json.dumps(ROW)}\n{json.dumps(ROW)}",
    "empty.jsonl": "",
    "table.csv": "a,b\n",
    "unknown.json": json.dumps({"nope": {"instance_id": "nope", "model_patch": ""}}),
    "torn.json": "[1, 2",
    "image.jsonl": json.dumps({**ROW, "source": None, "image": "example.org/a:1"}),
    "wrapped.json": json.dumps({"rows": [ROW]}),
    "keyed.json": json.dumps({"a-1": ROW}),
    "preds.jsonl": json.dumps({"instance_id": "a", "model_name_or_path": "m", "model_patch": ""}),
    "patchless.json": json.dumps([{"instance_id": "h11-0.14.0"}]),
    "two_models.json": json.dumps(
        [{"instance_id": "a", "model_name_or_path": m, "model_patch": ""} for m in "mn"]
    ),
    "numbers.json": "[1, 2]",
    "wrong.toml": "[gateway]\nprot = 3\n",
    "fair.toml": '["gpt*"]\ninput = 1\noutput = 2\n',
    "dear.toml": '["gpt*"]\ninput = "much"\n',
}
NAMES = ("h11-0.14.0", "click-8.1.3", "pathspec-0.11.1")
DRY = "run first-steps -a oracle --dry-run"
MODEL = "run first-steps -a mini_swe_agent --dry-run"
AWAY = {
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HTTPS_PROXY": "",
    "https_proxy": "",
    "ALL_PROXY": "",
    "all_proxy": "",
}

COMMAND_LINES: list[tuple[str, dict[str, str], str]] = [
    # what was given is no word of ours
    (
        "run first-steps --agnet x",
        {},
        r"no such option '--agnet'. \(Did you mean one of: '--agent'",
    ),
    ("runn", {}, r"there is no command 'runn'. Did you mean 'run'\?"),
    ("run first-steps -a oracel", {}, r"unknown agent 'oracel': did you mean 'oracle'\?"),
    (f"{DRY} --sandbox bubblewarp", {}, r"'bubblewarp': did you mean 'bubblewrap'\?"),
    ("export r -f hf", {}, r"'hf' is not one of 'preds'"),
    ("retry r --outcome bad", {}, r"no run 'r' in .*`perdure status` lists the runs"),
    ("run first-steps extra", {}, r"unexpected extra argument \(extra\)"),
    ("engines ad", {}, r"[Nn]o such command 'ad'"),
    ("instances bulid x", {}, r"[Nn]o such command 'bulid'"),
    # sources
    ("run frist-steps --dry-run", {}, r"no dataset 'frist-steps' .*did you mean 'first-steps'\?"),
    ("run first-steps/h11-0.14 -a oracle", {}, r"did you mean first-steps/h11-0.14.0\?"),
    ("run first-steps/nope -a oracle", {}, r"it has 3 of first-steps, such as first-steps/click"),
    ("run nofile.jsonl", {}, r"no rows at 'nofile.jsonl': give a .jsonl, .json or .parquet file"),
    ("run two.jsonl", {}, r"row 2 lacks `FAIL_TO_PASS`: list the tests .*; skip it with --skip-b"),
    ("run mute.jsonl", {}, r"row 1 lacks `problem_statement`"),
    ("run torn.jsonl", {}, r"row 2 is not valid JSON: .*; skip it with --skip-bad-rows"),
    ("run prose.jsonl", {}, r"`patch` is not a git diff: line 1: expected 'diff --git'"),
    ("run outside.jsonl", {}, r"bad `instance_id`: '../../etc/x' must be letters, digits"),
    ("run twice.jsonl", {}, r"row 2 repeats the `instance_id` 'a-1' of an earlier row"),
    ("run empty.jsonl", {}, r"no usable rows: it must hold one JSON object per instance"),
    (
        "run wrapped.json",
        {},
        r"row 1: it contains rows: make each one an entry of the file's list",
    ),
    ("run keyed.json", {}, r"row 1: it contains rows"),
    ("instances import preds.jsonl", {}, r"it is a prediction: `perdure grade SOURCE -p FILE`"),
    ("instances import unknown.json", {}, r"predictions \(`perdure grade SOURCE -p FILE` grades"),
    ("run image.jsonl -a oracle", {}, r"sandbox bubblewrap cannot run: use --sandbox podman or"),
    ("run image.jsonl -a oracle --dry-run", {}, r"which --sandbox bubblewrap cannot run"),
    ("run table.csv", {}, r"table.csv is not a file of rows: give a .jsonl, .json, .parquet file"),
    ("run", {}, r"missing argument 'SOURCE'"),
    ("run ''", {}, r"SOURCE is empty: name a dataset, an instance, or a file of rows"),
    ("run owner/name --dry-run", AWAY, r"hub at 127.0.0.1:9 cannot be reached .*HF_ENDPOINT"),
    (f"{DRY} -i zzz*", {}, r"select none of 3 instances \(such as click-8.1.3"),
    ("instances build nope", {}, r"no recipe 'nope': give one of .*first-steps"),
    ("instances show first-steps/nope", {}, r"it has 3 of first-steps, such as"),
    ("instances list nope", {}, r"no dataset 'nope' in .*\(it has: first-steps\)"),
    ("instances import nofile.jsonl", {}, r"no rows at 'nofile.jsonl'"),
    ("instances calibrate nope", {}, r"no dataset 'nope'"),
    # fields
    (f"{MODEL} --set sampling.temprature=1", {}, r"no such field; did you mean temperature\?"),
    (
        f"{MODEL} --set zzz=1",
        {},
        r"zzz: there is no such field; the fields are .*agent_budget",
    ),
    (f"{MODEL} --set temperature=0.5", {}, r"no such field; did you mean sampling.temperature\?"),
    (f"{MODEL} --set foo", {}, r"--set foo: write it as KEY=VALUE"),
    (f"{MODEL} --set agent_options.step_limt=3", {}, r"did you mean step_limit\?"),
    (f"{MODEL} --set sampling.temperature=hot", {}, r"it must be a valid number.*got 'hot'"),
    (f"{MODEL} --set limits.memory_mb=none", {}, r"limits.memory_mb: it must be a valid integer"),
    (f"{MODEL} --set agent=x", {}, r"set the agent with --agent"),
    (f"{MODEL} --set sampling=1", {}, r"it is an object: set one of its fields, sampling.FIELD"),
    (f"{MODEL} --set max_attempts=99", {}, r"must be less than or equal to 10, got 99"),
    (f"{MODEL} --set verdict=maybe", {}, r"it must be 'verified' or 'official', got 'maybe'"),
    (f"{MODEL} --set phases.agent.provider=bublewrap", {}, r"did you mean 'bubblewrap'\?"),
    (f"{DRY} -n 0", {}, r"0 is not in the range 1<=x<=512"),
    (f"{DRY} -n many", {}, r"'many' is not a valid integer"),
    (f"{DRY} -l 0", {}, r"0 is not in the range x>=1"),
    (f"{DRY} --budget 0", {}, r"0.0 is not in the range x>0"),
    (f"{DRY} --deadline soon", {}, r"'soon' is not a duration: write it as 4h, 1h30m or 90s"),
    (f"{DRY} --deadline 0m", {}, r"'0m' is not a duration"),
    (f"{DRY} --stop-at 98", {}, r"'98' is not a share: write it as 98% or 0.98"),
    (f"{DRY} --max-rollout-cost 4", {}, r"--max-rollout-cost needs --prices FILE"),
    (f"{MODEL} --set caps.dollars=4", {}, r"a limit in dollars needs the model's price"),
    (f"{DRY} --run-id 'a b'", {}, r"error: run_id: letters, digits, .*got 'a b'"),
    (f"{DRY} --max-staleness 1", {}, r"counts from policy_version: give that too"),
    (f"{DRY} -a nop", {}, r"give one agent, not 2"),
    (f"{DRY} --max-cost 5", {}, r"--max-cost needs --prices FILE"),
    (f"{DRY} --max-cost 5 --prices fair.toml", {}, r"fair.toml has no price for the model: add it"),
    (
        f"{DRY} --model gpt-5 --max-cost 5 --prices fair.toml --set reward_model.model=who "
        """--set 'reward_model.criteria=[{"name":"a","description":"b"}]'""",
        {},
        r"a limit in dollars needs the price of who: add it to the file of --prices",
    ),
    (f"{DRY} --retry-on Sandbox", {}, r"'Sandbox' is not one of 'SandboxLost'"),
    (
        f"{DRY} --retry-on AgentError --no-retry-on AgentError",
        {},
        r"both name AgentError: keep one",
    ),
    (f"{DRY} --priority 9", {}, r"9 is not in the range 1<=x<=5"),
    (f"{DRY} --like nosuch", {}, r"--like nosuch: no rollout of this run called a model"),
    # runs and rollouts
    ("show h11", {}, r"no rollout 'h11' in .*it has no runs yet"),
    ("show nope/x/0", {}, r"no rollout nope/x/0 in .*`perdure status` lists the runs"),
    ("export nosuch", {}, r"run 'nosuch' has no episodes .*`perdure status` lists the runs"),
    ("report nosuch", {}, r"run 'nosuch' has no episodes"),
    ("report 'nosuch-*'", {}, r"give whole names, not globs; `perdure status` lists the runs"),
    ("view --port 70000", {}, r"70000 is not in the range 0<=x<=65535"),
    ("report r --prices no.toml", {}, r"prices in no.toml cannot be read"),
    ("report r --prices dear.toml", {}, r"dear.toml.*gpt\*.*input"),
    ("retry nosuch", {}, r"no run 'nosuch'"),
    ("retry r --failed --outcome timeout", {}, r"are mutually exclusive: give one of them"),
    (
        "regrade unknown.json",
        {},
        r"is a file: grade it with `perdure grade SOURCE --predictions unknow",
    ),
    ("grade first-steps", {}, r"no run 'first-steps' .* a file, give --predictions"),
    ("grade r --sandbox podman", {}, r"with RUN, give only -c, --detach, .* need --predictions"),
    ("report r --publish out --json", {}, r"--publish writes both files itself"),
    (
        "grade first-steps -p no.json",
        {},
        r"no predictions at no.json: No such file.*give preds.json",
    ),
    ("grade first-steps -p unknown.json", {}, r"lacks 1 instance .*skip them with --skip-unknown"),
    ("grade first-steps -p torn.json", {}, r"torn.json is not valid JSON"),
    ("grade first-steps -p numbers.json", {}, r"entry 1 is not a prediction: give objects with"),
    ("grade first-steps -p patchless.json", {}, r"entry 1 lacks `model_patch`, and so does"),
    (
        "grade first-steps -p two_models.json",
        {},
        r"2 models \(m, n\).*choose one with --model NAME",
    ),
    ("grade first-steps -p two_models.json --model o", {}, r"no prediction of .* 'o', only m, n"),
    ("resize r many", {}, r"'many' is not a valid integer"),
    ("status nosuch", {}, r"no stack runs in .*: start one with `perdure up`, set PERDURE_HOME"),
    # settings, engines, places
    (DRY, {"PERDURE_GATEWAY_PROT": "3"}, r"is not a setting: did you mean PERDURE_GATEWAY__PORT\?"),
    (DRY, {"PERDURE_GATEWAY__PORT": "many"}, r"PERDURE_GATEWAY__PORT='many': .*valid integer"),
    (DRY, {"PERDURE_STORE": "s4://x"}, r"PERDURE_STORE is s4://x: use a folder, or s3://"),
    (
        DRY,
        {"PERDURE_HOME": "elsewhere"},
        r"not built in \S*elsewhere/store: .*, or set PERDURE_HOME",
    ),
    (DRY, {"PERDURE_HOME": "/proc/x"}, r"/proc/x/store.*correct PERDURE_STORE, or PERDURE_HOME"),
    (
        DRY,
        {"PERDURE_CONFIG": "wrong.toml"},
        r"'gateway.prot' is not a setting: did you mean 'gateway",
    ),
    ("run first-steps", {}, r"calls a model and no engine is configured: set OPENAI_BASE_URL"),
    (
        "run first-steps -a openhands",
        {"PERDURE_AGENTS__OPENHANDS_PYTHON": "/bin/false"},
        r"no Python 3.12 .*PERDURE_AGENTS__OPENHANDS_PYTHON",
    ),
    ("agents pin oracle 1.0", {}, r"agent 'oracle' has no locked version to change"),
    (
        "agents pin codex 1.0",
        {"PERDURE_AGENTS__CODEX_TARBALL": "own.tgz"},
        r"PERDURE_AGENTS__CODEX_TARBALL replaces the registry's 1.0: unset it",
    ),
    ("run first-steps", {"OPENAI_BASE_URL": "ftp://x"}, r"URL must start with http:// or https://"),
    (
        "run first-steps",
        {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"},
        r"engine at http://127.0.0.1:9/v1 cannot be reached .*start it, or run `perdure down`",
    ),
    ("status", {"TEMPORAL_ADDRESS": "127.0.0.1:9"}, r"no Temporal server answers at 127.0.0.1:9"),
    (
        "up --engine scripted:no.json",
        {},
        r"--engine scripted:no.json: file .*no.json does not exist",
    ),
    ("demo --break", {"TEMPORAL_ADDRESS": "127.0.0.1:9"}, r"kills Temporal, .*unset TEMPORAL_ADDR"),
    ("demo --break --keep-running", {}, r"leave out --keep-running"),
]


NAMED: dict[int, str] = {
    1: "run first-steps --agnet x",
    2: "runn",
    3: "run first-steps -a oracel",
    4: "run frist-steps --dry-run",
    5: "run first-steps/h11-0.14 -a oracle",
    6: "run nofile.jsonl",
    7: "run two.jsonl",
    8: "run mute.jsonl",
    9: "run torn.jsonl",
    10: "run prose.jsonl",
    11: "run outside.jsonl",
    12: "run twice.jsonl",
    13: "run empty.jsonl",
    14: "run table.csv",
    15: f"{MODEL} --set sampling.temprature=1",
    16: f"{MODEL} --set foo",
    17: f"{MODEL} --set agent_options.step_limt=3",
    18: "unit/cli/test_mistakes.py: test_a_missing_program",
    19: f"{DRY} --sandbox bubblewarp",
    20: f"{DRY} -i zzz*",
    21: f"{DRY} -n 0",
    22: "unit/reports/test_stored_rollout.py: 'click' matches 3 rollouts",
    23: "export r -f hf",
    24: "PERDURE_GATEWAY_PROT",
    25: "unit/rollouts/test_run_identity.py: now 'nosuch/model'",
    26: "unit/rollouts/test_run_identity.py: url 'http://a', now 'http://b'",
    27: "http://127.0.0.1:9/v1",
    28: "integration/test_mini_swe_agent.py: does not exist",
    29: "elsewhere",
    30: "unit/cli/test_mistakes.py: test_a_store_without_keys",
    31: "unit/stack/test_process_stopping.py: is taken",
    32: "unit/instances/test_base_trees.py: the package index cannot be reached",
    33: "unit/instances/test_base_trees.py: there is no version of",
    34: "integration/test_environments.py: failed (exit code 3)",
    35: "run owner/name --dry-run",
    36: "/proc/x",
    37: "unit/cli/test_mistakes.py: test_a_full_disk_is_named_once",
    38: "workflows/test_mistakes.py: an_unknown_run_is_one_line",
}
"""The mistakes of the first day that strangers used Perdure: a command line or a value of a variable above,
or the test elsewhere and words of it. The rest of COMMAND_LINES and REQUESTS came later."""

Mistake = Callable[[str, dict[str, str]], tuple[int, list[str]]]


@pytest.fixture
def mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Mistake:
    """Exit code and error lines of a command line with these variables, where the working directory has
    FILES and the home has one dataset."""
    for name in os.environ:
        if name.startswith(("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)

    async def fill() -> None:
        store = open_store(load_settings())
        for name in NAMES:
            await instance_catalog.save(store, _instance(name))

    asyncio.run(fill())

    def made(line: str, variables: dict[str, str]) -> tuple[int, list[str]]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = invoke(shlex.split(line))
        told = capsys.readouterr().err.splitlines()
        return code, [one for one in told if one.startswith("error: ")]

    return made


def _instance(name: str) -> Instance:
    return Instance(
        instance_id=name,
        dataset="first-steps",
        problem_statement="It is broken.",
        source=Source(kind=SourceKind.DIRECTORY, path="/nowhere"),
        grading=Grading(protocol="eval_cmd", eval_cmd="true", timeout_s=60),
        gold_patch=b"diff --git a/a b/a\n",
    )


@pytest.mark.parametrize("line", ["show r/i/0", "report r", "export r", "view --port 0"])
def test_a_reader_of_a_wrong_place_leaves_nothing_there(mistake: Mistake, line: str) -> None:
    """No empty folder appears where a mistyped PERDURE_STORE leads."""
    code, errors = mistake(line, {"PERDURE_STORE": "elsewhere"})

    assert (code, len(errors)) == (2, 1)
    assert "PERDURE_STORE=elsewhere: there is no such folder" in errors[0]
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(("line", "variables", "told"), COMMAND_LINES)
def test_a_mistake_is_one_line_with_the_fix(
    mistake: Mistake, line: str, variables: dict[str, str], told: str
) -> None:
    """Nothing starts, and no traceback or text of pydantic is shown."""
    code, errors = mistake(line, variables)

    assert code in (1, 2)
    assert len(errors) == 1, errors
    assert re.search(told, errors[0]), errors[0]
    assert not re.search(r"pydantic|Traceback|\(a bug in Perdure; ", errors[0])


def test_every_mistake_of_the_first_day_is_tried() -> None:
    """Each number, as a row here or in the test that it names; and thirty more."""
    rows = {one for line, given, _ in COMMAND_LINES for one in (line, *given, *given.values())}
    elsewhere = [one.partition(": ") for one in NAMED.values() if one not in rows]
    here = "unit/cli/test_mistakes.py"
    lost = [
        f"{file}: {words}"
        for file, _, words in elsewhere
        if (TESTS / file).read_text().count(words) <= (file == here)  # it is named here
    ]

    assert list(NAMED) == list(range(1, 39))
    assert lost == []
    assert len(COMMAND_LINES) + len(REQUESTS) >= 38 + 30


ROLLOUT = {"run_id": "r", "instance": "first-steps/x"}
REQUESTS: list[tuple[type[Any], dict[str, Any], str]] = [
    (
        RolloutRequest,
        {**ROLLOUT, "agnet": "x"},
        "agnet: there is no such field; did you mean agent?",
    ),
    (RolloutRequest, {**ROLLOUT, "sampling": {"topk": 1}}, "sampling.topk: there is no such field"),
    (RolloutRequest, {"run_id": "r"}, "instance: it is missing"),
    (RolloutRequest, {**ROLLOUT, "instance": "x"}, "write it as <dataset>/<instance_id>, got 'x'"),
    (
        RolloutRequest,
        {**ROLLOUT, "agent": "predictions"},
        "`perdure grade SOURCE --predictions FILE`",
    ),
    (RunRequest, {"run_id": "r"}, "give exactly one of 'instances' and 'dataset'"),
    (
        RunRequest,
        {"run_id": "a b", "dataset": "d"},
        "run_id: letters, digits, '.', '_' and '-' only",
    ),
    (RunRequest, {"run_id": "r", "dataset": "d", "n_samples": 0}, "n_samples: it must be greater"),
    (Sampling, {"temperature": -1}, "temperature: it must be greater than or equal to 0, got -1"),
    (Sampling, {"seed": "x"}, "seed: it must be a valid integer"),
    (GroupRequest, {"rollout": ROLLOUT, "quorum": 9}, "quorum 9 exceeds n_samples 8"),
]


@pytest.mark.parametrize(("request_type", "fields", "told"), REQUESTS)
def test_a_mistake_in_a_training_loop_is_one_line(
    request_type: type[Any], fields: dict[str, Any], told: str
) -> None:
    """The caller sees field, value and fix, and neither pydantic's text nor its links."""
    with pytest.raises(ConfigurationError) as raised:
        request_type(**fields)

    said = str(raised.value)
    assert said.startswith(f"{request_type.__name__}: ")
    assert told in said
    assert "\n" not in said
    assert "pydantic" not in said


def _copied() -> Exception:
    full = f"[Errno 28] {os.strerror(errno.ENOSPC)}: '/home/disk/b'"
    return shutil.Error([("/etc/a", "/home/disk/a", full), ("/etc/b", "/home/disk/b", full)])


def _stored() -> Exception:
    error = StoreUnavailable("store /home/disk, 'a': no space")
    error.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/disk/a")
    return error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "no space", "/home/disk/a"), _copied(), _stored()]
)
def test_a_full_disk_is_named_once_with_the_fix(error: Exception) -> None:
    """Also where a copy of a folder reports each of its files."""
    assert explain(error) == (
        1,
        "the disk under /home/disk/a is full: free space there, then repeat the command",
    )


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sandbox provider, before a stack starts."""
    monkeypatch.setattr(sandbox_programs, "SYSTEM_PATH", "/nowhere")
    sandbox_programs.program.cache_clear()

    told = sandbox_programs.missing_programs(["podman"])

    assert told == ["podman is missing; install it (Debian: apt-get install podman runc)"]


def test_a_store_without_keys_names_the_variables() -> None:
    """What boto says, once, and what to set."""
    place = Place("s3://bucket/x", "bucket", None)

    assert explain(place.failure("list 'instances/'", NoCredentialsError())) == (
        1,
        "s3://bucket/x: cannot list 'instances/': Unable to locate credentials; if this lasts,"
        " set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or AWS_PROFILE",
    )


@pytest.mark.parametrize("model", ["--model gpt-x", "--set model=gpt-x"])
def test_a_dry_run_says_what_it_may_need(
    mistake: Mistake, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """`eval` takes what `run` takes; rollouts, sandboxes' limits and the agents' time are multiplied. Both
    limits in dollars find the model's price."""
    line = "eval first-steps -k 4 -c 6 --budget 3600 --max-cost 5 --max-rollout-cost 2"
    code = invoke([*f"{line} --prices fair.toml {model}".split(), "--dry-run"])
    told = capsys.readouterr()

    assert code == 0, told.err
    assert "12 rollouts, 6 at once: up to 12 CPUs and 24 GB; this host has " in told.err
    assert "agents: at most 2.0 h in total, 3600 s each" in told.err
    assert "12 rollouts of 3 instances" in told.out


def test_failures_to_retry_on_are_those_of_the_request() -> None:
    """The command line lists them without importing pydantic."""
    assert get_args(FailureType) == FAILURES
