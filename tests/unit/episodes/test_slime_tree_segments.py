"""slime's message tree: which turns share a sequence, and whose tokens are trained.

`make test-trainers` holds it against slime's own tests; these are the rules by hand.
"""

import json
from typing import Any

import pytest

from perdure.episodes.slime_tree_segments import TokenSequence, TurnMessages, cut_like_slime
from perdure.episodes.trajectory_segments import Untrained, cut, token_versions, untrained
from perdure.types import SegmentKind, Turn, TurnSampling

USER: dict[str, Any] = {"role": "user", "content": "do"}
TOOL: dict[str, Any] = {"role": "tool", "content": "done", "tool_call_id": "call-1"}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def turn(index: int, prompt: list[int], completion: list[int], **fields: Any) -> Turn:
    return Turn(
        index=index,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(-token / 100 for token in completion),
        **fields,
    )


FIRST = TurnMessages(turn(0, [1], [2, 3]), [USER], said("a"))


def trained(*spoken: TurnMessages, threshold: int = 1024) -> list[tuple[list[int], list[int]]]:
    """Ids and mask of each sequence."""
    found = cut_like_slime(spoken, token_versions, threshold=threshold)
    return [(one.ids, one.loss_mask) for one in found]


def test_a_repeated_history_continues_the_sequence() -> None:
    """Neither tool-call ids nor the order of a call's arguments count."""
    call = {"id": "x", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    echo = {"id": "y", "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}
    first = TurnMessages(FIRST.turn, [USER], {"role": "assistant", "tool_calls": [call]})
    prompt = [USER, {"role": "assistant", "tool_calls": [echo]}, {**TOOL, "tool_call_id": "z"}]
    second = TurnMessages(turn(1, [1, 2, 3, 4], [5]), prompt, said("b"))

    assert trained(first, second) == [([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])]


@pytest.mark.parametrize(
    ("threshold", "sequences"),
    [
        (2, [([1, 2, 9, 4, 5], [0, 0, 0, 0, 1])]),
        (1, [([1, 2, 3], [0, 1, 1]), ([1, 2, 9, 4, 5], [0, 0, 0, 0, 1])]),
    ],
)
def test_a_short_turn_overwrites_an_answer_that_drifted(threshold: int, sequences: Any) -> None:
    """A turn of at least the threshold starts a sequence, and the answer stays trained."""
    second = TurnMessages(turn(1, [1, 2, 9, 4], [5]), [USER, said("a"), TOOL], said("b"))

    assert trained(FIRST, second, threshold=threshold) == sequences


def test_drift_before_the_newest_answer_begins_a_sequence() -> None:
    """This holds for short turns too."""
    second = TurnMessages(turn(1, [7, 2, 3, 4], [5]), [USER, said("a"), TOOL], said("b"))

    assert [ids for ids, _ in trained(FIRST, second)] == [[1, 2, 3], [7, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("threshold", "ids"), [(3, [[1, 8, 9, 5]]), (2, [[1, 2, 3], [1, 8, 9, 5]])]
)
def test_a_short_answer_that_is_rewritten_is_not_trained(threshold: int, ids: Any) -> None:
    """A longer answer gets its own path."""
    second = TurnMessages(turn(1, [1, 8, 9], [5]), [USER, said("A"), TOOL], said("b"))

    assert [one for one, _ in trained(FIRST, second, threshold=threshold)] == ids


def test_a_turn_of_two_paths_is_trained_in_the_first() -> None:
    """The second path has it as context."""
    left = TurnMessages(turn(1, [1, 2, 3, 4], [5]), [USER, said("a"), TOOL], said("b"))
    right = TurnMessages(turn(2, [1, 2, 3, 6], [7]), [USER, said("a"), USER], said("c"))

    assert trained(FIRST, left, right) == [
        ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]),
        ([1, 2, 3, 6, 7], [0, 0, 0, 0, 1]),
    ]


def test_masked_tokens_have_no_logprob_and_no_version() -> None:
    """Each array of a sequence has a value for each id."""
    second = TurnMessages(turn(1, [1, 2, 9], [5]), [USER, said("a"), TOOL], said("b"))
    (one,) = cut_like_slime([FIRST, second], token_versions)

    assert isinstance(one, TokenSequence)
    assert (one.logprobs, one.versions) == ([0.0, 0.0, 0.0, -0.05], [-1, -1, -1, -1])
    assert [(span.turn.index, span.start, span.end) for span in one.spans] == [(1, 3, 4)]


def test_mode_slime_cuts_recorded_turns() -> None:
    """Segments list the turns that they train; the others are drift."""
    first = turn(0, [1], [2, 3], new_messages=json.dumps([USER]), answer=json.dumps(said("a")))
    second = turn(
        1, [1, 2, 9], [5], parent=0, new_messages=json.dumps([TOOL]), answer=json.dumps(said("b")),
        sampling=TurnSampling(temperature=0.7, top_p=1.0, max_tokens=9),
    )  # fmt: skip
    (one,) = segments = cut([first, second], mode="slime")

    assert (one.kind, one.turns) == (SegmentKind.FINAL, (1,))
    assert (one.prompt_ids, one.response_ids, one.loss_mask) == ((1,), (2, 9, 5), (0, 0, 1))
    assert [(span.start, span.end, span.sampling.temperature) for span in one.sampling] == [
        (2, 3, 0.7)
    ]
    assert untrained([first, second], segments) == [Untrained(0, 2, "drift")]


def test_mode_slime_needs_messages() -> None:
    """The messages decide which turn continues which."""
    with pytest.raises(ValueError, match="turn 0 has no messages"):
        cut([turn(0, [1], [2])], mode="slime")
