"""The parquet form of turns must not change any token."""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.episodes.turns_parquet import decode, encode
from perdure.types import FinishReason, Purpose, Turn, TurnSampling, VersionSpan

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
logprob = st.floats(allow_nan=False, max_value=0.0)
SAMPLINGS = (
    None,
    TurnSampling(temperature=0.7, top_p=0.9, max_tokens=9),
    TurnSampling(
        temperature=0.0,
        top_p=1.0,
        max_tokens=9,
        stop=("\n", "x"),
        stop_token_ids=(151_645,),
        seed=2**48 - 1,
        logit_bias='{"9": -5}',
    ),
)


@st.composite
def turn_lists(draw: st.DrawFn) -> list[Turn]:
    """Trees: the parent may be any earlier turn, and a prompt may contradict its parent."""
    turns: list[Turn] = []
    for index in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from([None, *turns]))
        held = parent.prompt_ids + parent.completion_ids if parent else ()
        prompt = (held if draw(st.booleans()) else ()) + draw(ids)
        completion = draw(ids)
        n = len(completion)
        turns.append(
            Turn(
                index=index,
                chain=draw(st.sampled_from(["main", "agent-1"])),
                parent_chain=draw(st.sampled_from(["", "main"])),
                parent=parent.index if parent else None,
                purpose=draw(st.sampled_from(Purpose)),
                replayed_from=draw(st.sampled_from(["", "s-1/0"])),
                new_messages=draw(
                    st.sampled_from(["", '[{"role": "user", "content": "\u00e9\u2028"}]'])
                ),
                answer=draw(st.sampled_from(["", '{"role": "assistant", "content": ""}'])),
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=tuple(draw(st.lists(logprob, min_size=n, max_size=n))),
                versions=(VersionSpan(version=7, start=0, end=n),) if n else (),
                finish_reason=draw(st.sampled_from(FinishReason)),
                engine="vllm 10.0.0.7:8000",
                sampling=draw(st.sampled_from(SAMPLINGS)),
                bridge_miss=draw(st.sampled_from([None, "first", "echo_edited"])),
                started_at=draw(st.floats(0, 2e9)),
                request_sha256="ab" * 32,
            )
        )
    return turns


@settings(max_examples=60, deadline=None)
@given(turn_lists())
def test_decoding_gives_back_every_field_of_every_turn(turns: list[Turn]) -> None:
    """A trainer reads exactly what was captured."""
    assert decode(encode(turns)) == turns


def test_logprobs_keep_their_bits() -> None:
    """A logprob is read back bit for bit, not merely close."""
    values = (-0.1, math.nextafter(-0.1, 0), -5e-324, -1e300)
    turn = Turn(index=0, prompt_ids=(1,), completion_ids=(1, 2, 3, 4), logprobs=values)

    (back,) = decode(encode([turn]))

    assert [struct.pack("d", v) for v in back.logprobs] == [struct.pack("d", v) for v in values]


def test_a_growing_chain_is_stored_as_what_each_turn_adds() -> None:
    """Fifty turns over one growing context cost about its length, not its square."""
    turns, context = [], tuple(range(100_000, 103_000))
    for index in range(50):
        completion = tuple(range(index * 60, index * 60 + 60))
        turns.append(
            Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=context,
                completion_ids=completion,
                logprobs=(-0.5,) * 60,
            )
        )
        context = context + completion

    assert len(encode(turns)) < len(context) * 12


@pytest.mark.parametrize("data", [b"", b"PAR1 no", b"{}"])
def test_other_bytes_are_refused(data: bytes) -> None:
    """A file that is not a turns file raises an error instead of giving no turns."""
    with pytest.raises(ValueError, match="not a"):
        decode(data)
