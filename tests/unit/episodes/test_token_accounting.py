"""The counts of an episode's trajectory: how every sampled token is used, and what training costs."""

from hypothesis import given
from hypothesis import strategies as st

from perdure.episodes.token_accounting import count_trajectory
from perdure.episodes.trajectory_segments import cut
from perdure.types import Purpose, Turn


def turn(index: int, prompt: tuple[int, ...], tokens: int = 2, **fields: object) -> Turn:
    completion = tuple(range(100 * index + 1, 100 * index + 1 + tokens))
    known = {"prompt_ids": prompt, "completion_ids": completion, "logprobs": (-0.5,) * tokens}
    return Turn.model_validate({"index": index, **known, **fields})


def test_trained_and_untrained_add_up_to_sampled() -> None:
    """A title request counts as sampled, and as untrained with its reason."""
    turns = [turn(0, (1,), 3, purpose=Purpose.SIDE), turn(1, (2,), 5)]
    counts = count_trajectory(turns, cut(turns))

    assert (counts.sampled_tokens, counts.trained_tokens) == (8, 5)
    assert (counts.untrained_tokens, counts.untrained_turns) == ({"side": 3}, {"side": 1})


def test_stray_calls_are_counted_and_are_no_chain() -> None:
    """A call of code under test counts as untrained, with its reason, and not as an agent's chain."""
    turns = [turn(0, (1,), 5), turn(1, (2,), 3, chain="stray", purpose=Purpose.STRAY)]
    counts = count_trajectory(turns, cut(turns))

    assert (counts.trained_tokens, counts.chains) == (5, 1)
    assert (counts.untrained_tokens, counts.untrained_turns) == ({"stray": 3}, {"stray": 1})


def test_unused_answers_are_left_out_unless_wanted() -> None:
    """The agent asked again: the answer that it did not use is counted and not trained."""
    turns = [turn(0, (1,), 3, unused=True), turn(1, (1,), 5)]
    counts = count_trajectory(turns, cut(turns))
    kept = cut(turns, keep_unused=True)

    assert (counts.sampled_tokens, counts.trained_tokens) == (8, 5)
    assert (counts.untrained_tokens, counts.segments) == ({"unused": 3}, {"final": 1})
    assert [segment.turns for segment in kept] == [(0,), (1,)]


def test_chains_compactions_and_kinds_are_counted() -> None:
    """A sub-agent and a compaction make three segments of three kinds."""
    turns = [
        turn(0, (1,)),
        turn(1, (5,), chain="sub", parent_chain="main"),
        turn(2, (1, 1, 2, 9), parent=0, purpose=Purpose.COMPACTION),
        turn(3, (7,)),
    ]
    counts = count_trajectory(turns, cut(turns))

    assert counts.segments == {"final": 1, "subagent": 1, "wipe": 1}
    assert (counts.chains, counts.compactions) == (2, 1)


def test_replayed_turns_are_counted_to_where_sampling_began_again() -> None:
    """The lost attempt's answers cost no engine time again; the first new one is recorded."""
    turns = [
        turn(0, (9,), 3, replayed_from="s-1/0"),
        turn(1, (9, 1, 2, 3), 4, replayed_from="s-1/1", parent=0),
        turn(2, (9, 1, 2, 3, 101, 102, 103, 104), parent=1),
    ]
    counts = count_trajectory(turns, cut(turns))

    assert (counts.replayed_turns, counts.replayed_tokens, counts.replay_ended_at) == (2, 7, 2)


def test_duplication_tells_what_forks_cost() -> None:
    """Two answers to a prompt of four tokens: trainers read twelve tokens, eight are distinct."""
    turns = [turn(0, (7, 7, 7, 7)), turn(1, (7, 7, 7, 7))]
    counts = count_trajectory(turns, cut(turns))

    assert (counts.training_tokens, counts.duplication) == (12, 1.5)


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), max_size=6))
def test_duplication_is_the_size_over_that_of_the_prefix_tree(prompts: list[list[int]]) -> None:
    """Counting sorted neighbors equals counting the nodes of the tree of all sequences."""
    turns = [turn(n, tuple(prompt), 1, chain=f"c{n}") for n, prompt in enumerate(prompts)]
    segments = cut(turns)
    whole = [segment.prompt_ids + segment.response_ids for segment in segments]
    nodes = {ids[: n + 1] for ids in whole for n in range(len(ids))}

    counts = count_trajectory(turns, segments)
    assert not nodes or counts.duplication == round(sum(map(len, whole)) / len(nodes), 4)
