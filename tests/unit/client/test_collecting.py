"""What a trainer takes, and in which order."""

from itertools import islice

import pytest

from perdure.client.batch_collection import FinishedGroup, complete, fresh
from perdure.client.instance_sampler import InstanceOrder
from perdure.client.rollout_listing import RolloutInfo, summarize_rollouts
from perdure.errors import ConfigurationError
from perdure.types import EpisodeRef, GroupRequest, RolloutRequest, RolloutStatus

REFS = [f"d/{n}" for n in range(5)]
REQUEST = GroupRequest(rollout=RolloutRequest(run_id="r", instance="d/i"))


def group(*versions: int | None) -> FinishedGroup:
    episodes = [
        EpisodeRef(
            uri="file:///x",
            instance_id="i",
            sample_index=n,
            agent="nop",
            status=RolloutStatus.GRADED,
            reward=1.0,
            trainable=True,
            policy_version_min=version,
        )
        for n, version in enumerate(versions)
    ]
    return FinishedGroup(REQUEST, tuple(episodes))


# --- staleness -------------------------------------------------------------------------------


def test_a_group_that_is_too_stale_is_refused() -> None:
    """The oldest token of a finished group counts, and an unknown version is not fresh."""
    newest = 7
    accept = fresh(lambda: newest, 1)
    found = [accept(group(*versions)) for versions in ((6, 7), (5, 7), (None, 7))]
    newest = 8

    assert found == [True, False, False]
    assert not accept(group(6, 7))


def test_a_group_with_a_missing_member_is_not_complete() -> None:
    """One that failed, or a straggler that runs on. A withheld reward is one of a graded rollout."""
    whole = group(*[1] * 8)
    failed = whole.refs[0].model_copy(update={"status": RolloutStatus.FAILED, "reward": None})
    withheld = whole.refs[0].model_copy(update={"reward": None, "withheld": "exposed"})
    found = [
        complete(FinishedGroup(REQUEST, refs))
        for refs in (
            whole.refs,
            (withheld, *whole.refs[1:]),
            (failed, *whole.refs[1:]),
            whole.refs[1:],
        )
    ]

    assert found == [True, True, False, False]


# --- signal --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rewards", "signal"), [((1.0, None), False), ((1.0, None, 0.0), True)])
def test_a_withheld_reward_is_no_signal(rewards: tuple[float | None, ...], signal: bool) -> None:
    """A group whose other rewards are equal has no advantage to train on."""
    known = group(*(1 for _ in rewards))
    pairs = zip(known.refs, rewards, strict=True)
    refs = tuple(one.model_copy(update={"reward": reward}) for one, reward in pairs)

    assert FinishedGroup(REQUEST, refs).has_signal is signal


# --- order -----------------------------------------------------------------------------------


def test_each_epoch_has_every_instance_once() -> None:
    """Each epoch has its own order, which is equal for the same seed."""
    order = InstanceOrder(REFS, seed=3)
    epochs = [list(islice(order, 5)) for _ in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [REFS] * 3
    assert epochs[0] != epochs[1]
    assert list(islice(InstanceOrder(REFS, seed=3), 15)) == [*epochs[0], *epochs[1], *epochs[2]]
    assert list(islice(InstanceOrder(REFS, shuffle=False), 6)) == [*REFS, REFS[0]]


@pytest.mark.parametrize("taken", [0, 3, 5, 12])
def test_a_restarted_trainer_continues_where_it_was(taken: int) -> None:
    """The position is plain data, and the iteration continues where it was."""
    order = InstanceOrder(REFS, seed=3)
    list(islice(order, taken))
    again = InstanceOrder(REFS, seed=3)
    again.resume(order.position())

    assert list(islice(again, 9)) == list(islice(order, 9))


def test_a_position_of_other_instances_is_refused() -> None:
    """Continuing would skip and repeat instances."""
    position = InstanceOrder(REFS, seed=3).position()
    for other in (InstanceOrder(REFS[1:], seed=3), InstanceOrder(REFS, seed=4)):
        with pytest.raises(ConfigurationError, match="other instances, or to another seed"):
            other.resume(position)
    with pytest.raises(ConfigurationError, match="refs"):
        InstanceOrder([])


# --- why it does not close -------------------------------------------------------------------


def info(stage: str, execution: str, seconds: float) -> RolloutInfo:
    return RolloutInfo("w", "d/i", 0, "nop", stage, execution, "", 1, seconds, None)


def test_an_open_group_says_what_its_rollouts_do() -> None:
    """The text has counts and longest times by stage. For a group without a rollout, it points to
    the workers."""
    found = [
        info("done", "Completed", 9),
        info("agent", "Running", 310.2),
        info("agent", "Running", 20),
        info("waiting", "Running", 5),
    ]

    assert summarize_rollouts(found, 8) == (
        "1 of 8 rollouts have ended; 2 in stage agent, for up to 310 s; "
        "1 in stage waiting, for up to 5 s"
    )
    assert "no rollout has started" in summarize_rollouts([], 8)
