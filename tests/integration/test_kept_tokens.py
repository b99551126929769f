"""The kept sets of top-p that engines return, from their streams to what trainers read."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.token_salvage import Salvage
from perdure.episodes.segment_kept_tokens import segment_kept_tokens
from perdure.episodes.trajectory_segments import cut
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine, kept_set
from perdure.types import Sampling, Segment, Turn
from perdure.types.kept_tokens import KeptTokens
from tests.integration.engine_calls import LONG, PROMPT, SAMPLING, opened, ready
from tests.integration.test_router_replay import CHAT, recorded, talk

TOP_P: Any = {"sampling": Sampling(top_p=0.9)}


async def spoken(
    folder: Path, engine: ScriptedEngine, turns: int, **of_session: Any
) -> tuple[list[Turn], list[Segment]]:
    """A conversation behind a gateway, as its turns file has it, and its segments."""
    options: Any = {"engine": {"url": engine.url, "kind": "vllm"}}
    async with LocalGateway(folder, **options) as gateway:
        await talk(gateway, await gateway.open("s", **of_session), [], turns)
        found = await recorded(gateway)
    return found, cut(found)


async def test_a_segment_has_the_set_of_each_trained_token(tmp_path: Path) -> None:
    """Each turn records the sets of its own tokens; context between answers has none."""
    async with ScriptedEngine(CHAT, keeps_sets=True) as engine:
        turns, segments = await spoken(tmp_path, engine, 3, **TOP_P)
    (segment,) = segments
    (kept,) = segment_kept_tokens(turns, segments)

    assert kept is not None
    sets = numpy.split(kept.ids, kept.offsets[1:-1])
    assert [one.tolist() for one in sets] == [
        kept_set(token) if trained else []
        for token, trained in zip(segment.response_ids, segment.loss_mask, strict=True)
    ]
    assert 0 in segment.loss_mask


async def test_tokens_of_the_whole_vocabulary_have_no_sets(tmp_path: Path) -> None:
    """At top-p 1, vLLM would return the vocabulary for each token."""
    async with ScriptedEngine(CHAT, keeps_sets=True) as engine:
        turns, _ = await spoken(tmp_path, engine, 1)

    assert turns[0].kept_tokens is None


async def test_one_turn_without_sets_leaves_its_segment_without(tmp_path: Path) -> None:
    """A trainer would normalise that turn's tokens over the whole vocabulary."""
    async with ScriptedEngine(CHAT, keeps_sets=True) as engine:
        turns, segments = await spoken(tmp_path, engine, 2, **TOP_P)
    bare = [turns[0].model_copy(update={"kept_tokens": None}), turns[1]]

    assert segment_kept_tokens(bare, segments) == [None]


async def test_another_engine_continues_the_sets() -> None:
    """A stream breaks in the middle of a turn. The next one finishes it, and each token has its set."""
    call = GenerateCall(
        PROMPT, {**SAMPLING, "top_p": 0.9}, session_id="s", request_id="s-0", labels={}
    )
    async with (
        new_client() as client,
        ScriptedEngine(LONG, keeps_sets=True) as engine,
        opened(client, engine.url) as pool,
    ):
        await ready(pool, 1)
        engine.control(kind="eof_mid_stream", times=1)
        done = await pool.generate(call)

    assert len(done.engines) == 2
    assert done.kept_tokens is not None
    found = numpy.split(done.kept_tokens.ids(), numpy.cumsum(done.kept_tokens.counts())[:-1])
    assert [one.tolist() for one in found] == [kept_set(token) for token in done.token_ids]


def test_sets_are_dropped_with_their_tokens() -> None:
    """Sets stay beside their tokens when unproven ones are cut."""
    salvage = Salvage()
    salvage.begin("e", 1)
    salvage.add([5, 6, 7], [-0.1] * 3, 1, [[5, 9], [6], [1, 7]])
    salvage.cut(1)
    salvage.add([8], [-0.1], 1, [[8, 2]])

    assert salvage.kept is not None
    assert [list(one) for one in salvage.kept] == [[5, 9], [8, 2]]


@pytest.mark.parametrize("kept", [None, [[5]], [[5], [9]], [[5], []]])
def test_sets_that_do_not_fit_their_tokens_are_ignored(kept: Any) -> None:
    """One set for each token, which holds the token; the tokens themselves count."""
    salvage = Salvage()
    salvage.begin("e", 1)
    salvage.add([5, 6], [-0.1] * 2, 1, kept)

    assert (list(salvage.ids), salvage.kept) == ([5, 6], None)


def test_sets_are_compact() -> None:
    """They come back as they were, and cost far less than their JSON."""
    sets = [[token + n for n in range(8)] for token in range(1000)]
    kept = KeptTokens.model_validate_json(KeptTokens.of(sets).model_dump_json())

    assert numpy.split(kept.ids(), numpy.cumsum(kept.counts())[:-1])[7].tolist() == sets[7]
    assert len(kept.data) * 4 < len(str(sets))
