"""The cache of the last continued turn equals what a walk along the tree gives for every turn."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

from perdure.gateway.turns.canonical_request import RunningDigests
from perdure.gateway.turns.turn_chains import Continued, Node


def _turn(dice: random.Random, base: Node | None) -> Node:
    """A turn that is stored against `base`, which it may repeat wholly, partly or not at all."""
    messages, ids = (base.request_messages(), base.ids()) if base is not None else ([], [])
    whole = dice.random() < 0.7
    record: Any = SimpleNamespace(
        kept_messages=len(messages) if whole else dice.randint(0, len(messages)),
        kept_ids=len(ids) if whole else dice.randint(0, len(ids)),
        messages=[
            {"role": "user", "content": str(dice.random())} for _ in range(dice.randrange(4))
        ],
        prompt=array("i", dice.choices(range(1000), k=dice.randrange(9))),
        completion=array("i", dice.choices(range(1000), k=dice.randrange(9))),
    )
    record.length = record.kept_messages + len(record.messages)
    return Node(record, base, base, RunningDigests())


def test_the_cache_equals_the_tree() -> None:
    """Turns are continued in order, repeatedly, from the middle, and by two chains alternately."""
    dice = random.Random(1)
    for _ in range(40):
        continued, nodes = Continued(), [_turn(dice, None)]
        at = nodes[0]
        for _ in range(60):
            if dice.random() < 0.3:
                at = dice.choice(nodes)
            if dice.random() < 0.8:
                assert continued.messages_of(at) == at.request_messages()
            if dice.random() < 0.8:
                ids = continued.ids_of(at)
                assert ids == at.ids()
                ids.append(7)  # the caller's copy: the cache does not change with it
            base = dice.choice([at, at, at, None])
            at = _turn(dice, base)
            nodes.append(at)


def test_a_failure_half_way_leaves_no_wrong_ids() -> None:
    """After a failure, the tree is walked again."""
    dice = random.Random(2)
    first = _turn(dice, None)
    second = _turn(dice, first)
    continued = Continued()
    continued.ids_of(first)
    completion, record = second.record.completion, vars(second.record)
    record["completion"] = None
    try:
        continued.ids_of(second)
    except TypeError:
        record["completion"] = completion

    assert continued.ids_of(first) == first.ids()
    assert continued.ids_of(second) == second.ids()
