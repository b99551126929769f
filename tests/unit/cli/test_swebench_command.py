"""`perdure swebench`: the command line of `mini-extra swebench` becomes a run of ours, or is refused."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import invoke
from perdure.cli.runs import mini_swe_agent_files
from perdure.cli.runs.mini_swe_agent_options import Translation, globs_of, translate
from perdure.errors import ConfigurationError
from tests.checkout_paths import ROOT
from tests.hub_cache import cached
from tests.unit.cli.test_sources import IDS, ROW

DOCUMENT = ROOT.parent / "shared" / "spec" / "001_fe0cebb1c61ef8a8.txt"
YAML = 'environment:\n  executable: "podman"\n  timeout: 3600\n  pull_timeout: 1200\n'
"""What the document adds to swebench.yaml."""


def document_line(output: str) -> list[str]:
    """The words after `mini-extra` of the document's only batch line."""
    if not DOCUMENT.exists():
        pytest.skip("the four documents are not beside this checkout")
    (line,) = [one for one in DOCUMENT.read_text().splitlines() if "mini-extra swebench --" in one]
    return shlex.split(line.partition("mini-extra ")[2].replace("<output directory>", output))


def perdure(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The command, without the network, with three rows of SWE-bench Verified in the hub's cache."""
    if not (folder / "hf").exists():
        rows = [{**ROW, "instance_id": one} for one in IDS]
        cached(folder / "hf", "SWE-bench", "SWE-bench_Verified", rows)
    ours = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_", "HOSTED_", "LITELLM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    own = {
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PERDURE_HOME": str(folder / "home"),
    }
    return subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", *words],
        env=kept | own | variables,
        cwd=folder,
        capture_output=True,
        check=False,
        text=True,
    )


@pytest.mark.filterwarnings("ignore")
def test_the_documents_line_runs_as_written(tmp_path: Path) -> None:
    """With its YAML. The options of `perdure eval` go on working, and the line that is printed first
    gives the same run."""
    (tmp_path / "podman.yaml").write_text(YAML)
    line = document_line(str(tmp_path / "out"))

    done = perdure(tmp_path, *line, "--config", "podman.yaml", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout)["request"]
    told = shlex.split(done.stderr.splitlines()[0])
    again = perdure(tmp_path, *told[told.index("perdure") + 1 :])

    assert request["concurrency"] == 128
    assert request["rollout"] == {
        "agent": "mini_swe_agent",
        "model": "gpt-5-nano",
        "sandbox": "podman",
        "agent_budget_s": 3600.0,
        "agent_options": {"extra_args": ["-c", "environment.timeout=3600"]},
    }
    assert told[:2] == [
        "PERDURE_SANDBOX__PULL_TIMEOUT_S=1200",
        "OPENAI_BASE_URL=https://api.openai.com/v1",
    ]
    assert json.loads(again.stdout)["request"] == request
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_the_documents_variables_are_read_or_named(tmp_path: Path) -> None:
    """HOSTED_VLLM_API_BASE is the engine, so no other address is added."""
    words = ("swebench", "-m", "hosted_vllm/Qwen/Q", "--subset", "verified", "--split", "test")
    variables = {"LITELLM_MODEL_REGISTRY_PATH": "/x.json"}
    needed = perdure(tmp_path / "a", *words, "--sandbox", "podman", "--dry-run", **variables)
    variables["HOSTED_VLLM_API_BASE"] = "http://127.0.0.1:9/v1"
    done = perdure(tmp_path / "b", *words, "--sandbox", "podman", "--dry-run", **variables)

    assert "set HOSTED_VLLM_API_BASE to its address" in needed.stderr
    note, line, *_ = done.stderr.splitlines()
    assert note == "note: LITELLM_MODEL_REGISTRY_PATH has no effect: use `--prices FILE`"
    expected = "PERDURE_ENGINE__MODEL=Qwen/Q perdure eval verified -c 1 --sandbox podman --dry-run"
    assert line == expected


GIVEN: dict[str, Any] = {
    "subset": "lite",
    "split": "dev",
    "slice_": "",
    "filter_": "",
    "shuffle": False,
    "workers": 1,
    "model": None,
    "model_class": None,
    "config": (),
    "environment_class": None,
}


def translated(**given: Any) -> Translation:
    return translate(**{**GIVEN, **given})


@pytest.mark.parametrize(
    ("given", "argv"),
    [
        ({}, ["princeton-nlp/SWE-Bench_Lite:dev", "-c", "1"]),
        ({"split": "test"}, ["lite", "-c", "1"]),
        ({"subset": "smith", "split": "train"}, ["SWE-bench/SWE-smith:train", "-c", "1"]),
        ({"subset": "a/b", "split": "train"}, ["a/b:train", "-c", "1"]),
        ({"subset": "mine"}, ["mine", "-c", "1"]),
        (
            {"subset": "mine", "slice_": ":5", "filter_": "django__|a.*b$"},
            ["mine", "-c", "1", "-i", "django__*", "-i", "a*b", "-l", "5"],
        ),
        (
            {"subset": "mine", "environment_class": "singularity", "model": "anthropic/c"},
            ["mine", "--model", "c", "-c", "1", "--sandbox", "apptainer"],
        ),
        (
            {
                "subset": "mine",
                "config": ["environment.container_timeout=2h", "agent.step_limit=9"],
            },
            ["mine", "-c", "1", "--budget", "7200", "--set", "agent_options.step_limit=9"],
        ),
        (
            {"subset": "mine", "config": ["model.model_kwargs.stop=END"]},
            ["mine", "-c", "1", "--set", 'sampling.stop=["END"]'],
        ),
    ],
)
def test_options_are_translated(given: Mapping[str, Any], argv: list[str]) -> None:
    """Defaults are those of mini-extra."""
    assert translated(**given).argv == argv


def test_a_whole_swebench_yaml_is_taken(tmp_path: Path) -> None:
    """Templates reach the agent as they are, and the prompt has no instructions of ours in addition.
    `swebench.yaml` without a file is mini-swe-agent's own default."""
    path = tmp_path / "swebench.yaml"
    path.write_text(
        "agent:\n  instance_template: |\n    Fix: {{task}}\n  cost_limit: 3.\n"
        "environment:\n  cwd: /testbed\n  timeout: 60\n  env: {PAGER: cat}\n"
        "  environment_class: docker\n"
        "model:\n  model_name: openai/a\n"
        "  model_kwargs: {drop_params: true, temperature: 0.5}\n"
    )

    found = translated(subset="mine", config=[str(path)], model="openai/b")

    assert found.options == [
        *("--model", "b", "-c", "1", "--sandbox", "docker"),
        *("--set", "agent_options.prompt_template={problem_statement}"),
        *("--set", "sampling.temperature=0.5"),
    ]
    assert found.agent_args == [
        *("-c", r'agent.instance_template="Fix: {{task}}\n"'),
        *("-c", "environment.timeout=60"),
        *("-c", 'environment.env={"PAGER": "cat"}'),
        *("-c", "model.model_kwargs.drop_params=true"),
    ]
    assert [note.partition(" ")[0] for note in found.notes] == [
        "agent.cost_limit",
        "environment.cwd",
    ]
    assert translated(subset="mine", config=["swebench.yaml"]).argv == ["mine", "-c", "1"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"shuffle": True}, "--shuffle: .*--include"),
        ({"slice_": "5:10"}, "--slice 5:10: .*--include"),
        ({"filter_": "(a|b)"}, "--filter .*--include"),
        ({"model": "openrouter/x"}, "--model openrouter/x: .*OPENAI_BASE_URL"),
        ({"model_class": "portkey"}, "--model-class portkey: only litellm"),
        ({"environment_class": "local"}, "--environment-class local: use one of docker"),
        ({"config": ["environment.executable=nerdctl"]}, "environment.executable nerdctl"),
        ({"config": ["environment.run_args=[]"]}, "environment.run_args: use `--set phases"),
        ({"config": ["environment.timeout=soon"]}, "a time limit of `environment`"),
        ({"config": ["run.env_startup_command=x"]}, "run.env_startup_command: use a dataset's"),
        ({"config": ["model.model_kwargs.api_base=x"]}, "api_base: set HOSTED_VLLM_API_BASE"),
        ({"config": ["agent.mode=yolo"]}, "agent.mode: Perdure does not know this key"),
        ({"config": ["none.yaml"]}, "--config none.yaml: .*No such file"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: Mapping[str, Any], named: str) -> None:
    """With the nearest option."""
    with pytest.raises(ConfigurationError, match=named):
        translated(**given)


def test_a_filter_means_the_same_as_a_glob() -> None:
    """A regular expression of mini-extra starts at the id's beginning and may end before its end."""
    assert globs_of(r"^django__django-1\.0$|sympy.*|a.b") == [
        "django__django-1.0",
        "sympy*",
        "a?b*",
    ]


def test_another_programs_predictions_are_not_overwritten(tmp_path: Path) -> None:
    """Their folder is for `perdure adopt`."""
    mini_swe_agent_files.check_unused(tmp_path)
    (tmp_path / "preds.json").write_text("{}")

    with pytest.raises(ConfigurationError, match="perdure adopt"):
        mini_swe_agent_files.check_unused(tmp_path)


def test_options_of_eval_are_checked_as_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped option is named, with the help page that lists the right ones."""
    assert invoke(["swebench", "--subset", "mine", "--dry-rum"]) == 2
    assert "Did you mean '--dry-run'? (see `perdure eval --help`)" in capsys.readouterr().err
