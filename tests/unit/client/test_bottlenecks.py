"""One sentence says what waits, and what to add."""

from typing import Any

import pytest

from perdure.cli.commands.status import models_text
from perdure.client.bottlenecks import Backlog, Engines, engines_of, sentence

IDLE = Engines(ready=1, waiting_calls=0, kv_used=0.2)


def _backlog(stage: str, count: int, age_s: float) -> Backlog:
    return Backlog(stage=stage, count=count, age_s=age_s)


@pytest.mark.parametrize(
    ("waiting", "engines", "said"),
    [
        ([], [IDLE], ""),
        ([_backlog("boot", 3, 1.5)], [IDLE], ""),
        (
            [_backlog("boot", 12, 240.2)],
            [IDLE],
            "12 agents wait for seats, the oldest for 240 s: add hosts",
        ),
        (
            [_backlog("grade", 1, 60)],
            [],
            "1 grading waits for slots, the oldest for 60 s: add workers of the role grade",
        ),
        (
            [_backlog("io", 2, 60)],
            [],
            "2 steps wait of the role io, the oldest for 60 s: add its workers",
        ),
        (
            [],
            [Engines(ready=1, waiting_calls=3, kv_used=0.99)],
            "3 calls wait for engines: add engines",
        ),
        (
            [],
            [Engines(ready=0, waiting_calls=3, kv_used=0, lacking="e:1 is dead (update 13)")],
            "3 calls wait for engines: none is ready: e:1 is dead (update 13)",
        ),
        (
            [],
            [Engines(ready=1, waiting_calls=0, kv_used=0.99)],
            "KV caches are 99% full: add engines",
        ),
        (
            [_backlog("boot", 1, 30)],
            [Engines(ready=0, waiting_calls=1, kv_used=0)],
            "1 agent waits for seats, the oldest for 30 s: add hosts; "
            "1 call waits for engines: add engines",
        ),
        (
            [],
            [
                Engines(model="policy", ready=1, waiting_calls=0, kv_used=0.2),
                Engines(model="judge", ready=0, waiting_calls=2, kv_used=0, lacking="e:2 is dead"),
            ],
            "2 calls wait for engines of judge: none is ready: e:2 is dead",
        ),
    ],
)
def test_the_sentence_names_what_to_add(
    waiting: list[Backlog], engines: list[Engines], said: str
) -> None:
    """Only long waits justify another host."""
    assert sentence(waiting, engines) == said


def test_engines_are_counted_as_the_gateway_sees_them() -> None:
    """Only ready engines count, and one that this gateway has not probed has no KV figure."""
    document = {
        "waiting": {"m": 2},
        "engines": [
            {"model": "m", "state": "ready", "kv_used": 0.5, "version": 7},
            {"model": "m", "state": "ready"},
            {"model": "m", "name": "e:1", "state": "dead", "reason": "gone", "kv_used": 1.0},
        ],
    }

    assert engines_of(document) == [
        Engines(ready=2, waiting_calls=2, kv_used=0.5, lacking="e:1 is dead (gone)", versions="7")
    ]


def test_engines_of_several_models_are_counted_separately() -> None:
    """A judge that waits is not hidden by idle engines of the policy, and `status` lists both. A single
    model is not listed."""
    document: dict[str, Any] = {
        "waiting": {"judge": 1},
        "engines": [{"model": name, "state": "ready"} for name in ("policy", "judge")],
    }
    document["engines"][0] |= {"version": 7}
    found = engines_of(document)

    assert [(one.model, one.ready, one.waiting_calls) for one in found] == [
        ("policy", 1, 0),
        ("judge", 1, 1),
    ]
    assert models_text(found) == "policy: 1 ready at version 7; judge: 1 ready"
    assert models_text(found[:1]) == models_text([]) == ""
