"""A session's turns are written from what each adds, and read back whole."""

import random
import tracemalloc
from array import array
from collections.abc import Sequence
from typing import Any

from perdure.dialects.base import Answer
from perdure.episodes.turns import Delta, decode, encode, encode_deltas
from perdure.gateway.journal.turn_record import TurnRecord, prompt_of, turn_deltas, turns_of
from perdure.types import FinishReason, Purpose

ANSWER = Answer("a", 0, "m", {"role": "assistant", "content": "yo"}, "stop", {})


def _record(index: int, prompt: Sequence[int], completion: Sequence[int], **at: Any) -> TurnRecord:
    """`at`: parent, base, kept_ids, kept_messages, messages."""
    fields = {"parent": None, "base": None, "kept_ids": 0, "kept_messages": 0, "messages": []} | at
    return TurnRecord(
        index=index,
        turn_id=f"s-{index}",
        chain="main",
        parent_chain="",
        purpose=Purpose.STEP,
        echo_of=None,
        echo_changes=(),
        replayed_from="",
        started_at=0.0,
        request_sha256="",
        across_sha256="",
        tools_sha256="",
        prompt=array("i", prompt),
        completion=array("i", completion),
        logprobs=array("d", [-0.5] * len(completion)),
        versions=(),
        engines=(),
        finish_reason=FinishReason.STOP,
        engine="e",
        miss=None,
        trainable=True,
        engine_seconds=0.0,
        seconds=0.0,
        reasoning_open=False,
        placeholder=False,
        answer=ANSWER,
        **fields,
    )


def _tree(dice: random.Random, turns: int) -> list[TurnRecord]:
    """Roots, continued turns and replayed ones, whose parent is another turn than their base."""
    records: list[TurnRecord] = []
    said: list[list[dict[str, Any]]] = []
    for index in range(turns):
        base = dice.choice([None, *range(index)])
        held = 0 if base is None else len(prompt_of(records, records[base]))
        held += 0 if base is None else len(records[base].completion)
        heard = [] if base is None else said[base]
        kept = len(heard) if dice.random() < 0.7 else dice.randint(0, len(heard))
        new = [{"role": "user", "content": f"{index}.{i}"} for i in range(dice.randint(0, 3))]
        said.append([*heard[:kept], *new])
        records.append(
            _record(
                index,
                dice.choices(range(9), k=dice.randint(0, 4)),
                dice.choices(range(9), k=dice.randint(0, 2)),
                base=base,
                parent=dice.choice([base, base, None, *range(index)]),
                kept_ids=held if dice.random() < 0.7 else dice.randint(0, held),
                kept_messages=kept,
                messages=new,
            )
        )
    return records


def test_what_is_written_turn_by_turn_reads_back_whole() -> None:
    """The file of the deltas holds the very turns that the records stand for."""
    for seed in range(200):
        records = _tree(random.Random(seed), turns=8)
        deltas = (Delta(*delta) for delta in turn_deltas(records))

        assert (
            decode(encode_deltas(deltas)) == turns_of(records) == decode(encode(turns_of(records)))
        )


def test_closing_a_long_session_holds_no_whole_prompts() -> None:
    """100 turns over 40,000 tokens are 30 MB as whole prompts; writing them takes a few."""
    records = [_record(0, range(40_000), range(50))]
    for index in range(1, 100):
        held = records[-1].kept_ids + len(records[-1].prompt) + len(records[-1].completion)
        records.append(
            _record(index, range(200), range(50), parent=index - 1, base=index - 1, kept_ids=held)
        )
    encode_deltas(Delta(*delta) for delta in turn_deltas(records[:1]))  # imports and pools
    tracemalloc.start()
    encode_deltas(Delta(*delta) for delta in turn_deltas(records))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 16 << 20
