"""What each trainer makes of a rollout's reward: its own normalisation, over Perdure's rows.

Run by `make test-trainers`, which puts the trainers at pinned versions into .perdure/trainers, once. The
group: resolved with one segment, resolved with three, unresolved, failed.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import docs_pages
from tests.real import trainers_here
from tests.workflows.made_turns import LOGPROBS

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEEDS = {"slime": trainers_here.need_slime, "prime-rl": trainers_here.need_prime_rl}
THIRD = pytest.approx(1 / 3, abs=1e-6)
TWO_THIRDS = pytest.approx(-2 / 3, abs=1e-6)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def advantages() -> dict[str, Any]:
    trainers_here.install()
    found: dict[str, Any] = await trainers_here.run("advantages.py", *trainers_here.CLONES)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dense() -> dict[str, Any]:
    trainers_here.install()
    found: dict[str, Any] = await trainers_here.run("advantages.py", *trainers_here.CLONES, "dense")
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def choices() -> dict[str, Any]:
    """A group of four: resolved, unresolved, without a verdict, and resolved but too stale."""
    trainers_here.install()
    found: dict[str, Any] = await trainers_here.run(
        "advantages.py", *trainers_here.CLONES, "choices"
    )
    return found


def need(trainer: str) -> None:
    """Skip the test where the trainer's clone is absent."""
    if trainer in NEEDS:
        NEEDS[trainer]()


TRAINED = 2
"""Sampled tokens of a row."""


@pytest.mark.parametrize(
    ("trainer", "choice"),
    [
        ("slime", "mask"),
        ("skyrl", "short"),
        ("skyrl", "mask"),
        ("verl", "short"),
        ("trl", "mask"),
        ("torchtitan", "short"),
    ],
)
async def test_a_missing_member_is_in_no_mean_and_a_stale_one_is(
    choices: dict[str, Any], trainer: str, choice: str
) -> None:
    """The mean of 1, 0 and 1. With a missing member as 0 it would be 1/2, without the stale one too.
    Only the two others are trained."""
    need(trainer)
    resolved, unresolved, *others = choices[trainer][choice]

    assert resolved == [[THIRD, TRAINED]]
    assert unresolved == [[TWO_THIRDS, TRAINED]]
    assert [trained for rows in others for _, trained in rows if trained] == []


@pytest.mark.parametrize("trainer", ["slime", "skyrl", "verl", "trl", "torchtitan"])
async def test_a_replacement_counts_once(choices: dict[str, Any], trainer: str) -> None:
    """It did not solve the instance: the mean of 1, 0, 0 and the stale member's 1."""
    need(trainer)
    resolved, unresolved, replacement, *others = choices[trainer]["replace"]

    half = pytest.approx(0.5, abs=1e-6)
    assert resolved == [[half, TRAINED]]
    assert unresolved == replacement == [[pytest.approx(-0.5, abs=1e-6), TRAINED]]
    assert [trained for rows in others for _, trained in rows if trained] == []


@pytest.mark.parametrize("trainer", ["skyrl", "trl"])
async def test_a_dropped_group_trains_nothing(choices: dict[str, Any], trainer: str) -> None:
    """These trainers need its rows."""
    rows = [row for rows in choices[trainer]["drop"] for row in rows]

    assert rows == [[0.0, 0]] * 4


async def test_torchtitans_controller_drops_a_group_whose_rollouter_raises(
    choices: dict[str, Any],
) -> None:
    """The hook gives none of its rollouts."""
    assert choices["torchtitan"]["drop"] == []


@pytest.mark.parametrize("trainer", ["slime", "skyrl", "verl", "torchtitan", "trl", "prime-rl"])
async def test_a_dense_reward_reaches_each_trainer(dense: dict[str, Any], trainer: str) -> None:
    """The mean of 1, 0.5 and 0: the rollout that fixed half of the tests is neither good nor bad."""
    need(trainer)
    resolved, half, unresolved, *_ = dense[trainer]

    assert (resolved[0], unresolved[0]) == (pytest.approx(0.5), pytest.approx(-0.5))
    assert half == [pytest.approx(0.0, abs=1e-6)] * len(half)


@pytest.mark.parametrize("trainer", ["slime", "skyrl", "verl", "torchtitan", "prime-rl"])
async def test_a_rollout_counts_once_whatever_its_segments_are(
    advantages: dict[str, Any], trainer: str
) -> None:
    """Both resolved rollouts gain a third, on every segment; the failed one is not in the mean."""
    need(trainer)
    first, with_subagents, unresolved, *failed = advantages[trainer]

    assert (first, with_subagents, unresolved) == ([THIRD], [THIRD] * 3, [TWO_THIRDS])
    assert failed in ([], [[]], [[0.0]])


async def test_prime_rl_leaves_a_missing_member_out(choices: dict[str, Any]) -> None:
    """The mean of 1 and 0; as a 0, it would be 1/3. A replacement's 0 counts."""
    need("prime-rl")
    half = pytest.approx(0.5)
    assert choices["prime-rl"]["short"] == [
        [[half, TRAINED]],
        [[pytest.approx(-0.5), TRAINED]],
        [],
    ]
    assert choices["prime-rl"]["replace"] == [
        [[pytest.approx(2 / 3), TRAINED]],
        *[[[pytest.approx(-1 / 3), TRAINED]]] * 2,
    ]


async def test_prime_rl_refuses_a_stale_member_that_only_counts(choices: dict[str, Any]) -> None:
    """prime-rl takes the mean over what it trains, so the reward would be lost without a word."""
    need("prime-rl")
    assert "too_stale is 'finish', which prime-rl does not take" in choices["prime-rl"]["finish"]


async def test_trl_leaves_a_failed_rollout_out(advantages: dict[str, Any]) -> None:
    """One row for each rollout; None is in no mean and has advantage 0."""
    assert advantages["trl"] == [[THIRD], [THIRD], [TWO_THIRDS], [0.0]]


async def test_split_rewards_punish_a_resolved_rollout_in_slime(advantages: dict[str, Any]) -> None:
    """Why `split` is not the default: slime's mean is over samples, and a third of 1 is below it. Of
    three resolved rollouts and one unresolved, the one with three segments loses."""
    trainers_here.need_slime()
    with_subagents, *_ = advantages["slime, split"]

    assert with_subagents == [pytest.approx(-1 / 6, abs=1e-6)] * 3
    assert advantages["slime, without the hook"][1] == [THIRD] * 3


async def test_slimes_step_ends_at_a_reward_of_none(advantages: dict[str, Any]) -> None:
    """Why an aborted sample has 0.0."""
    trainers_here.need_slime()
    assert "must be real number, not NoneType" in advantages["slime, reward None"]


async def test_slimes_own_cases_of_its_trajectories_hold() -> None:
    """Mode `slime` of `perdure export --segments` cuts each session of slime's tests as slime does: tokens,
    masks and logprobs. Three of the 35 tests record nothing to cut."""
    trainers_here.install()
    trainers_here.need_slime()
    found = await trainers_here.run("slime_tree.py", trainers_here.SLIME)

    assert found["differing"] == []
    assert (found["tests"], found["sessions"]) == (35, 35)


async def test_the_pages_loss_takes_a_batch_as_tensors(tmp_path: Path) -> None:
    """As printed: the sampled tokens' ratios, times their rollouts' advantages. Each sampled token
    is compared with its own logprob, not with its neighbour's."""
    trainers_here.install()
    page = tmp_path / "page.py"
    page.write_text(docs_pages.block("train.md", "python loss"))
    found = await trainers_here.run("batch_loss.py", page)

    first, *others = found["advantages"]
    ratios = [1 / 64 / math.exp(logprob) for logprob in LOGPROBS]
    terms = [first * ratios[0], *(one * ratio for one in others for ratio in ratios)]
    assert found["loss"] == pytest.approx(-math.fsum(terms) / len(terms), abs=1e-7)
    assert first == pytest.approx(2 / 3**0.5, abs=1e-5)
