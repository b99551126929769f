"""One sentence says what waits, and what to add."""

import pytest

from perdure.client.bottlenecks import Backlog, Engines, engines_of, sentence

IDLE = Engines(ready=1, waiting_calls=0, kv_used=0.2)


def _backlog(stage: str, count: int, age_s: float) -> Backlog:
    return Backlog(stage=stage, count=count, age_s=age_s)


@pytest.mark.parametrize(
    ("waiting", "engines", "said"),
    [
        ([], IDLE, ""),
        ([_backlog("boot", 3, 1.5)], IDLE, ""),
        (
            [_backlog("boot", 12, 240.2)],
            IDLE,
            "12 agents wait for seats, the oldest for 240 s: add hosts",
        ),
        (
            [_backlog("grade", 1, 60)],
            None,
            "1 grading waits for slots, the oldest for 60 s: add workers of the role grade",
        ),
        (
            [_backlog("io", 2, 60)],
            None,
            "2 steps wait of the role io, the oldest for 60 s: add its workers",
        ),
        (
            [],
            Engines(ready=1, waiting_calls=3, kv_used=0.99),
            "3 calls wait for engines: add engines",
        ),
        (
            [],
            Engines(ready=0, waiting_calls=3, kv_used=0, lacking="e:1 is dead (update 13)"),
            "3 calls wait for engines: none is ready: e:1 is dead (update 13)",
        ),
        (
            [],
            Engines(ready=1, waiting_calls=0, kv_used=0.99),
            "KV caches are 99% full: add engines",
        ),
        (
            [_backlog("boot", 1, 30)],
            Engines(ready=0, waiting_calls=1, kv_used=0),
            "1 agent waits for seats, the oldest for 30 s: add hosts; "
            "1 call waits for engines: add engines",
        ),
    ],
)
def test_the_sentence_names_what_to_add(
    waiting: list[Backlog], engines: Engines | None, said: str
) -> None:
    """Only long waits justify another host."""
    assert sentence(waiting, engines) == said


def test_engines_are_counted_as_the_gateway_sees_them() -> None:
    """Only ready engines count, and one that this gateway has not probed has no KV figure."""
    document = {
        "waiting": 2,
        "engines": [
            {"state": "ready", "kv_used": 0.5},
            {"state": "ready"},
            {"name": "e:1", "state": "dead", "reason": "gone", "kv_used": 1.0},
        ],
    }

    assert engines_of(document) == Engines(
        ready=2, waiting_calls=2, kv_used=0.5, lacking="e:1 is dead (gone)"
    )
