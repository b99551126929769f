"""Aider's command line and files, and how its end is read."""

import json

import pytest

from perdure.agents.aider import MODEL_METADATA, MODEL_SETTINGS, Aider
from perdure.agents.headless_cli import PROMPT
from perdure.errors import ConfigurationError
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, with_options


def test_a_file_points_it_at_the_gateway() -> None:
    """Address, key and header are in a file, because commands would inherit variables."""
    launch = Aider().launch(TASK)
    (model,) = json.loads(launch.files[MODEL_SETTINGS])
    known = json.loads(launch.files[MODEL_METADATA])["openai/policy"]

    assert model["name"] == "openai/policy"
    assert model["extra_params"]["api_base"] == "http://127.0.0.1:18001/v1"
    assert model["extra_params"]["api_key"] == TASK.session_key
    assert model["extra_params"]["extra_headers"] == TASK.headers
    assert (known["max_input_tokens"], known["max_output_tokens"]) == (50_000, 2000)
    assert not any(TASK.session_key in value for value in [*launch.argv, *launch.env.values()])


def test_it_leaves_the_repository_alone_but_for_edits() -> None:
    """No commits, no change of .gitignore, and its histories outside the repository."""
    argv = Aider().launch(with_options(edit_format="whole", extra_args=["--verbose"])).argv
    histories = [argv[argv.index(f"--{kind}-history-file") + 1] for kind in ("chat", "input")]

    assert argv[:2] == ("/opt/aider/bin/python", "-I")
    assert argv[argv.index("--message-file") + 1] == PROMPT
    assert argv[argv.index("--edit-format") + 1] == "whole"
    assert {"--no-auto-commits", "--no-dirty-commits", "--no-gitignore"} <= set(argv)
    assert {"--analytics-disable", "--no-check-update", "--no-detect-urls"} <= set(argv)
    assert all(path.startswith("/home/agent/") for path in histories)
    assert argv[-1] == "--verbose"


def test_an_unknown_option_is_refused_by_name() -> None:
    """The error names the option and what there is."""
    with pytest.raises(ConfigurationError, match=r"agent_options\.max_turns: unknown.*aider"):
        Aider().launch(with_options(max_turns=3))


@pytest.mark.parametrize(
    ("stdout", "code", "turns", "end"),
    [
        (b"Applied edit to calc.py\n", 0, 2, AgentEnd.FINISHED),
        (b"Model openai/policy has hit a token limit!\n", 0, 2, AgentEnd.LIMIT),
        (b"Traceback", 1, 2, AgentEnd.CRASHED),
        (b"\xff", 0, 0, AgentEnd.NEVER_CALLED_MODEL),
    ],
)
def test_its_end_is_read_from_its_code_and_words(
    stdout: bytes, code: int, turns: int, end: AgentEnd
) -> None:
    """It exits with 0 at its token limit."""
    assert Aider().classify(ended(stdout, code, turns)) is end
