"""The reward of a grade: the price of tampering, and rewards that a request withholds."""

import math
from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.graders.reward_rules import apply_reward_rules
from perdure.graders.twins.twin_verdict import follow_official_verdict
from perdure.types import Grade, Outcome, Rewards, RolloutRequest, Verification

FULL = Rewards(binary=1.0, f2p_fraction=1.0, p2p_fraction=1.0, partial=1.0)
SIGNALS = ("a.py: f_back (frames)", "a.py: gc.get_objects (objects)")


def request(**fields: Any) -> RolloutRequest:
    return RolloutRequest(run_id="r", instance="toy/a", **fields)


def resolved(state: str | None = "unverified", signals: tuple[str, ...] = SIGNALS) -> Grade:
    checked = None if state is None else Verification.model_validate({"state": state})
    return Grade(outcome=Outcome.RESOLVED, rewards=FULL, verification=checked, signals=signals)


EXPOSED = Grade(
    outcome=Outcome.TAMPERED,
    official=Outcome.RESOLVED,
    rewards=Rewards(binary=0.0),
    verification=Verification(state="exposed", reason="the twin of t passed"),
)


def test_tampering_has_the_price_of_the_request_in_every_form() -> None:
    """A trainer that uses a dense reward pays it, too. Other outcomes cost nothing."""
    lost = Grade(outcome=Outcome.UNRESOLVED, rewards=Rewards(binary=0.0, partial=0.5))
    asked = request(tampered_reward=-0.5)

    priced = apply_reward_rules(EXPOSED.model_copy(update={"named_rewards": {"tidy": 1.0}}), asked)

    assert priced.reward == -0.5
    assert set(priced.rewards.model_dump().values()) == {-0.5}
    assert priced.named_rewards == {}
    assert apply_reward_rules(lost, asked) == lost
    assert apply_reward_rules(EXPOSED, request()).reward == 0.0


@pytest.mark.parametrize(
    ("form", "reward"), [(None, 0.0), ("binary", 0.0), ("partial", 0.75), ("f2p_fraction", 0.5)]
)
def test_the_request_names_the_form_of_its_reward(form: str | None, reward: float) -> None:
    """A patch that fixes half of the tests earns its share if the trainer asks for that."""
    half = Rewards(binary=0.0, f2p_fraction=0.5, p2p_fraction=1.0, partial=0.75)
    grade = Grade(outcome=Outcome.UNRESOLVED, rewards=half)

    assert apply_reward_rules(grade, request(reward_form=form)).reward == reward


@pytest.mark.parametrize(("form", "reward"), [(None, 0.75), ("binary", 0.0)])
def test_a_grader_that_gives_one_number_gives_the_reward(form: str | None, reward: float) -> None:
    """Harbor's reward file, a handler, or a reward model: no request has to name its form."""
    scores = Rewards(binary=0.0, partial=0.75)
    grade = Grade(outcome=Outcome.UNRESOLVED, rewards=scores, reward_form="partial")

    assert apply_reward_rules(grade, request(reward_form=form)).reward == reward


@pytest.mark.parametrize("price", [0.1, -10.5, math.nan, -math.inf])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    """Tampering never pays more than failing, and the price is a bounded number."""
    with pytest.raises(ConfigurationError, match="tampered_reward: it must be"):
        request(tampered_reward=price)


@pytest.mark.parametrize("state", ["unverified", "weak", None])
def test_a_reward_is_withheld_where_signals_meet_an_unproven_success(state: str | None) -> None:
    """It is None and not 0, the verdict stays, and the grade says why."""
    grade = apply_reward_rules(resolved(state), request(withheld_rewards=["signals"]))

    assert (grade.outcome, grade.reward, grade.rewards) == (Outcome.RESOLVED, None, FULL)
    assert (
        grade.withheld
        == f"{state or 'unverified'}, and its patch has signals: {'; '.join(SIGNALS)}"
    )


@pytest.mark.parametrize(
    "grade",
    [
        resolved("verified"),
        resolved(signals=()),
        Grade(outcome=Outcome.UNRESOLVED, rewards=Rewards(binary=0.0), signals=SIGNALS),
    ],
    ids=["proved by twins", "no signals", "no success"],
)
def test_other_rewards_are_not_withheld(grade: Grade) -> None:
    """A failure stays a 0 that trains, and twins outweigh signals."""
    assert apply_reward_rules(grade, request(withheld_rewards=["signals"])) == grade


def test_exposed_rollouts_can_be_left_out_of_their_group() -> None:
    """Also where the reward follows the official verdict, which a forgery wins."""
    asked = request(withheld_rewards=["exposed"], tampered_reward=-1)
    official = follow_official_verdict(EXPOSED)
    found = [apply_reward_rules(grade, asked) for grade in (EXPOSED, official)]

    assert official.reward == 1.0
    assert [grade.reward for grade in found] == [None, None]
    assert {grade.withheld for grade in found} == {"exposed: the twin of t passed"}
    assert apply_reward_rules(resolved(), asked).reward == 1.0
