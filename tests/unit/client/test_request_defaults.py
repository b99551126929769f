"""Variables of slime and document 002 as defaults of requests."""

import pytest

from perdure.client.request_defaults import defaults_for, rollout_with_defaults, run_with_defaults
from perdure.errors import ConfigurationError
from perdure.types import RolloutRequest, RunRequest

REQUEST = RolloutRequest(run_id="r", instance="d/i", agent="claude_code")


def test_a_variable_fills_what_a_request_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets, prompt and extra flags set on a host apply to the rollouts started there."""
    monkeypatch.setenv("SWE_TIME_BUDGET_SEC", "900")
    monkeypatch.setenv("SWE_EVAL_TIMEOUT_SEC", "300")
    monkeypatch.setenv("SWE_CC_PROMPT", "Send an investigator.")
    monkeypatch.setenv("SWE_CLAUDE_EXTRA_ARGS", "--model x")
    filled = rollout_with_defaults(REQUEST)

    assert (filled.agent_budget_s, filled.grade_timeout_s) == (900.0, 300.0)
    assert filled.agent_options == {
        "prompt_template": "Send an investigator.",
        "extra_args": "--model x",
    }


def test_a_request_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value in the request applies, even if it equals the default."""
    monkeypatch.setenv("SWE_TIME_BUDGET_SEC", "900")
    request = RunRequest(run_id="r", instances=("d/i",), rollout={"agent_budget_s": 1800.0})

    assert run_with_defaults(request).rollout == {"agent_budget_s": 1800.0}


@pytest.mark.parametrize("option", ["prompt_template", "SWE_CC_PROMPT"])
def test_an_option_wins_by_either_name(option: str) -> None:
    """The option's own name and its name in the documents both count."""
    fields = {"agent_options": {option: "Mine."}}

    assert defaults_for(fields, "claude_code", {"SWE_CC_PROMPT": "Theirs."}) == fields


def test_the_newer_name_of_the_budget_works() -> None:
    """slime's main calls it SWE_AGENT_TIME_BUDGET_SEC. The name of its coding-agent example takes
    precedence."""
    newer = {"SWE_AGENT_TIME_BUDGET_SEC": "60"}

    assert defaults_for({}, "codex", newer) == {"agent_budget_s": 60.0}
    assert defaults_for({}, "codex", {**newer, "SWE_TIME_BUDGET_SEC": "70"}) == {
        "agent_budget_s": 70.0
    }


def test_claude_codes_variables_leave_other_agents_alone() -> None:
    """A host's variable does not make an agent without that option fail."""
    assert defaults_for({}, "oracle", {"SWE_CLAUDE_EXTRA_ARGS": "--x", "SWE_CC_PROMPT": "y"}) == {}


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan", "inf"])
def test_a_variable_that_is_no_time_is_named(text: str) -> None:
    """The message names the variable, not the field that it sets."""
    with pytest.raises(ConfigurationError, match=f"SWE_EVAL_TIMEOUT_SEC={text}: write a number"):
        defaults_for({}, "nop", {"SWE_EVAL_TIMEOUT_SEC": text})


@pytest.mark.parametrize(("text", "filled"), [("1", {"reward_form": "partial"}), ("0", {})])
def test_a_dense_reward_is_asked_for_as_in_document_004(text: str, filled: dict[str, str]) -> None:
    """SWE_REWARD_DENSE applies in every trainer, not only in TorchTitan's recipes."""
    assert defaults_for({}, "codex", {"SWE_REWARD_DENSE": text}) == filled
