"""One stream of a vLLM engine."""

import json
from contextlib import aclosing
from typing import Any

import pytest

from perdure.engines.clients import sglang, vllm
from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.token_endpoint import (
    TOKENS_AN_EVENT,
    BreakKind,
    EngineRequest,
    StreamBroken,
)
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import FinishReason
from tests.engine_wire import answering, plain

ANSWER: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [5],
            "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]},
            "finish_reason": "stop",
        }
    ]
}
WHOLE = json.dumps(ANSWER).encode()


async def sampled(
    content: bytes, salvage: Salvage | None = None, **sampling: int
) -> tuple[Salvage, FinishReason]:
    """The result of the engine client for an answer that arrives in two pieces."""

    answer = plain("200 OK", content)
    at = len(answer) - len(content) + 9
    salvage = salvage or Salvage()
    async with (
        answering([answer[:at], answer[at:]]) as wire,
        aclosing(Connections()) as connections,
    ):
        engine = VllmEngine("vllm e", wire.url, connections)
        reason = await engine.sample(
            EngineRequest("policy", [1], sampling, "s", "r"), salvage, lambda: 3
        )
    return salvage, reason


@pytest.mark.parametrize(
    "content",
    [WHOLE, b"data: " + WHOLE, b"data: " + WHOLE + b"\n\ndata: [DONE]\n\n"],
    ids=["whole JSON", "no blank line", "stream"],
)
async def test_an_answer_is_read_to_its_end(content: bytes) -> None:
    """This also holds without a final blank line, which a server that does not stream never
    sends."""
    salvage, reason = await sampled(content)

    assert (list(salvage.ids), reason) == ([5], FinishReason.STOP)


async def test_an_event_carries_several_tokens() -> None:
    """An event costs the gateway more than its tokens. vLLM and SGLang have the same field."""
    ask = EngineRequest("policy", [1], {"max_tokens": 9}, "s", "r")

    asked = [
        json.loads(body)["sampling_params"] for body in (vllm._body(ask), sglang._body(ask, {}))
    ]

    assert [one["stream_interval"] for one in asked] == [TOKENS_AN_EVENT] * 2


async def test_a_torn_event_is_a_broken_stream() -> None:
    """Half a JSON object at the end is a broken stream."""
    with pytest.raises(StreamBroken) as broken:
        await sampled(b"data: " + WHOLE[:-9])

    assert broken.value.kind is BreakKind.LOST


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (
            BreakKind.IMPOSSIBLE,
            WHOLE.replace(b"[5]", b"[5, 6]").replace(
                b"}]}", b'}, {"token_id": 6, "logprob": -1}]}'
            ),
        ),
        (
            BreakKind.IMPOSSIBLE,
            WHOLE.replace(b"5]", b"99999999999]").replace(b": 5", b": 99999999999"),
        ),
        (BreakKind.LOST, b"[" * 100_000),
        (BreakKind.LOST, b'data: {"choices": ' + b"[" * 100_000),
    ],
    ids=["more than asked for", "no token id", "brackets", "brackets in an event"],
)
async def test_an_impossible_answer_is_a_broken_stream_and_leaves_no_token(
    kind: BreakKind, content: bytes
) -> None:
    """If an engine sends impossible tokens, the turn continues on another engine with the tokens
    before them."""
    salvage = Salvage()
    with pytest.raises(StreamBroken) as broken:
        await sampled(content, salvage, max_tokens=1)

    assert (broken.value.kind, list(salvage.ids), list(salvage.logprobs)) == (
        kind,
        [],
        [],
    )
