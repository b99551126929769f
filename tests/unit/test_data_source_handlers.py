"""Each data source has one handler, and its hooks have the documented names."""

from collections.abc import Mapping
from typing import Any

import pytest

from perdure import variant_registry
from perdure.data_source_handlers import (
    AgentHandler,
    JobDetails,
    PublicDatasetHandler,
    get_registered_functions,
    handler_of,
    import_handlers,
    parse_verdict,
    register_agent_handler,
)
from perdure.errors import ConfigurationError, InstanceError
from perdure.graders.base import Graded
from perdure.instances.rows.row_conversion import to_instance
from perdure.types import Outcome
from tests.unit.instances.test_rows import ROW


class Mine(AgentHandler):
    name = "mine"

    async def eval(
        self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True
    ) -> Graded | Mapping[str, Any]:
        return {"score": 1.0}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test registers its own handlers."""
    monkeypatch.setattr(variant_registry, "HANDLERS", {})


def test_hooks_are_found_by_kind_and_data_source() -> None:
    """`get_registered_functions` returns the hook of the registered handler."""
    mine = Mine()
    register_agent_handler(mine)

    assert [get_registered_functions(k, "mine") for k in ("init", "run", "eval")] == [
        *(mine.init, mine.run, mine.eval)
    ]


def test_a_registered_data_source_reads_its_rows() -> None:
    """A row with the handler's name goes to it, and by default its fields are those of
    SWE-bench."""
    register_agent_handler(Mine())

    assert to_instance({**ROW, "data_source": "mine"}, "d", 1).data_source == "mine"


def test_a_dotted_path_needs_no_registration() -> None:
    """`data_source` may name the class itself, for rows and for rollouts."""
    path = f"{__name__}:Mine"

    assert to_instance({**ROW, "data_source": path}, "d", 1).data_source == path
    assert isinstance(handler_of(path), Mine)


@pytest.mark.parametrize("name", ["swe-gym", "SWE-Gym", "princeton-nlp/SWE-bench_Verified"])
def test_public_names_have_the_published_handler(name: str) -> None:
    """Owner, capitals, underscores and suffixes of a public dataset's name do not matter."""
    assert isinstance(handler_of(name), PublicDatasetHandler)


def test_an_unknown_data_source_is_named_with_the_nearest() -> None:
    """The error names the value, the closest known one and how to add another."""
    register_agent_handler(Mine())

    with pytest.raises(ConfigurationError, match=r"'minee': did you mean 'mine'.*PERDURE_HANDLERS"):
        handler_of("minee")


@pytest.mark.parametrize("name", ["swebench", "mine", ""])
def test_a_taken_or_empty_name_is_refused(name: str) -> None:
    """A handler cannot replace one of another class or of a public data source."""
    register_agent_handler(Mine())
    other = type("Other", (Mine,), {"name": name})()

    with pytest.raises(ConfigurationError, match="name"):
        register_agent_handler(other)


def test_an_unknown_kind_is_refused() -> None:
    """There are three kinds of hooks."""
    with pytest.raises(ConfigurationError, match="init, run or eval"):
        get_registered_functions("grade", "swebench")  # type: ignore[arg-type]


def test_a_module_that_is_missing_is_named() -> None:
    """A wrong PERDURE_HANDLERS is refused with the module's name."""
    with pytest.raises(ConfigurationError, match="'no_such_source' of PERDURE_HANDLERS"):
        import_handlers("perdure.data_source_handlers, no_such_source")


@pytest.mark.parametrize(
    ("answer", "outcome", "score"),
    [
        ({"score": 1}, Outcome.RESOLVED, 1.0),
        ({"score": 0.25}, Outcome.UNRESOLVED, 0.25),
        ({"report": {"resolved": True}}, Outcome.RESOLVED, 1.0),
        ({"resolved": False}, Outcome.UNRESOLVED, 0.0),
    ],
)
def test_a_report_becomes_a_grade(
    answer: Mapping[str, Any], outcome: Outcome, score: float
) -> None:
    """`score` and `resolved` become outcome and rewards; `report` is unwrapped."""
    grade = parse_verdict(Mine(), answer).grade

    assert (grade.outcome, grade.reward, grade.grader) == (outcome, score, "mine")
    assert grade.rewards.binary == float(outcome is Outcome.RESOLVED)


def test_rewards_by_name_are_kept() -> None:
    """`reward` is the score. Without it the mean is, and `score` or `resolved` replaces both."""
    named = {"reward": 1, "tidy": -2.5}
    grade = parse_verdict(Mine(), {"rewards": named}).grade
    mean = parse_verdict(Mine(), {"report": {"rewards": {"right": 1, "tidy": 0}}}).grade
    scored = parse_verdict(Mine(), {"score": 0.25, "rewards": {"speed": 9}}).grade

    assert (grade.outcome, grade.named_rewards) == (Outcome.RESOLVED, named)
    assert (mean.outcome, mean.rewards.partial) == (Outcome.UNRESOLVED, 0.5)
    assert (scored.rewards.partial, scored.named_rewards) == (0.25, {"speed": 9})


@pytest.mark.parametrize("rewards", [{}, [1], {"a": "1"}, {"a": float("nan")}])
def test_rewards_that_are_no_numbers_are_refused(rewards: Any) -> None:
    """The error says what is wrong with them."""
    with pytest.raises(InstanceError, match="'mine' returned bad `rewards`: "):
        parse_verdict(Mine(), {"resolved": True, "rewards": rewards})


@pytest.mark.parametrize("answer", [{}, {"score": "1"}, {"score": 2}, {"report": 1}, None])
def test_a_report_without_a_verdict_is_refused(answer: Any) -> None:
    """A malformed answer is the handler's mistake, not a reward of 0."""
    with pytest.raises(InstanceError, match="'mine' must return a Graded"):
        parse_verdict(Mine(), answer)
