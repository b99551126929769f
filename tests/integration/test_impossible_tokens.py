"""What no sampling gives is a broken answer of the engine: never a token of an episode."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_roster import add_engine
from perdure.engines.engine_state import EngineSpec, name_of
from perdure.testing.scripted_engine import ScriptedEngine
from tests.integration.engine_calls import LONG, ask, opened, ready, undisturbed, until

VOCABULARY = 151_936
SOON_S = 30.0


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


def _ids(value: Any) -> Any:
    def change(choice: dict[str, Any]) -> None:
        if choice["token_ids"]:
            choice["token_ids"][0] = value
            choice["logprobs"]["content"][0]["token_id"] = value

    return change


def _logprob(value: Any) -> Any:
    def change(choice: dict[str, Any]) -> None:
        if choice["token_ids"]:
            choice["logprobs"]["content"][0]["logprob"] = value

    return change


def _no_logprobs(choice: dict[str, Any]) -> None:
    choice["logprobs"] = None


def _negative_label(choice: dict[str, Any]) -> None:
    for span in choice["weight_versions"] or ():
        span["version"] = "-7"


WRONG = {
    "an id above the vocabulary": _ids(VOCABULARY),
    "a huge id": _ids(10_000_000),
    "an id that is true": _ids(True),
    "an id that is text": _ids("17"),
    "a negative id": _ids(-1),
    "a positive logprob": _logprob(3.5),
    "no number as logprob": _logprob(float("nan")),
    "a missing logprob": _no_logprobs,
    "a negative weight label": _negative_label,
}


class WrongEngine(ScriptedEngine):
    """An engine whose streams are wrong while `wrong` is set; its probes are right."""

    wrong: Any = None
    doubled = False
    usage = False
    spoiled = 0

    async def _stream(self, request: Request, job: Any) -> AsyncIterator[bytes]:
        first = True
        tokens = len(job.token_ids)
        async for event in super()._stream(request, job):
            if not event.startswith(b"data: {"):
                yield event
                continue
            told = json.loads(event.removeprefix(b"data: "))
            choice = told["choices"][0]
            if self.usage:
                choice["weight_versions"] = None
                if choice["finish_reason"]:
                    told["usage"] = {"completion_tokens": tokens}
            if self.wrong is not None:
                self.wrong(choice)
                self.spoiled += first
            changed = b"data: " + json.dumps(told).encode() + b"\n\n"
            yield changed
            if self.doubled and choice["finish_reason"] is None:
                self.spoiled += first
                yield changed
            first = False


async def moved_from(wrong: WrongEngine, client: httpx.AsyncClient) -> None:
    """The call ends with what the healthy engine samples, and nothing of the wrong one's."""
    async with (
        asyncio.timeout(SOON_S),
        ScriptedEngine(LONG) as right,
        opened(client, wrong.url, vocabulary=VOCABULARY) as pool,
    ):
        await ready(pool, 1)
        call = ask(pool)
        await until(lambda: wrong.spoiled > 1)
        await add_engine(pool.fleet, EngineSpec(right.url), "policy")
        completion = await call

    assert list(completion.token_ids) == await undisturbed()
    assert {span.engine for span in completion.engines} == {f"vllm {name_of(right.url)}"}


@pytest.mark.parametrize("kind", WRONG)
async def test_an_impossible_token_is_nobodys(client: httpx.AsyncClient, kind: str) -> None:
    """A wrong id, logprob or weight label moves the call, and none of that answer is kept."""
    async with WrongEngine(LONG) as wrong:
        wrong.wrong = WRONG[kind]
        await moved_from(wrong, client)


@pytest.mark.parametrize("usage", [False, True], ids=["its versions count", "its usage counts"])
async def test_events_that_come_twice_are_noticed(client: httpx.AsyncClient, usage: bool) -> None:
    """The engine counts fewer tokens than came, so the answer does not count."""
    async with WrongEngine(LONG) as wrong:
        wrong.doubled, wrong.usage = True, usage
        await moved_from(wrong, client)
