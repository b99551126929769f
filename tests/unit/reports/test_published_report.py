"""The published report: coverage, identity, the command, and what it leaves out."""

import shlex
from typing import Any

import pytest

from perdure.errors import Boundary
from perdure.reports.published_page import published_page
from perdure.reports.published_report import PublishedReport, published
from perdure.reports.redaction import public_image, redacted
from perdure.reports.reproducing_command import reproducing_command
from perdure.reports.rollout_facts import RunFacts
from perdure.reports.run_report import build_report
from perdure.types import Environment, Failure, Instance, RunRequest, Source, SourceKind
from tests.unit.reports.made_runs import rollout, run_of

IDENTITY = {
    "instance.toy/a": "a" * 16,
    "instance.toy/b": "b" * 16,
    "agent.version": "0123456789ab",
    "engine.model": "policy-7b",
    "engine.root": "/models/policy-7b",
    "engine.tokenizer": "org/policy-7b",
}
SECRET = "sk-0123456789abcdefghij"  # a key's form, which the report must hide


def request_of(**fields: Any) -> RunRequest:
    rollout = {"agent": "codex", "sampling": {"temperature": 0.7, "seed": 7}, **fields}
    return RunRequest(run_id="r", dataset="toy", n_samples=2, rollout=rollout)


def row(name: str, image: str = "") -> Instance:
    return Instance(
        instance_id=name,
        dataset="toy",
        problem_statement="It breaks.",
        source=Source(kind=SourceKind.IMAGE),
        environment=Environment(image=image or None),
    )


def report_of(run: RunFacts, request: RunRequest | None = None) -> PublishedReport:
    """The report of a run that was planned for two samples of a and of b."""
    planned = [(f"toy/{name}", sample) for name in "ab" for sample in range(2)]
    rows = {"toy/a": row("a", "registry.corp.example:5000/x/a:1"), "toy/b": row("b", "x/b:1")}
    figures = build_report(run, planned=planned)
    return published(run, figures, request or request_of(), IDENTITY, rows)


def test_a_score_without_all_verdicts_opens_with_that() -> None:
    """Two of four rollouts have a verdict, one of them resolved; the page says it first too."""
    found = report_of(run_of("r", {"a": ["resolved", "unresolved"], "b": [None]}))

    assert not found.is_complete
    assert found.headline.startswith(
        "Incomplete: 2 of 4 rollouts have a verdict. Of these, pass@1 50"
    )
    assert found.headline.endswith("25.0 % if none of the rest resolves, 75.0 % if all do")
    assert published_page(found).index("Incomplete: 2 of 4") < published_page(found).index("<table")


def test_a_whole_score_says_n_of_n() -> None:
    found = report_of(run_of("r", {"a": ["resolved"] * 2, "b": ["unresolved"] * 2}))

    assert found.is_complete
    assert found.headline.startswith("pass@1 50.0 % over 2 instances (95% interval ")
    assert found.headline.endswith("; 4 of 4 rollouts have a verdict")


def test_failures_are_counted_by_boundary() -> None:
    """Their messages may name hosts, so only boundary and type are published."""
    lost = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="node-17.corp died")
    refused = Failure(boundary=Boundary.ENGINE, type="EngineRefused", message=f"key {SECRET}")
    rollouts = [rollout("a", n, None, failure=lost) for n in range(2)]
    found = report_of(RunFacts("r", (*rollouts, rollout("b", 0, None, failure=refused))))
    counts = [(one.boundary, one.type, one.rollouts) for one in found.failures]
    texts = found.model_dump_json() + published_page(found)

    assert counts == [("engine", "EngineRefused", 1), ("sandbox", "SandboxLost", 2)]
    assert "corp" not in texts
    assert SECRET not in texts


def test_a_run_is_identified() -> None:
    """Rows and images, agent, model, seed and versions; the digest changes with any row."""
    found = report_of(run_of("r", {"a": ["resolved"]}))
    other = published(
        run_of("r", {"a": ["resolved"]}),
        build_report(run_of("r", {"a": ["resolved"]})),
        request_of(),
        IDENTITY | {"instance.toy/b": "c" * 16},
        {"toy/a": None, "toy/b": None},
    )

    assert [(one.sha256, one.image) for one in found.dataset.rows] == [
        ("a" * 16, "<registry>/x/a:1"),
        ("b" * 16, "x/b:1"),
    ]
    assert found.dataset.sha256 != other.dataset.sha256
    assert (found.agent.versions, found.agent.packages_sha256) == (("2.0",), "0123456789ab")
    assert found.model.reported["engine.root"] == "<path>/policy-7b"
    assert (found.sampling["seed"], found.sampling["temperature"]) == (7, 0.7)
    assert found.perdure_versions == ("0.1.0",)
    assert found.settings["n_samples"] == 2


def test_the_command_samples_the_run_again() -> None:
    """Every field that the user set is in it, quoted for a shell; secrets are not."""
    request = request_of(
        grading="later", agent_options={"api_key": SECRET, "prompt": 'it\'s {"a": 1}'}
    ).model_copy(update={"include": ("h11 *",), "deadline_s": 3600.0, "stop_at": 0.98})
    line = reproducing_command(request, "policy-7b")

    assert shlex.split(line) == [
        *("PERDURE_ENGINE__MODEL=policy-7b", "perdure", "run", "toy", "-i", "h11 *"),
        *("--agent", "codex", "-n", "2", "--deadline", "3600s", "--stop-at", "98%"),
        *("--set", "agent_options.api_key=<hidden>"),
        *("--set", 'agent_options.prompt=it\'s {"a": 1}'),
        *("--set", "sampling.seed=7", "--set", "sampling.temperature=0.7", "--new"),
    ]


def test_the_command_names_single_instances() -> None:
    """A run of listed instances has no dataset in its request."""
    listed = RunRequest(run_id="r", instances=("toy/a", "toy/b"), rollout={"agent": "nop"})
    one = listed.model_copy(update={"instances": ("toy/a",)})

    assert reproducing_command(listed, "").startswith("perdure run toy -i a -i b --agent nop")
    assert reproducing_command(one, "").startswith("perdure run toy/a --agent nop")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"OPENAI_API_KEY": "x"}, {"OPENAI_API_KEY": "<hidden>"}),
        ({"max_tokens_per_turn": 8192}, {"max_tokens_per_turn": 8192}),
        (["/data/models/Qwen3-30B/"], ["<path>/Qwen3-30B"]),
        ("org/Qwen3-30B", "org/Qwen3-30B"),
        ("http://10.0.0.7:8000/v1", "<url>"),
        ("gpu-3.corp.example:8000 and 10.0.0.7", "<host> and <host>"),
        ("use sk-proj-abcdefghijklmnop", "use <hidden>"),
        ("2.5.1", "2.5.1"),
    ],
)
def test_machines_and_keys_are_left_out(value: Any, shown: Any) -> None:
    assert redacted(value) == shown


def test_a_public_image_keeps_its_registry() -> None:
    assert public_image("ghcr.io/x/y:1") == "ghcr.io/x/y:1"
    assert public_image("python:3.11") == "python:3.11"
