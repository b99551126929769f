"""Turns become linear token sequences with every sampled token once, none added and none lost."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.episodes.trajectory_segments import Untrained, cut, token_versions, untrained
from perdure.types import (
    FinishReason,
    Purpose,
    Segment,
    SegmentKind,
    Turn,
    TurnSampling,
    VersionSpan,
)


def turn(
    index: int,
    prompt: Sequence[int],
    completion: Sequence[int],
    chain: str = "main",
    version: int | None = 7,
    *,
    parent: int | None = None,
    purpose: Purpose = Purpose.STEP,
) -> Turn:
    return Turn(
        index=index,
        chain=chain,
        parent=parent,
        purpose=purpose,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(-token / 100 for token in completion),
        versions=()
        if version is None
        else (VersionSpan(version=version, start=0, end=len(completion)),),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> list[Turn]:
    """Turns of up to three chains that extend, repeat, rewind or replace what came before.

    Few different ids, so that prompts also agree by accident.
    """
    ids = st.lists(st.integers(1, 3), max_size=4)
    held: dict[str, list[int]] = {}
    turns = []
    for index in range(draw(st.integers(0, 8))):
        chain = draw(st.sampled_from(["main", "agent-1", "agent-2"]))
        before = held.get(chain, [])
        kept = draw(st.sampled_from([len(before), len(before), len(before) // 2, 0]))
        prompt = before[:kept] + draw(ids) or [1]
        completion = draw(ids)
        held[chain] = prompt + completion
        turns.append(turn(index, prompt, completion, chain))
    return turns


@given(trajectories())
def test_every_sampled_token_is_in_exactly_one_segment(turns: list[Turn]) -> None:
    """A segment's masked tokens are its turns' completions, and each turn has one segment."""
    segments = cut(turns)
    by_index = {turn.index: turn for turn in turns}
    for segment in segments:
        masked = [i for i, m in zip(segment.response_ids, segment.loss_mask, strict=True) if m]
        assert masked == [i for n in segment.turns for i in by_index[n].completion_ids]

    used = [index for segment in segments for index in segment.turns]
    assert len(used) == len(set(used))
    assert {t.index for t in turns if t.completion_ids} <= set(used)


@given(trajectories())
def test_segments_hold_what_the_engine_saw(turns: list[Turn]) -> None:
    """Each turn's prompt and completion are a prefix of its segment; the last turn's are all of it."""
    by_index = {turn.index: turn for turn in turns}
    for segment in cut(turns):
        whole = segment.prompt_ids + segment.response_ids
        seen = [by_index[n].prompt_ids + by_index[n].completion_ids for n in segment.turns]

        assert all(whole[: len(ids)] == ids for ids in seen)
        assert seen[-1] == whole


@given(trajectories())
def test_arrays_are_aligned(turns: list[Turn]) -> None:
    """Mask, logprobs and versions have one entry per response token; context has no values."""
    for segment in cut(turns):
        rows = list(
            zip(
                segment.response_ids,
                segment.loss_mask,
                segment.logprobs,
                segment.versions,
                strict=True,
            )
        )
        assert all((p, v) == (-i / 100, 7) for i, m, p, v in rows if m == 1)
        assert all((p, v) == (0.0, -1) for _, m, p, v in rows if m == 0)


@given(trajectories(), st.sampled_from(["split", "last"]))
def test_reward_shares_add_up_to_one(turns: list[Turn], policy: str) -> None:
    """A rollout gives its reward once, however many segments it has."""
    segments = cut(turns, reward_share=policy)  # type: ignore[arg-type]  # drawn from the literal

    assert not segments or math.isclose(sum(s.reward_share for s in segments), 1.0)


@given(trajectories())
def test_kinds_follow_the_chains(turns: list[Turn]) -> None:
    """At most one final, at the end; at most one subagent per other chain; the rest are wipes."""
    segments = cut(turns)
    kinds = [segment.kind for segment in segments]
    chains = {turn.chain for turn in turns} - {"main"}

    assert SegmentKind.FINAL not in kinds[:-1]
    assert kinds.count(SegmentKind.SUBAGENT) <= len(chains)
    assert [segment.index for segment in segments] == list(range(len(segments)))


def test_extending_turns_are_one_final_segment() -> None:
    """A linear conversation gives one sequence: observations are masked out, samples in."""
    (segment,) = cut([turn(0, [1, 2], [3]), turn(1, [1, 2, 3, 9, 9], [4, 5])])

    assert segment.prompt_ids == (1, 2)
    assert segment.response_ids == (3, 9, 9, 4, 5)
    assert segment.loss_mask == (1, 0, 0, 1, 1)
    assert segment.versions == (7, -1, -1, 7, 7)
    assert segment.kind is SegmentKind.FINAL


def test_changed_prompt_starts_a_new_segment() -> None:
    """A prompt that does not extend the segment ends it as a wipe, which is still trained."""
    segments = cut([turn(0, [1], [2]), turn(1, [1, 2, 3], [4]), turn(2, [1, 9], [5])])

    assert [(s.kind, s.turns) for s in segments] == [
        (SegmentKind.WIPE, (0, 1)),
        (SegmentKind.FINAL, (2,)),
    ]
    assert [s.reward_share for s in segments] == [1.0, 1.0]


def test_subagents_run_beside_the_main_chain() -> None:
    """Interleaved chains do not break each other; a compaction inside one is its wipe."""
    segments = cut(
        [
            turn(0, [1], [2]),
            turn(1, [50], [51], "sub"),
            turn(2, [1, 2, 3], [4]),
            turn(3, [60], [61], "sub"),
        ]
    )

    assert [(s.kind, s.turns) for s in segments] == [
        (SegmentKind.WIPE, (1,)),
        (SegmentKind.SUBAGENT, (3,)),
        (SegmentKind.FINAL, (0, 2)),
    ]


def test_segments_come_in_the_order_in_which_they_ended() -> None:
    """A subagent that ended before the main chain was rewritten precedes that wipe."""
    segments = cut([turn(0, [1], [2]), turn(1, [50], [51], "sub"), turn(2, [9], [4])])

    assert [segment.turns for segment in segments] == [(1,), (0,), (2,)]


def test_turns_without_ids_give_no_segments() -> None:
    """A hosted API without token ids gives no training data."""
    assert cut([Turn(index=0, trainable=False)]) == []


def test_finish_reason_is_that_of_the_last_turn() -> None:
    """A segment that reached the length limit says so."""
    long = turn(1, [1, 2, 3], [4]).model_copy(update={"finish_reason": FinishReason.LENGTH})

    assert cut([turn(0, [1], [2]), long])[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([(3, 0, 2), (4, 2, 3)], [3, 3, 4]),
        ([], [-1, -1, -1]),
        ([(3, 1, 99)], [-1, 3, 3]),
    ],
)
def test_versions_are_per_token(spans: list[tuple[int, int, int]], versions: list[int]) -> None:
    """A weight change within a completion is kept per token; unknown is -1."""
    sampled = turn(0, [1], [2, 3, 4]).model_copy(
        update={"versions": tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans)}
    )

    assert token_versions(sampled) == versions


# --- the tree of turns -------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> list[Turn]:
    """Turns of up to three chains, each a root or the child of any earlier turn of its chain: steps,
    compactions, side requests, retries of the same parent, and now and then a hosted answer."""
    ids = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    turns: list[Turn] = []
    for index in range(draw(st.integers(0, 10))):
        chain = draw(st.sampled_from(["main", "agent-1", "agent-2"]))
        if draw(st.integers(0, 9)) == 0:
            turns.append(Turn(index=index, chain=chain, trainable=False))
            continue
        older = [one for one in turns if one.chain == chain and one.trainable]
        parent = draw(st.sampled_from([None, *older]))
        held = parent.prompt_ids + parent.completion_ids if parent else ()
        purpose = draw(st.sampled_from([Purpose.STEP, Purpose.STEP, *Purpose]))
        prompt = [*held, *draw(ids)]
        number = parent.index if parent else None
        turns.append(turn(index, prompt, draw(ids), chain, parent=number, purpose=purpose))
    return turns


def trained_by(segments: Sequence[Segment]) -> list[int]:
    return [index for segment in segments for index in segment.turns]


@given(trees())
def test_every_sampled_token_of_a_tree_is_trained_once_or_has_a_reason(turns: list[Turn]) -> None:
    """The masks of all segments and the recorded reasons together cover the sampled tokens."""
    segments = cut(turns)
    left = untrained(turns, segments)
    masked = sum(sum(segment.loss_mask) for segment in segments)

    assert sorted([*trained_by(segments), *(one.turn for one in left)]) == [t.index for t in turns]
    assert masked + sum(one.tokens for one in left) == sum(len(t.completion_ids) for t in turns)
    assert {one.reason for one in left} <= {"side", "stray", "hosted"}


@given(trees())
def test_a_segment_of_a_tree_is_what_the_engine_saw(turns: list[Turn]) -> None:
    """In a segment, each recorded prompt is the sequence before it plus the new tokens, and each
    masked stretch is the completion of its turn: ids, logprobs and order."""
    by_index = {turn.index: turn for turn in turns}
    for segment in cut(turns):
        whole = segment.prompt_ids + segment.response_ids
        own = [by_index[index] for index in segment.turns]
        masked = [i for i, m in zip(segment.response_ids, segment.loss_mask, strict=True) if m]

        assert all(whole[: len(t.prompt_ids)] == t.prompt_ids for t in own)
        assert whole == own[-1].prompt_ids + own[-1].completion_ids
        assert masked == [token for t in own for token in t.completion_ids]


@given(trees())
def test_merge_turns_accounts_for_every_token(turns: list[Turn]) -> None:
    """Each sampled token is trained once, or the reason is recorded."""
    segments = cut(turns, mode="merge_turns")
    left = untrained(turns, segments)
    masked = sum(sum(segment.loss_mask) for segment in segments)

    assert len(trained_by(segments)) == len(set(trained_by(segments)))
    assert masked + sum(one.tokens for one in left) == sum(len(t.completion_ids) for t in turns)


def test_a_second_answer_to_one_prompt_is_a_segment_of_its_own() -> None:
    """A newly sampled retry trains both answers, each once; the main chain continues."""
    segments = cut(
        [
            turn(0, [1], [2]),
            turn(1, [1, 2, 3], [4], parent=0),
            turn(2, [1, 2, 3], [5], parent=0),
            turn(3, [1, 2, 3, 5, 6], [7], parent=2),
        ]
    )

    assert [(s.kind, s.turns, s.prompt_ids) for s in segments] == [
        (SegmentKind.WIPE, (0, 1), (1,)),
        (SegmentKind.FINAL, (2, 3), (1, 2, 3)),
    ]
    assert segments[1].loss_mask == (1, 0, 1)


def test_an_older_branch_that_goes_on_stays_the_last_stretch() -> None:
    """A detour from a chain is its wipe, even if it started later than the continuation."""
    segments = cut(
        [
            turn(0, [1], [2]),
            turn(1, [8], [9]),
            turn(2, [1, 2, 3], [4], parent=0),
        ]
    )

    assert [(s.kind, s.turns) for s in segments] == [
        (SegmentKind.WIPE, (1,)),
        (SegmentKind.FINAL, (0, 2)),
    ]


def test_compactions_and_parallel_subagents_have_the_documented_kinds() -> None:
    """Each compaction ends a segment, each sub-agent is one, and `final` is last; K counts them."""
    segments = cut(
        [
            turn(0, [1], [2]),
            turn(1, [50], [51], "a"),
            turn(2, [60], [61], "b"),
            turn(3, [50, 51, 5], [52], "a", parent=1),
            turn(4, [60, 61, 6], [62], "b", parent=2),
            turn(5, [1, 2, 3], [4], parent=0, purpose=Purpose.COMPACTION),
            turn(6, [9], [10]),
        ]
    )

    assert [(s.kind, s.chain, s.turns) for s in segments] == [
        (SegmentKind.SUBAGENT, "a", (1, 3)),
        (SegmentKind.SUBAGENT, "b", (2, 4)),
        (SegmentKind.WIPE, "main", (0, 5)),
        (SegmentKind.FINAL, "main", (6,)),
    ]
    assert [s.reward_share for s in segments] == [1.0] * 4


def sampled(temperature: float, made: Turn) -> Turn:
    told = TurnSampling(temperature=temperature, top_p=1.0, max_tokens=9)
    return made.model_copy(update={"sampling": told})


def test_a_segment_says_how_each_of_its_tokens_was_sampled() -> None:
    """One span per turn, on its tokens; the temperature is None if they differ."""
    turns = [sampled(0.7, turn(0, [1], [2, 3])), sampled(0.2, turn(1, [1, 2, 3, 4], [5]))]
    (segment,) = cut(turns)
    (first,) = cut(turns[:1])

    spans = [(span.start, span.end, span.sampling.temperature) for span in segment.sampling]
    assert spans == [(0, 2, 0.7), (3, 4, 0.2)]
    assert (first.temperature, segment.temperature) == (0.7, None)


def test_a_turn_of_unknown_sampling_leaves_the_temperature_unknown() -> None:
    """A segment with one turn of an earlier version has no temperature, not a wrong one."""
    (segment,) = cut([sampled(0.7, turn(0, [1], [2])), turn(1, [1, 2, 3], [4])])

    assert (len(segment.sampling), segment.temperature) == (1, None)


def test_side_requests_and_hosted_turns_leave_a_reason() -> None:
    """A title request costs tokens and trains none; the record says so per turn."""
    turns = [
        turn(0, [1], [2, 3], purpose=Purpose.SIDE),
        turn(1, [5], [6]),
        Turn(index=2, trainable=False),
    ]
    segments = cut(turns)

    assert trained_by(segments) == [1]
    assert untrained(turns, segments) == [Untrained(0, 2, "side"), Untrained(2, 0, "hosted")]


def test_a_parent_that_the_ids_deny_is_not_believed() -> None:
    """If a prompt does not start with its parent's ids, the turns are not joined."""
    segments = cut([turn(0, [1], [2]), turn(1, [1, 9], [4], parent=0)])

    assert [segment.turns for segment in segments] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("versions", "oldest", "newest"),
    [((3, -1, 5), 3, 5), ((-1, -1, 5), -1, 5), ((-1, -1, -1), None, None)],
)
def test_a_segment_says_which_versions_it_trains(
    versions: tuple[int, ...], oldest: int | None, newest: int | None
) -> None:
    """Only sampled tokens count; -1 if a version is unknown, None if all are."""
    segment = Segment(
        kind=SegmentKind.FINAL,
        index=0,
        prompt_ids=(1,),
        response_ids=(2, 3, 4),
        loss_mask=(1, 0, 1),
        logprobs=(-0.5, 0.0, -0.5),
        versions=versions,
        finish_reason=FinishReason.STOP,
        turns=(0,),
    )

    assert (segment.policy_version_min, segment.policy_version_max) == (oldest, newest)
