"""The command line as a person uses it: help, one-line errors, one JSON document."""

import asyncio
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete

from perdure.cli.main import COMMANDS, cli, invoke
from perdure.episodes.episode import EpisodeParts
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_state
from perdure.stack.stack_state import StackState
from perdure.storage.local_store import LocalStore
from perdure.types import Purpose, RolloutRequest, RolloutStatus, RunRequest, Turn
from tests import held_ports
from tests.checkout_paths import ROOT
from tests.store_with_runs import write_rollout
from tests.stored_episodes import store_episode


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command line."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, lines
        return lines[0]


Perdure = Callable[..., Done]


@pytest.fixture
def perdure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Perdure:
    """The command in an empty folder, without our variables except those that a test sets."""
    for name in os.environ:
        if name.startswith(("PERDURE_", "TEMPORAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        code = invoke(arguments)
        return Done(code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, perdure: Perdure) -> None:
    """Each command of the table exists and has a help text."""
    done = perdure(command, "--help")

    assert (done.code, done.stdout[:6]) == (0, "Usage:"), done.stderr


def helps(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """The help text of a command and of every one under it, as 80 columns show it."""
    context = click.Context(command, info_name=name, max_content_width=80, terminal_width=80)
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            child = command.get_command(context, word)
            assert child is not None, word
            yield from helps(child, f"{name} {word}")


def test_no_help_is_cut_or_wider_than_a_terminal() -> None:
    """At 80 columns each line fits, and each command's line is whole."""
    wrong = [
        f"{name}: {line}"
        for name, text in helps(cli, "perdure")
        for line in text.splitlines()
        if len(line) > 80 or (line.endswith("...") and not line.startswith("Usage:"))
    ]

    assert wrong == []


def test_mistyped_command_is_answered_with_the_right_one(tmp_path: Path, perdure: Perdure) -> None:
    """`perdure rnu` proposes `run`."""
    done = perdure("rnu")

    assert (done.code, "Did you mean 'run'?" in done.error) == (2, True)


ROW = {
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


def rows(folder: Path, *lacking: str, count: int = 17) -> Path:
    """A file of `count` rows, the last of which lacks the named fields."""
    good = [{**ROW, "instance_id": f"a-{n}"} for n in range(count)]
    good[-1] = {name: value for name, value in good[-1].items() if name not in lacking}
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in good))
    return path


def test_bad_row_is_named_with_its_field_and_the_fix(tmp_path: Path, perdure: Perdure) -> None:
    """Row 17 without `patch` is refused by number and field before anything starts."""
    done = perdure("run", str(rows(tmp_path, "patch")), "--agent", "oracle")

    assert done.code == 2
    assert done.error.startswith("error: dataset row 17 lacks `patch`: ")


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "log_parser": ({"log_parser": "nope"}, "use one of pytest, parse_log_ant, "),
    "test_cmd": ({"test_cmd": "make test"}, "use `eval_cmd` to grade by exit code"),
    "test_patch": ({"test_patch": "hello"}, "is not a git diff: line 1: "),
    "patch": ({"patch": "hello"}, "is not a git diff: line 1: "),
    "source.requirement": (
        {"source": {"kind": "pypi-sdist", "requirement": "a"}},
        "write name==version",
    ),
    "python": ({"python": "new"}, "write a version such as 3.11"),
    "workdir": ({"workdir": "here"}, "write an absolute path"),
    "instance_id": ({"instance_id": "a/b"}, "letters, digits, '.', '_' and '-'"),
    "FAIL_TO_PASS": ({"FAIL_TO_PASS": []}, "list the tests that the fix makes pass"),
    "repo": ({"repo": 5}, "give a string, not the number 5"),
}


@pytest.mark.parametrize("field", BAD_ROWS)
def test_each_fault_of_a_row_is_one_line_with_row_field_and_fix(
    field: str, tmp_path: Path, perdure: Perdure
) -> None:
    """Row, field and fix are named, once each, before anything starts."""
    wrong, fix = BAD_ROWS[field]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "instance_id": "b", **wrong}))

    line = perdure("run", str(path), "--agent", "oracle", "--dry-run").error

    assert line.startswith("error: dataset row 2")
    assert f"`{field}`" in line
    assert fix in line
    assert line.removesuffix("; skip it with --skip-bad-rows").count("row") == 1


def test_unknown_agent_lists_the_known_ones(tmp_path: Path, perdure: Perdure) -> None:
    """A wrong agent name is answered with the right ones."""
    done = perdure("run", str(rows(tmp_path)), "--agent", "oracel")

    assert done.error.startswith(
        "error: unknown agent 'oracel': did you mean 'oracle'? Otherwise use one of "
    )
    assert " nop, " in done.error


def test_second_agent_is_refused(tmp_path: Path, perdure: Perdure) -> None:
    """A run has one agent, so a second --agent is refused."""
    done = perdure("run", str(rows(tmp_path)), "-a", "oracle", "-a", "nop")

    assert "give one agent, not 2" in done.error


def test_unknown_variable_is_named_with_the_one_that_was_meant(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt PERDURE_ variable is refused instead of ignored."""
    monkeypatch.setenv("PERDURE_SLOTS__AGNT", "3")

    done = perdure("settings")

    assert done.code == 2
    assert "PERDURE_SLOTS__AGNT is not a setting: did you mean PERDURE_SLOTS__AGENT?" in done.error


def test_bad_value_in_the_file_names_file_and_key(tmp_path: Path, perdure: Perdure) -> None:
    """The error names perdure.toml, the key and what is wrong with its value."""
    (tmp_path / "perdure.toml").write_text("[slots]\nagent = 0\n")

    done = perdure("settings")

    assert done.error.startswith("error: perdure.toml: slots.agent=0: input should be greater")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{bad", "PERDURE_SANDBOX__CAPS='{bad' is not JSON: Expecting property name"),
        ('{"e2b": {"lve": 1}}', "PERDURE_SANDBOX__CAPS: 'e2b.lve' is not a field of it"),
        ('{"e2b": {"live": "x"}}', "PERDURE_SANDBOX__CAPS: 'e2b.live' is wrong: input should be"),
        (
            '{"e2bb": {"live": 1}}',
            "PERDURE_SANDBOX__CAPS={'e2bb': {'live': 1}}: unknown sandbox 'e2bb': did you mean 'e2b'? Otherwise use one of apptainer, ",
        ),
    ],
)
def test_a_bad_object_in_a_variable_names_the_variable(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    """The error names the variable, not a file that may not exist."""
    monkeypatch.setenv("PERDURE_SANDBOX__CAPS", value)

    assert perdure("settings").error.startswith(f"error: {said}")


def test_caps_of_a_provider_by_dotted_path_are_accepted(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only workers must be able to import it, because they create the sandboxes."""
    monkeypatch.setenv("PERDURE_SANDBOX__CAPS", '{"ours.boxes:Provider": {"live": 1}}')

    assert perdure("settings").code == 0


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PERDURE_GATEWAY__URL", "gateway:18001", "write a URL that starts with http:// or http"),
        ("PERDURE_S3_ENDPOINT_URL", "s3.local", "write a URL that starts with http:// or http"),
        ("PERDURE_CONFIG", "perdrue.toml", "there is no such file"),
    ],
)
def test_an_impossible_value_of_a_setting_is_refused(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """A wrong address and a missing file are errors before anything starts."""
    monkeypatch.setenv(variable, value)

    assert perdure("settings").error.startswith(f"error: {variable}={value!r}: {said}")


@pytest.mark.parametrize("name", ["/rows.csv", "./rows.csv", "sub/rows.csv"])
def test_file_of_another_kind_is_no_dataset(tmp_path: Path, perdure: Perdure, name: str) -> None:
    """The error says which file types are rows, and no hub is asked."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/rows.csv").touch()

    said = perdure("run", name, "--agent", "oracle").error
    assert said == f"error: {name} is not a file of rows: give a .jsonl, .json, .parquet file"


def test_store_of_an_unknown_kind_is_refused(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown scheme is an error, not the name of a folder."""
    monkeypatch.setenv("PERDURE_STORE", "gs://bucket/x")

    said = perdure("instances", "list").error
    assert said == "error: PERDURE_STORE is gs://bucket/x: use a folder, or s3://bucket/prefix"


def test_listing_an_unknown_dataset_says_what_there_is(perdure: Perdure) -> None:
    """A misspelt dataset is an error, not an empty list."""
    done = perdure("instances", "list", "nope")

    assert (done.code, "no dataset 'nope'" in done.error) == (1, True)


@pytest.mark.parametrize(
    ("kind", "engine", "said"),
    [("vlm", "", "PERDURE_ENGINE__KIND is 'vlm': use auto, "), ("auto", "h:1", "must start with")],
)
def test_wrong_engine_is_refused_before_anything_starts(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch, kind: str, engine: str, said: str
) -> None:
    """The error comes before a server is started."""
    monkeypatch.setenv("PERDURE_ENGINE__KIND", kind)

    assert said in perdure("up", "--engine", engine).error


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "PERDURE_ENGINE__TOKENIZER",
            "qwen33",
            "PERDURE_ENGINE__TOKENIZER is 'qwen33': use 'qwen3' or a folder",
        ),
        (
            "PERDURE_ENGINE__TOKENIZER",
            "model",
            "no message format for PERDURE_ENGINE__TOKENIZER='model': ",
        ),
        ("PERDURE_STORE", "gs://bucket/x", "PERDURE_STORE is gs://bucket/x: use a folder, or s3:"),
        ("PERDURE_STORE", "taken", "a file is in the way; name a folder"),
        (
            "PERDURE_GATEWAY__HOST",
            "192.0.2.1",
            "cannot listen on PERDURE_GATEWAY__HOST='192.0.2.1'",
        ),
        ("TEMPORAL_ADDRESS", "127.0.0.1:1", "no Temporal server answers at 127.0.0.1:1: "),
    ],
)
def test_settings_that_the_gateway_would_refuse_start_no_stack(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """The error is one line with exit code 2, and no process was started."""
    Path("taken").touch()
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text(
        '{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    monkeypatch.setattr("perdure.stack.start_preflight.TEMPORAL_S", 0.0)
    monkeypatch.setenv(variable, value)

    done = perdure("up")

    assert (done.code, said in done.error) == (2, True), done.stderr
    assert not Path("home/logs/supervisor.log").exists()


def test_bad_field_of_a_rollout_is_named(tmp_path: Path, perdure: Perdure) -> None:
    """A misspelt field in --set is named, and nothing starts."""
    done = perdure("run", str(rows(tmp_path)), "--set", "sampling.temprature=1")

    assert (
        done.error
        == "error: sampling.temprature: there is no such field; did you mean temperature?"
    )


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (
            "agent.network=host",
            "phases.agent.network: a sandbox of bubblewrap on the host's network",
        ),
        (
            "grade=podman",
            "phases.grade: it is an object: set one of its fields, phases.grade.FIELD",
        ),
        (
            "grade.provider=podmann",
            "unknown sandbox 'podmann': did you mean 'podman'? Otherwise use one of ",
        ),
    ],
)
def test_wrong_phase_is_named_before_anything_starts(
    phase: str, said: str, tmp_path: Path, perdure: Perdure
) -> None:
    """A wrong value of a phase is refused with the name of its field; nothing starts."""
    done = perdure("run", str(rows(tmp_path)), "-a", "oracle", "--set", f"phases.{phase}")

    assert (done.code, done.error.startswith(f"error: {said}")) == (2, True)
    assert not (tmp_path / "home").exists()


def test_dry_run_says_where_agent_and_grader_run(tmp_path: Path, perdure: Perdure) -> None:
    """The plan shows a provider that only one phase has."""
    provider = ("--set", "phases.grade.provider=podman")
    done = perdure("run", str(rows(tmp_path)), "-a", "oracle", "--dry-run", *provider)

    assert "agent oracle in bubblewrap, graded in podman" in done.stdout


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("steps=3", "agent_options.steps: unknown, did you mean step_limit?"),
        ("step_limit=many", "agent_options.step_limit: input should be a valid integer"),
    ],
)
def test_wrong_agent_option_is_named_before_anything_starts(
    option: str, said: str, more: tuple[str, ...], tmp_path: Path, perdure: Perdure
) -> None:
    """A wrong option of an agent is refused, and the error lists its options."""
    done = perdure("run", str(rows(tmp_path)), "--set", f"agent_options.{option}", *more)

    assert (done.code, done.error.startswith(f"error: {said}")) == (2, True)
    assert "; mini_swe_agent takes: step_limit, " in done.error
    assert not (tmp_path / "home").exists()


def test_weights_are_named_on_the_command_line(tmp_path: Path, perdure: Perdure) -> None:
    """--policy-version and --max-staleness reach the request; one of them without the other is named."""
    ask = ("run", str(rows(tmp_path)), "-a", "oracle", "--dry-run", "--json")
    done = perdure(*ask, "--policy-version", "12", "--max-staleness", "1")
    half = perdure(*ask, "--max-staleness", "1")

    asked = json.loads(done.stdout)["request"]["rollout"]
    assert (asked["policy_version"], asked["max_staleness"]) == (12, 1)
    assert "max_staleness counts from policy_version" in json.loads(half.stdout)["error"]


def test_without_a_stack_the_next_command_is_named(tmp_path: Path, perdure: Perdure) -> None:
    """`perdure status` where nothing runs points to `perdure up`."""
    done = perdure("status")

    assert (done.code, "start one with `perdure up`" in done.error) == (2, True)


def test_no_stack_is_started_for_an_agent_without_an_engine(
    tmp_path: Path, perdure: Perdure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing engine is an error before a stack is started."""
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("PERDURE_SANDBOX__ALLOW_LOCAL", "true")
    done = perdure("run", str(rows(tmp_path)), "--sandbox", "local")

    assert "mini_swe_agent calls a model and no engine is configured: " in done.error
    assert not (tmp_path / "home/logs").exists()


def test_local_is_refused_before_the_run(tmp_path: Path, perdure: Perdure) -> None:
    """A run without isolation needs the setting, which the error names; nothing is started."""
    done = perdure("run", str(rows(tmp_path)), "--agent", "nop", "--sandbox", "local")

    assert (done.code, "PERDURE_SANDBOX__ALLOW_LOCAL=true" in done.error) == (2, True)
    assert not (tmp_path / "home/logs").exists()


def test_endpoint_that_does_not_answer_is_named() -> None:
    """The error names the address of an engine that refuses connections."""
    from perdure.errors import GatewayUnavailable
    from perdure.stack.engine_presence import check_engine

    with held_ports.held(1) as (port,):
        url = f"http://127.0.0.1:{port}/v1"

        with pytest.raises(GatewayUnavailable, match=f"engine at {url} cannot be reached"):
            check_engine(url, "mini_swe_agent")


def test_only_a_new_run_needs_an_engine_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the engine restarts a new run is refused, and one that has begun is joined."""
    from perdure.cli.runs import run_launcher
    from perdure.errors import GatewayUnavailable
    from perdure.stack import stack_lifecycle

    started: list[Any] = []
    monkeypatch.setattr(stack_lifecycle, "ensure_up", lambda *stack: started.append(stack))
    with held_ports.held(1) as (port,):
        settings = Settings(home=tmp_path, engine={"url": f"http://127.0.0.1:{port}/v1"})
        rollout = {"agent": "mini_swe_agent", "sandbox": "bubblewrap"}
        request = RunRequest(run_id="r", dataset="rows", rollout=rollout)

        with pytest.raises(GatewayUnavailable, match="cannot be reached"):
            run_launcher.ensure_stack_ready(settings, request)
        assert not started
        run_launcher.ensure_stack_ready(settings, request, joins=True)

    assert len(started) == 1
    assert "open rollouts wait for the engine" in capsys.readouterr().err


def test_one_answering_engine_of_several_is_enough() -> None:
    """Of `URL=WEIGHT,URL` one engine that accepts is enough."""
    from perdure.stack.engine_presence import check_engine

    with socket.create_server(("127.0.0.1", 0)) as listening, held_ports.held(1) as (dead,):
        alive = listening.getsockname()[1]

        check_engine(f"http://127.0.0.1:{dead}=2,http://127.0.0.1:{alive}=1", "mini_swe_agent")


def test_json_is_one_document_on_stdout(tmp_path: Path, perdure: Perdure) -> None:
    """With --json, stdout has only the answer; everything else goes to stderr."""
    done = perdure("run", str(rows(tmp_path)), "-a", "oracle", "--dry-run", "--json")

    assert json.loads(done.stdout)["rollouts"] == 17


def test_json_errors_are_one_document_too(tmp_path: Path, perdure: Perdure) -> None:
    """With --json, an error is a JSON document too."""
    done = perdure("show", "nothing", "--json")

    assert json.loads(done.stdout)["error"].startswith("no rollout 'nothing'")


def test_unknown_rollout_is_answered_with_the_runs_there(tmp_path: Path, perdure: Perdure) -> None:
    """The list comes from the store, so no stack is needed."""
    rollouts(tmp_path)

    assert perdure("show", "nothing").error.endswith("(its runs: r)")


def test_a_wrong_run_id_is_refused_with_the_allowed_characters(
    tmp_path: Path, perdure: Perdure
) -> None:
    """The error describes the allowed characters and shows no regular expression."""
    done = perdure("run", str(rows(tmp_path)), "-a", "oracle", "--run-id", "a b", "--dry-run")

    assert done.error.startswith("error: run_id: letters, digits, '.', '_' and '-' only")


def test_tracebacks_are_shown_on_request_only(
    perdure: Perdure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only PERDURE_DEBUG=1 shows a traceback."""
    assert perdure("run", "none.jsonl").code == 2

    monkeypatch.setenv("PERDURE_DEBUG", "1")

    with pytest.raises(ConfigurationError):
        perdure("run", "none.jsonl")


PIECE = "runs/r/rollouts/a-1/0"


def rollouts(folder: Path, damaged: Sequence[str] = (), **left: str) -> None:
    """Store rollouts a-1 and b-1 of run r: a-1 with just these files, b-1 with its episode."""
    request = RolloutRequest(run_id="r", instance="d/b-1", agent="oracle")
    cancelled = RolloutStatus.CANCELLED
    parts = EpisodeParts(request, cancelled, started_at=0.0, finished_at=1.0, damaged=damaged)
    asyncio.run(store_episode(LocalStore(folder / "home/store"), parts))
    for name, text in left.items():
        file = folder / "home/store" / PIECE / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_show_says_what_an_episode_lacks(tmp_path: Path, perdure: Perdure) -> None:
    """What did not read back when it was made; its files are whole, so the exit code is 0."""
    rollouts(tmp_path, damaged=["turns.parquet is gone", "patch.json is unreadable"])

    done = perdure("show", "r/b-1")

    assert done.code == 0
    assert "damaged   turns.parquet is gone\ndamaged   patch.json is unreadable\n" in done.stdout


def test_signals_and_withheld_rewards_are_shown_and_counted(
    tmp_path: Path, perdure: Perdure
) -> None:
    """`show` names each signal and why there is no reward; `export` counts both."""
    marked = {"signals": ("a.py: f_back (frames)",), "withheld": "unverified, has signals"}
    store = LocalStore(tmp_path / "home/store")
    asyncio.run(write_rollout(store, "marked", resolved=True, graded=marked))

    shown = perdure("show", "marked/h11-0.14.0").stdout
    exported = perdure("export", "marked", "--format", "jsonl", "--out", "out.jsonl").stdout

    assert "reward    none, withheld: unverified, has signals\n" in shown
    assert "          signal a.py: f_back (frames)\n" in shown
    assert exported == (
        "1 written to out.jsonl; in the run: 1 with signals, 1 with a withheld reward\n"
    )


def test_named_rewards_are_shown_and_exported(tmp_path: Path, perdure: Perdure) -> None:
    """`show` and `report` print each by name; the dataset for the hub has them as text."""
    store, named = LocalStore(tmp_path / "home/store"), {"right": 1.0, "tidy": 0.5}
    asyncio.run(write_rollout(store, "many", resolved=True, graded={"named_rewards": named}))

    assert "rewards   right 1, tidy 0.5\n" in perdure("show", "many/h11-0.14.0").stdout
    assert re.search(r"tidy +1 +0\.500 ", perdure("report", "many").stdout)
    perdure("export", "many", "--format", "dataset", "--out", "hub")
    line = json.loads((Path("hub") / "data/rollouts.jsonl").read_text())
    assert json.loads(line["named_rewards"]) == named


def test_show_counts_stray_calls(tmp_path: Path, perdure: Perdure) -> None:
    """A rollout whose code under test called the model says so, and that nothing of it is trained."""
    request = RolloutRequest(run_id="r", instance="d/b-1")
    stray = Turn(index=1, chain="stray", purpose=Purpose.STRAY, trainable=False)
    turns = (Turn(index=0, trainable=False), stray)
    parts = EpisodeParts(request, RolloutStatus.CANCELLED, 0.0, 1.0, turns=turns)
    asyncio.run(store_episode(LocalStore(tmp_path / "home/store"), parts))

    done = perdure("show", "r/b-1")

    assert "stray     1 call that the agent did not make; not trained\n" in done.stdout


def test_export_names_an_unreadable_episode_and_writes_the_rest(
    tmp_path: Path, perdure: Perdure
) -> None:
    """An unreadable episode.json is one line on stderr and exit code 1; the others are written."""
    rollouts(tmp_path, episode="{torn")

    done = perdure("export", "r", "--format", "jsonl", "--out", "out.jsonl")

    assert (done.code, done.stdout) == (1, "1 written to out.jsonl\n")
    assert done.error.startswith(f"error: left out a-1 #0: {PIECE}/episode.json is unreadable: ")
    assert json.loads(Path("out.jsonl").read_text())["instance"] == "d/b-1"


def test_an_export_without_a_row_leaves_no_file(tmp_path: Path, perdure: Perdure) -> None:
    """An empty file would pass for an export; each rollout that is left out is named before."""
    rollouts(tmp_path)

    done = perdure("export", "r", "--format", "sft")

    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.endswith("error: nothing written: every rollout was left out\n")
    assert not Path("r.sft.jsonl").exists()


def test_an_export_without_a_row_keeps_the_earlier_file(tmp_path: Path, perdure: Perdure) -> None:
    """The command says so: the file is not this export."""
    rollouts(tmp_path)
    Path("preds.json").write_text("old")

    done = perdure("export", "r", "-o", "preds.json")

    assert (done.code, Path("preds.json").read_text()) == (1, "old")
    assert done.stderr.endswith(
        "every rollout was left out; preds.json is from an earlier export\n"
    )


@pytest.mark.parametrize("out", ["-", "/dev/stdout"])
def test_data_on_stdout_is_alone_there(tmp_path: Path, perdure: Perdure, out: str) -> None:
    """What `--json` prints about an export goes to stderr then."""
    rollouts(tmp_path)

    done = perdure("export", "r", "-f", "jsonl", "-o", out, "--json")

    assert json.loads(done.stdout)["instance"] == "d/b-1"
    assert json.loads(done.stderr)["written"] == 1


@pytest.mark.parametrize("out", ["-", "/dev/stdout"])
def test_a_page_on_stdout_is_alone_there(tmp_path: Path, perdure: Perdure, out: str) -> None:
    """Nothing follows the page, so that it can be piped."""
    rollouts(tmp_path)

    done = perdure("report", "r", "--html", out)

    assert (done.code, done.stdout[:9], done.stdout[-8:]) == (0, "<!doctype", "</html>\n")
    assert done.stderr.endswith(f"written to {out}\n")


def test_export_as_json_names_unreadable_files_too(tmp_path: Path, perdure: Perdure) -> None:
    """With --json, the document names the unreadable file, and the exit code is 1."""
    rollouts(tmp_path, episode="{torn")

    done = perdure("export", "r", "--format", "jsonl", "--json")
    (omitted,) = json.loads(done.stdout)["omitted"]

    assert (done.code, omitted["instance_id"], omitted["damaged"]) == (1, "a-1", True)


@pytest.mark.parametrize("piece", ["episode", "attempts__1__agent", "attempts__1__grade-7"])
@pytest.mark.parametrize("text", ["{torn", "[]", '{"of": "another form"}'])
def test_show_names_what_is_unreadable_and_shows_the_rest(
    piece: str, text: str, tmp_path: Path, perdure: Perdure
) -> None:
    """Each unreadable file is one line on stderr and exit code 1; the other files are shown."""
    sandbox = '{"provider": "local", "host": "here", "seconds": 1.0}'
    rollouts(tmp_path, **{"attempts__1__sandbox": sandbox, piece: text})

    done = perdure("show", "r/a-1")

    named = f"{PIECE}/{piece.replace('__', '/')}.json is unreadable: "
    assert (done.code, done.error.startswith(f"error: {named}")) == (1, True)
    assert "boot 1.00 s (local on here)" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--patch", "--log"), "--patch and --log are mutually exclusive: give one of them"),
        (("--log", "--turns"), "--log and --turns are mutually exclusive: give one of them"),
        (("--patch", "--json"), "--patch and --json are mutually exclusive: give one of them"),
        (("--attempt", "1"), "--attempt needs --turns"),
        (("--full",), "--full needs --turns"),
    ],
)
def test_show_refuses_flags_that_exclude_each_other(
    perdure: Perdure, flags: tuple[str, ...], said: str
) -> None:
    """Two flags that both fill stdout, and a flag without effect, are refused by name."""
    done = perdure("show", "r/a-1", *flags)

    assert (done.code, said in done.stderr) == (2, True)


def test_instances_show_prints_one_thing_byte_for_byte(perdure: Perdure) -> None:
    """--gold and --tests are two files, so both together are refused."""
    done = perdure("instances", "show", "d/a-1", "--gold", "--tests")

    assert "--gold and --tests are mutually exclusive" in done.error


def offers(words: list[str], beginning: str) -> list[str]:
    """What a Tab key offers after `perdure <words> <beginning>`."""
    shell = BashComplete(cli, {}, "perdure", "_PERDURE_COMPLETE")
    return [item.value for item in shell.get_completions(words, beginning)]


def test_completion_knows_the_commands() -> None:
    """Tab after `perdure s` offers the commands with that beginning."""
    assert offers([], "s") == ["swebench", "sweep", "status", "show", "sandboxes", "settings"]


def test_completion_knows_the_agents() -> None:
    """Tab after `--agent or` offers oracle."""
    assert offers(["run", "x", "--agent"], "or") == ["oracle"]


def test_settings_page_is_the_one_in_the_docs() -> None:
    """docs/settings.md is what `perdure settings --markdown` prints."""
    from perdure.settings.settings_page import page

    written = ROOT / "docs" / "settings.md"

    assert page() + "\n" == written.read_text()


def test_up_in_the_foreground_says_where_everything_answers(
    perdure: Perdure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor reports inside its event loop, and no engine is configured."""

    def supervise(engine: str, report: Callable[[dict[str, Any]], None]) -> int:
        state = StackState("ready", 1, 1, "t:1", "default", "http://ui", "http://gateway", engine)
        stack_state.write(Settings(home=tmp_path / "home"), state)

        async def ready() -> None:
            report({"event": "ready"})

        asyncio.run(ready())
        return 0

    monkeypatch.setattr("perdure.stack.stack_supervisor.run", supervise)

    done = perdure("up", "--foreground")

    assert (done.code, "Engine    none: set OPENAI_BASE_URL" in done.stderr) == (0, True)
