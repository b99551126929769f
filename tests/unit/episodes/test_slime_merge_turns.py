"""slime's documented `merge_turns`: tokens that a later prompt does not repeat are not trained."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from perdure.episodes.slime_merge_turns import merge_turns
from perdure.episodes.trajectory_segments import Untrained, cut, token_versions, untrained
from perdure.types import SegmentKind, Turn
from tests.checkout_paths import ROOT

PUBLISHED = ROOT.parent / "shared" / "data" / "trajectories" / "merge_turns.json"


def turns_of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Turn]:
    return [
        Turn(
            index=index,
            prompt_ids=tuple(prompt),
            completion_ids=tuple(completion),
            logprobs=tuple(-token / 100 for token in completion),
        )
        for index, (prompt, completion) in enumerate(pairs)
    ]


def merged(turns: Sequence[Turn]) -> tuple[list[int], list[int], list[int], list[float]]:
    """Prompt, response, mask and logprobs of the newest sequence of a chain."""
    found = merge_turns(turns, token_versions)[-1]
    at = found.prompt
    return found.ids[:at], found.ids[at:], found.loss_mask[at:], found.logprobs[at:]


def published() -> list[Any]:
    if not PUBLISHED.is_file():
        return [pytest.param(None, marks=pytest.mark.skip(reason="the cases are not here"))]
    cases = json.loads(PUBLISHED.read_text())["cases"]
    return [pytest.param(case, id=case["case"]) for case in cases]


@pytest.mark.parametrize("case", published())
def test_published_cases_hold_exactly(case: dict[str, Any]) -> None:
    """Prompt, response, mask and logprobs equal those that the authors published."""
    turns = [
        Turn(
            index=index,
            prompt_ids=tuple(one["prompt_ids"]),
            completion_ids=tuple(one["output_ids"]),
            logprobs=tuple(one["output_log_probs"]),
            finish_reason=one["finish_reason"],
        )
        for index, one in enumerate(case["turns"])
    ]
    expected = case["expect"]

    assert merged(turns) == (
        expected["prompt_ids"],
        expected["response_ids"],
        expected["loss_mask"],
        expected["logprobs"],
    )


@pytest.mark.parametrize(
    ("pairs", "prompt", "response", "mask"),
    [
        pytest.param(
            [([7], [8]), ([7, 8, 1], [2]), ([7, 8, 1, 2, 3], [4]), ([7, 8, 1, 2, 9], [6])],
            [7],
            [8, 1, 2, 9, 6],
            [1, 0, 1, 0, 1],
            id="matched prefixes",
        ),
        pytest.param(
            [([7], [8]), ([7, 8, 1], [2]), ([7, 8, 5], [6])],
            [7],
            [8, 5, 6],
            [1, 0, 1],
            id="skipped turns",
        ),
        pytest.param(
            [([7], [8, 9, 10]), ([7, 8, 9, 3, 10], [4])],
            [7],
            [8, 9, 3, 10, 4],
            [0, 0, 0, 0, 1],
            id="split-output drift",
        ),
        pytest.param(
            [([7], [8, 9, 10]), ([7, 8, 3, 5, 10, 11], [4])],
            [7],
            [8, 3, 5, 10, 11, 4],
            [0, 0, 0, 0, 0, 1],
            id="changed token counts",
        ),
        pytest.param(
            [([7], [8]), ([6, 7], [9]), ([6, 7, 9, 1], [2])],
            [6, 7],
            [9, 1, 2],
            [1, 0, 1],
            id="prompt-base restarts",
        ),
        pytest.param(
            [([7], [8, 9, 10]), ([7, 8, 9, 3], [4]), ([7, 8, 3], [5])],
            [7],
            [8, 3, 5],
            [0, 0, 1],
            id="a divided answer stays untrained through later drifts",
        ),
        pytest.param(
            [([7], [8]), ([7], [9])], [7], [9], [1], id="the same prompt again replaces its answer"
        ),
    ],
)
def test_the_documents_cases(
    pairs: list[tuple[list[int], list[int]]],
    prompt: list[int],
    response: list[int],
    mask: list[int],
) -> None:
    """The cases in slime's example; a token with mask 0 has no logprob."""
    logprobs = [-i / 100 * m for i, m in zip(response, mask, strict=True)]

    assert merged(turns_of(pairs)) == (prompt, response, mask, logprobs)


def test_nothing_is_nothing() -> None:
    """Without turns there is no sequence."""
    assert merge_turns([], token_versions) == []


def test_mode_merge_turns_drops_what_a_later_prompt_contradicts_and_says_so() -> None:
    """`tree` trains the drifted answer in its own segment; `merge_turns` records it as drift."""
    turns = turns_of([([7], [8]), ([7, 8, 1], [2]), ([7, 8, 5], [6])])
    (one,) = cut(turns, mode="merge_turns")

    assert (one.kind, one.turns, one.response_ids) == (SegmentKind.FINAL, (0, 2), (8, 5, 6))
    assert untrained(turns, [one]) == [Untrained(1, 1, "drift")]
    assert [segment.turns for segment in cut(turns)] == [(0, 1), (2,)]


def test_mode_merge_turns_freezes_a_chain_whose_base_changes() -> None:
    """A compaction is a wipe in this mode too: earlier tokens are kept."""
    segments = cut(turns_of([([7], [8]), ([7, 8, 1], [2]), ([9], [3])]), mode="merge_turns")

    assert [(s.kind, s.turns) for s in segments] == [
        (SegmentKind.WIPE, (0, 1)),
        (SegmentKind.FINAL, (2,)),
    ]
