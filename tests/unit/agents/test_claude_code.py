"""Claude Code's command line, and how its result is read."""

import json
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.agents import npm_packages
from perdure.agents.claude_code import ClaudeCode
from perdure.errors import ConfigurationError, MissingDependency
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd
from tests.unit.agents.headless_task import TASK, ended, said, with_options

COMPLETED = said(type="result", is_error=False, terminal_reason="completed", result="Done.")


def test_its_commands_get_no_way_to_the_gateway(tmp_path: Path) -> None:
    """It sources a file before each command, which removes address, key and header."""
    launch = ClaudeCode().launch(TASK)
    script = tmp_path / "command-env.sh"
    script.write_bytes(launch.files[launch.env["CLAUDE_ENV_FILE"]])
    seen = subprocess.run(
        ["sh", "-c", '. "$0" && env', script], env=dict(launch.env), capture_output=True, check=True
    ).stdout.decode()

    assert "DISABLE_AUTOUPDATER=1" in seen
    for secret in (TASK.session_key, "127.0.0.1:18001", *TASK.headers.values()):
        assert secret in "".join(launch.env.values())
        assert secret not in seen


def package(path: Path, *names: str) -> Path:
    """A tarball with these programs below its first folder."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            found = tarfile.TarInfo(f"package/{name}")
            found.mode = 0o755
            archive.addfile(found)
    return path


async def test_a_package_that_needs_node_runs_on_the_named_node(tmp_path: Path) -> None:
    """With two tarballs, `claude` starts the package's `cli.js` on the mounted Node."""
    given = AgentSettings(
        claude_code_tarball=package(tmp_path / "cc.tgz", "cli.js"),
        node_tarball=package(tmp_path / "node.tgz", "bin/node"),
    )
    mounts = await ClaudeCode().install(tmp_path / "tools", given)
    inside = {mount.target: mount.source for mount in mounts}
    start = (inside["/opt/claude-code"] / "claude").read_text()
    node, script = start.split()[2:4]

    for path in (node, script):
        target = next(one for one in inside if path.startswith(f"{one}/"))
        assert (inside[target] / path.removeprefix(f"{target}/")).is_file()
    assert ClaudeCode().launch(TASK).argv[4] == "/opt/claude-code/claude"


@pytest.mark.parametrize(("name", "fix"), [("cli.js", "SWE_HOST_NODE_TARBALL"), ("x", "native")])
async def test_a_tarball_that_cannot_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fix: str
) -> None:
    """Before a sandbox boots, the error names the variable and the package to use instead."""
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9/")
    monkeypatch.setattr(npm_packages, "TRIES", 1)
    given = AgentSettings(claude_code_tarball=package(tmp_path / "cc.tgz", name))

    with pytest.raises(MissingDependency, match=rf"SWE_HOST_CC_TARBALL.*{fix}"):
        await ClaudeCode().install(tmp_path / "tools", given)


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_it_runs_headless_and_reads_no_settings_of_the_repository() -> None:
    """One JSON object per line, no questions, no settings or servers of the repository."""
    argv = ClaudeCode().launch(TASK).argv

    assert flag(argv, "--output-format") == "stream-json"
    assert flag(argv, "--setting-sources") == "user"
    assert {"-p", "--dangerously-skip-permissions", "--strict-mcp-config"} <= set(argv)


def test_every_model_name_is_ours() -> None:
    """Sub-agents and small tasks call the policy too, although their default is another model."""
    env = ClaudeCode().launch(replace(TASK, model="actor")).env
    models = {value for name, value in env.items() if name.endswith("_MODEL")}

    assert models == {"actor"}


def test_its_small_model_can_have_a_name_of_its_own() -> None:
    """A request's `models` can then give these calls to another model than the policy."""
    env = ClaudeCode().launch(replace(TASK, model="actor", options={"small_model": "aside"})).env
    small = {name for name, value in env.items() if value == "aside"}

    assert small == {"ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"}


def test_window_and_cap_come_from_the_sampling() -> None:
    """It compacts at the rollout's context limit, and requests at most the token limit."""
    env = ClaudeCode().launch(TASK).env

    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "50000"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2000"


def test_options_reach_its_command_line() -> None:
    """Turn limit, tools, sub-agents and extra flags are passed in its own form."""
    helper = {"description": "Reads", "prompt": "Read.", "tools": ["Read"]}
    options: dict[str, Any] = {
        "max_turns": 7,
        "tools": ["Bash"],
        "agents": {"helper": helper},
        "extra_args": ["--effort", "low"],
        "context_window": 30_000,
    }
    launch = ClaudeCode().launch(with_options(**options))

    assert flag(launch.argv, "--max-turns") == "7"
    assert flag(launch.argv, "--tools") == "Bash"
    assert json.loads(flag(launch.argv, "--agents")) == {"helper": helper}
    assert launch.argv[-2:] == ("--effort", "low")
    assert launch.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "30000"


def test_no_turn_limit_on_request() -> None:
    """0 turns means no limit, so the flag is absent."""
    assert "--max-turns" not in ClaudeCode().launch(with_options(max_turns=0)).argv


def test_without_tools_it_is_refused() -> None:
    """An agent without tools cannot change files."""
    with pytest.raises(ConfigurationError, match=r"agent_options\.tools"):
        ClaudeCode().launch(with_options(tools=[]))


def test_samples_of_an_instance_share_its_session_id() -> None:
    """Sibling prompts are equal to the byte, so they share a prefix cache."""
    argv = ClaudeCode().launch(TASK).argv
    other = ClaudeCode().launch(replace(TASK, session_key="another.key")).argv

    assert flag(argv, "--session-id") == flag(other, "--session-id")


@pytest.mark.parametrize(
    ("fields", "code", "end"),
    [
        ({"is_error": False, "terminal_reason": "completed"}, 0, AgentEnd.FINISHED),
        ({"is_error": False, "terminal_reason": "completed"}, 1, AgentEnd.CRASHED),
        ({"is_error": True, "terminal_reason": "completed"}, 0, AgentEnd.CRASHED),
        ({"is_error": True, "terminal_reason": "max_turns"}, 1, AgentEnd.LIMIT),
        ({"is_error": True, "terminal_reason": "prompt_too_long"}, 1, AgentEnd.LIMIT),
        ({"is_error": True, "terminal_reason": "budget_exhausted"}, 1, AgentEnd.LIMIT),
        ({"is_error": True, "terminal_reason": "api_error", "result": "503"}, 1, AgentEnd.CRASHED),
        (
            {
                "terminal_reason": "api_error",
                "result": "response exceeded the 9 output token maximum",
            },
            1,
            AgentEnd.LIMIT,
        ),
        ({"is_error": True, "terminal_reason": ["max_turns"]}, 1, AgentEnd.CRASHED),
    ],
)
def test_its_end_is_read_from_its_result(fields: dict[str, Any], code: int, end: AgentEnd) -> None:
    """Exit code, error mark and reason decide together; `subtype` does not count."""
    stdout = said(type="system") + said(type="result", subtype="success", **fields)

    assert ClaudeCode().classify(ended(stdout, code)) is end


def test_the_last_result_counts() -> None:
    """It prints a second result when a background task ends after the first."""
    first = said(type="result", is_error=True, terminal_reason="api_error")

    assert ClaudeCode().classify(ended(first + COMPLETED + b"not json\n")) is AgentEnd.FINISHED
