"""What a request says about rewards: their form, the price of `tampered`, and which it withholds."""

from perdure.types import Grade, Outcome, Rewards, RolloutRequest, Verification

_SHOWN = 3


def apply_reward_rules(grade: Grade, request: RolloutRequest) -> Grade:
    """The same verdict with the request's rewards. A withheld reward is None, never 0."""
    if grade.outcome is Outcome.TAMPERED:
        price = Rewards(**dict.fromkeys(Rewards.model_fields, request.tampered_reward))
        grade = grade.model_copy(update={"rewards": price, "named_rewards": {}})
    form = request.reward_form or grade.reward_form
    withheld = _why_withheld(grade, request)
    return grade.model_copy(update={"reward_form": form, "withheld": withheld})


def _why_withheld(grade: Grade, request: RolloutRequest) -> str:
    """Empty if the reward counts."""
    checked = grade.verification or Verification(state="unverified")
    state = checked.state
    if "exposed" in request.withheld_rewards and state == "exposed":
        return f"exposed: {checked.reason}"
    unproven = grade.outcome is Outcome.RESOLVED and state != "verified"
    if "signals" in request.withheld_rewards and unproven and grade.signals:
        more = f" and {len(grade.signals) - _SHOWN} more" if len(grade.signals) > _SHOWN else ""
        return f"{state}, and its patch has signals: {'; '.join(grade.signals[:_SHOWN])}{more}"
    return ""
