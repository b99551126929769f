"""codex's command line and settings, and how its events are read."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.agents import npm_packages
from perdure.agents.codex import CONFIG, KEY, MOUNT, Codex
from perdure.errors import AgentError
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options


def test_its_settings_name_the_gateway_and_the_window() -> None:
    """Valid TOML with our provider, the Responses API and the rollout's context limit."""
    model = 'odd "name" \N{BUG}\\'
    settings = tomllib.loads(Codex().launch(replace(TASK, model=model)).files[CONFIG].decode())
    provider = settings["model_providers"][settings["model_provider"]]

    assert settings["model"] == model
    assert settings["model_context_window"] == 50_000
    assert settings["model_auto_compact_token_limit"] < 50_000
    assert provider["base_url"] == "http://127.0.0.1:18001/v1"
    assert (provider["wire_api"], provider["env_key"]) == ("responses", KEY)
    assert provider["http_headers"] == TASK.headers


def test_it_runs_headless() -> None:
    """It asks no questions, prints events, and reads the prompt from standard input."""
    argv = Codex().launch(with_options(extra_args=["-c", "x=1"])).argv

    assert argv[4:6] == (f"{MOUNT}/bin/codex", "exec")
    assert {"--json", "--dangerously-bypass-approvals-and-sandbox"} <= set(argv)
    assert argv[-3:] == ("-c", "x=1", "-")


@pytest.mark.parametrize(
    ("stdout", "code", "end"),
    [
        (said(type="turn.completed"), 0, AgentEnd.FINISHED),
        (said(type="turn.completed"), 1, AgentEnd.CRASHED),
        (said(type="turn.started"), 0, AgentEnd.CRASHED),
        (
            said(type="turn.failed", error={"message": "no room in the model's context window."}),
            1,
            AgentEnd.LIMIT,
        ),
        (said(type="turn.failed", error={"message": "exceeded retry limit"}), 1, AgentEnd.CRASHED),
    ],
)
def test_its_end_is_read_from_its_events(stdout: bytes, code: int, end: AgentEnd) -> None:
    """A completed turn with exit code 0 is finished; a full context is a limit."""
    assert Codex().classify(ended(stdout, code)) is end


async def test_a_tarball_of_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named tarball without codex is refused before a sandbox boots."""

    async def other(tools: Path, name: str, tarball: Path | None) -> Path:
        return tmp_path

    monkeypatch.setattr(npm_packages, "installed", other)
    with pytest.raises(AgentError, match="not a package of codex"):
        await Codex().install(tmp_path, AgentSettings())
