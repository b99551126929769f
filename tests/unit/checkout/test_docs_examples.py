"""The examples of the documentation work as they are printed."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from perdure.agents.base import Agent, AgentTask, Evidence
from perdure.errors import ConfigurationError
from perdure.instances.rows.row_conversion import to_instance
from perdure.sandboxes.base import ExecState, ExecStatus
from perdure.types import AgentEnd, Instance, Sampling, Source, SourceKind
from tests import docs_pages
from tests.checkout_paths import ROOT

PAGE = ROOT / "docs" / "extend.md"
INSTANCE = Instance(
    instance_id="click-1",
    dataset="tests",
    problem_statement="It breaks.",
    source=Source(kind=SourceKind.DIRECTORY),
)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    file = tmp_path / "my_agents.py"
    file.write_text(docs_pages.block("extend.md", "python agent"))
    spec = importlib.util.spec_from_file_location("my_agents", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Agent = module.OneShot()
    return made


def task(**options: Any) -> AgentTask:
    return AgentTask(
        instance=INSTANCE,
        workdir="/testbed",
        gateway_url="http://127.0.0.1:8080",
        session_key="session.secret",
        model="policy",
        sampling=Sampling(),
        budget_s=60.0,
        options=options,
    )


def test_agent_example_is_launched_with_what_it_needs(agent: Agent) -> None:
    """The printed agent calls the gateway with its key, which is only in its environment."""
    launch = agent.launch(task(hint="Only bash."))

    assert launch.env["URL"] == "http://127.0.0.1:8080/v1/chat/completions"
    assert launch.env["TASK"] == "It breaks.\n\nOnly bash."
    assert not any(b"session.secret" in content for content in launch.files.values())
    for path, content in launch.files.items():
        compile(content, path, "exec")


def test_agent_example_refuses_unknown_options(agent: Agent) -> None:
    """A misspelt option of the printed agent is named."""
    with pytest.raises(
        ConfigurationError, match=r"agent_options.hnit: unknown, did you mean hint\?; one_shot"
    ):
        agent.launch(task(hnit="x"))


@pytest.mark.parametrize(
    ("status", "turns", "end"),
    [
        (ExecStatus(ExecState.EXITED, code=0), 1, AgentEnd.FINISHED),
        (ExecStatus(ExecState.EXITED, code=1), 1, AgentEnd.CRASHED),
        (ExecStatus(ExecState.EXITED, code=0), 0, AgentEnd.NEVER_CALLED_MODEL),
        (ExecStatus(ExecState.KILLED, cause="timeout", signal=9), 1, AgentEnd.LIMIT),
    ],
)
def test_agent_example_reads_its_end(
    agent: Agent, status: ExecStatus, turns: int, end: AgentEnd
) -> None:
    """The printed agent tells finished, crashed, cut off and never started apart."""
    assert agent.classify(Evidence(status, b"", b"", {}, turns)) is end


def test_row_example_is_an_instance() -> None:
    """The printed row is complete: it is read without a complaint."""
    row = json.loads(docs_pages.block("extend.md", "json"))
    row["patch"] = row["test_patch"] = "diff --git a/m b/m\n--- a/m\n+++ b/m\n@@ -1 +1 @@\n-a\n+b\n"

    assert to_instance(row, "mine", 1).grading.fail_to_pass == ("tests/test_core.py::test_add",)


def printed() -> str:
    """Every text of the product, line by line: a page may quote these, and nothing else."""
    files = [file for folder in ("src", "activities") for file in (ROOT / folder).rglob("*.py")]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_bytes())))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return "\n".join(re.sub(r"\{\w+\}", "\n", text) for text in texts if isinstance(text, str))


def test_a_trainer_is_told_of_perdure_in_five_lines() -> None:
    """What a user writes for each, other than the trainer's own; other tests run it as printed."""
    page = (ROOT / "docs/train.md").read_text()
    _, _, section = page.partition("## In a trainer's own loop\n")
    told = re.split(r"^\*\*", section.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    lines = {one.partition("**")[0]: len(_code(one)) for one in told}

    assert list(lines) == [
        *("slime", "TorchTitan", "verl", "SkyRL", "verifiers", "TRL"),
        "A loop around an OpenHands server",
    ]
    assert {name: n for name, n in lines.items() if not 1 <= n <= 5} == {}


def _code(markdown: str) -> list[str]:
    """The lines of its code, fenced or indented."""
    fenced = re.findall(r"^```\w[^\n]*\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    \S.*$", prose, re.MULTILINE)
    return [line for block in fenced for line in block.splitlines() if line.strip()] + indented


def test_troubleshooting_quotes_what_the_product_prints() -> None:
    """Every message on the troubleshooting page is still in the code, word for word."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    lines = re.findall(r"^- (`.*?`): ", page, re.MULTILINE)
    rows = [row for line in lines for row in line.strip("`").split("`, `")]
    quoted = [part.strip() for row in rows for part in row.split("\N{HORIZONTAL ELLIPSIS}")]
    product = printed()

    assert len(rows) > 20
    assert [part for part in quoted if part not in product] == []
