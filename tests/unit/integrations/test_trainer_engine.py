"""A trainer's own engines as an engine of the gateways: served, lost, and registered again."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from perdure.engines.base import Completion
from perdure.engines.clients.vllm_control import PROBE_SESSION
from perdure.engines.engine_roster import StoredRoster, add_engine, remove_engine
from perdure.engines.engine_state import EngineSpec
from perdure.engines.function_engine import Ask, Sampled
from perdure.engines.model_choice import engines_of
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_capacity import MOST_AGENTS
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.errors import ConfigurationError
from perdure.integrations import trainer_engine, trainer_hooks
from perdure.integrations.trainer_engine import TrainerEngine
from perdure.types import FinishReason
from tests.checkout_paths import ROOT
from tests.stack.wait_until import until

ACCEPTED = frozenset({"temperature", "top_p", "max_tokens", "stop_token_ids"})
HERE = "127.0.0.1"
HANGING = """
import asyncio
from perdure.engines.function_engine import FinishReason, Sampled
from perdure.integrations.trainer_engine import TrainerEngine

async def sample(ask):
    if ask.session_id == "session":
        await asyncio.Event().wait()
    return Sampled((7,), (0.0,), FinishReason.LENGTH, 1)

async def main():
    await TrainerEngine(frozenset({"temperature", "top_p", "max_tokens"}), host="127.0.0.1").use(sample)
    await asyncio.Event().wait()

asyncio.run(main())
"""
"""Another process of the trainer, whose engines never answer a turn."""


class Policy:
    """A trainer's generate function: counts up, from 1000 for a turn of a session."""

    def __init__(self) -> None:
        self.version = 1
        self.asked: list[Ask] = []
        self.together: asyncio.Barrier | None = None
        """Answers calls only when so many are there."""
        self.aborts_after: int | None = None
        """It aborts its next call after that many tokens, for version 2."""

    async def __call__(self, ask: Ask) -> Sampled:
        if ask.session_id == PROBE_SESSION:
            return Sampled((7,), (0.0,), FinishReason.LENGTH, self.version)
        self.asked.append(ask)
        if self.together is not None:
            await self.together.wait()
        ids = [ask.prompt_ids[-1] + n for n in range(1, ask.sampling["max_tokens"] + 1)]
        version, reason = self.version, FinishReason.LENGTH
        if self.aborts_after is not None:
            ids, reason = ids[: self.aborts_after], FinishReason.ABORT
            self.aborts_after, self.version = None, 2
        return Sampled(ids, [-0.5] * len(ids), reason, version)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERDURE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PERDURE_SECRET", "secret of this home")


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest_asyncio.fixture
async def engine(policy: Policy) -> AsyncIterator[TrainerEngine]:
    made = TrainerEngine(ACCEPTED, host=HERE, root="/models/qwen")
    await made.use(policy)
    yield made
    await made.stop()


@asynccontextmanager
async def gateway() -> AsyncIterator[EnginePool]:
    """A gateway's engines, read from the home's roster."""
    async with httpx.AsyncClient(trust_env=False) as client:
        pool = EnginePool(roster(), client, (), PoolOptions(poll_s=0.05))
        async with aclosing(pool):
            yield pool


def roster() -> StoredRoster:
    return trainer_engine._roster()


async def names() -> list[str]:
    return [one.name for one in (await roster().read()).engines]


async def turn(pool: EnginePool, tokens: int = 4) -> Completion:
    return await pool.generate(GenerateCall([1000], {"max_tokens": tokens}, "session", "s-0"))


def versions(found: Completion) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in found.versions]


async def test_a_gateway_samples_from_the_trainers_engines(
    engine: TrainerEngine, policy: Policy
) -> None:
    """It finds them in the roster. The turn has the trainer's tokens, version and model."""
    async with gateway() as pool:
        found = await turn(pool)

    assert list(found.token_ids) == [1001, 1002, 1003, 1004]
    assert (versions(found), found.model) == ([(1, 0, 4)], "/models/qwen")
    assert policy.asked == [Ask([1000], {"max_tokens": 4}, "session", "s-0")]


async def test_an_abort_within_a_turn_loses_nothing(engine: TrainerEngine, policy: Policy) -> None:
    """The tokens so far are kept, the rest comes from the new weights, and each has its version."""
    policy.aborts_after = 3
    async with gateway() as pool:
        found = await turn(pool)

    assert list(found.token_ids) == [1001, 1002, 1003, 1004]
    assert versions(found) == [(1, 0, 3), (2, 3, 4)]
    assert policy.asked[1].prompt_ids == [1000, 1001, 1002, 1003]


async def test_the_trainer_decides_how_many_rollouts_sample(
    engine: TrainerEngine, policy: Policy
) -> None:
    """Behind its function it may have any number of servers, so Perdure's limit per engine is not used."""
    policy.together = asyncio.Barrier(MOST_AGENTS + 1)
    async with gateway() as pool:
        calls = [
            pool.generate(GenerateCall([1000], {"max_tokens": 1}, f"session-{n}", f"s-{n}"))
            for n in range(MOST_AGENTS + 1)
        ]
        found = await asyncio.gather(*calls)

    assert len(found) == MOST_AGENTS + 1


async def test_it_answers_while_a_training_step_blocks_the_trainers_loop(
    engine: TrainerEngine,
) -> None:
    """Otherwise gateways would take the engine for hung and drop its calls."""
    (name,) = await names()

    assert httpx.get(f"http://{name}/metrics", trust_env=False).is_success


async def test_another_process_takes_the_calls_of_a_killed_one(
    engine: TrainerEngine, policy: Policy
) -> None:
    """kill -9 in the middle of a turn: another process of the trainer answers it, and the roster has only
    that one."""
    (mine,) = await names()
    await roster().change(lambda now: now.without(mine))  # so that the other one gets the turn
    paths = f"{ROOT}:{ROOT / 'src'}"
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HANGING), env={**os.environ, "PYTHONPATH": paths}
    )
    await until(names, "the other process is registered")
    async with gateway() as pool:
        asked = asyncio.create_task(turn(pool))
        await until(lambda: any(one.running for one in pool.engines.values()), "it has the turn")
        await trainer_engine._register(f"http://{mine}")
        other.send_signal(signal.SIGKILL)
        await other.wait()

        assert list((await asked).token_ids) == [1001, 1002, 1003, 1004]

        async def is_alone() -> bool:
            return await names() == [mine]

        await until(is_alone, "the killed process leaves the roster")


async def test_a_process_that_was_removed_registers_again(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that cannot reach it for a moment removes it, and it adds itself again, for the same
    runs."""
    monkeypatch.setattr(trainer_engine, "REGISTRATION_POLL_S", 0.02)
    made = TrainerEngine(ACCEPTED, host=HERE, run="try-1-*")
    await made.use(policy)
    (before,) = (await roster().read()).engines
    await roster().change(lambda now: now.without(before.name))

    assert await until(names, "it is in the roster") == [before.name]
    (after,) = (await roster().read()).engines
    assert after.run == before.run == "try-1-*"
    await made.stop()
    assert await names() == []


async def test_only_the_last_function_samples(engine: TrainerEngine, policy: Policy) -> None:
    """Each rollout of a process hands over its trainer's function; there is one engine."""
    newer = Policy()
    newer.version = 9
    await engine.use(newer)
    async with gateway() as pool:
        found = await turn(pool)

    assert (versions(found), policy.asked, len(await names())) == ([(9, 0, 4)], [], 1)


async def test_it_samples_only_for_its_training_run(policy: Policy) -> None:
    """Hooks name a training's runs `<run_id>-<step>`. Another run on the same stack does not use
    the engine."""
    _, made = trainer_engine.engine_of_run({"run_id": "try-1", "engine_host": HERE}, ACCEPTED)
    assert made is not None
    await made.use(policy)
    try:
        records = (await roster().read()).engines
        served = {
            run: len(engines_of(records, "policy", run)) for run in ("try-1-3", "try-2-3", "")
        }
    finally:
        await made.stop()

    assert served == {"try-1-3": 1, "try-2-3": 0, "": 0}


async def test_rollouts_of_a_training_share_its_engine() -> None:
    """Hooks are made for each rollout or worker. Another training of the process has its own engine."""
    fields = {"engine_host": HERE}
    one, same, other = (
        trainer_engine.engine_of_run({"run_id": run_id, **fields}, ACCEPTED)[1]
        for run_id in ("shared", "shared", "apart")
    )

    assert one is same is not other


@pytest.mark.parametrize(("first", "second"), [("try", "try-1"), ("try-1", "try")])
async def test_a_training_whose_runs_another_would_sample_is_refused(
    policy: Policy, first: str, second: str
) -> None:
    """The runs of `try-1` also match `try-*`, so one of the policies would sample for both."""
    made = [TrainerEngine(ACCEPTED, host=HERE, run=f"{run_id}-*") for run_id in (first, second)]
    await made[0].use(policy)
    with pytest.raises(ConfigurationError, match=r"choose a `run_id`.*`perdure engines remove"):
        await made[1].use(policy)
    (name,) = await names()
    await remove_engine(roster(), name)
    await made[1].use(policy)

    assert [one.run for one in (await roster().read()).engines] == [f"{first}-*", f"{second}-*"]
    for one in made:
        await one.stop()


async def test_a_call_after_the_trainers_loop_has_ended_is_an_error(policy: Policy) -> None:
    """A trainer may run each step in an event loop of its own. The next step samples again."""
    made = TrainerEngine(ACCEPTED, host=HERE)
    await asyncio.to_thread(asyncio.run, made.use(policy))
    (name,) = await names()
    body = {"token_ids": [1000], "sampling_params": {"max_tokens": 1}}
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"http://{name}/inference/v1/generate"
        between = await client.post(url, json=body)
        await made.use(policy)
        after = await client.post(url, json=body)
    await made.stop()

    assert (between.status_code, after.status_code) == (500, 200)
    assert "the trainer's event loop has ended" in between.text


async def test_a_taken_port_is_tried_again(policy: Policy) -> None:
    """The next rollout finds it free, for example after an earlier process of the trainer has ended."""
    with socket.create_server((HERE, 0)) as taken:
        made = TrainerEngine(ACCEPTED, host=HERE, port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            await made.use(policy)
    await made.use(policy)

    assert len(await names()) == 1
    await made.stop()


async def test_a_server_that_the_trainer_names_is_used_as_it_is() -> None:
    """Each rollout names it; it is added once, under the model that it serves. If a user has added it,
    rollouts name the model that the user gave."""
    url = "http://10.0.0.7:8000/v1"
    told = [await trainer_engine.name_server(url, "Qwen/Qwen3-8B") for _ in range(2)]
    (record,) = (await roster().read()).engines
    await add_engine(roster(), EngineSpec("http://10.0.0.8:8000"), "policy")
    told.append(await trainer_engine.name_server("http://10.0.0.8:8000/v1", "Qwen/Qwen3-8B"))

    assert (record.url, record.model) == ("http://10.0.0.7:8000", "Qwen/Qwen3-8B")
    assert (record.of_trainer, record.generation) == (True, 1)
    assert told == ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "policy"]


async def test_a_server_without_a_url_is_refused() -> None:
    """Otherwise its rollouts would wait for an engine."""
    with pytest.raises(ConfigurationError, match="the trainer's server: 'localhost:8000'"):
        await trainer_engine.name_server("localhost:8000", "policy")


@pytest.mark.parametrize(
    ("given", "rest", "is_trainers"),
    [
        ({"run_id": "r", "agent": "nop"}, {"run_id": "r", "agent": "nop"}, True),
        ({"run_id": "r", "engine": "trainer", "engine_host": HERE}, {"run_id": "r"}, True),
        ({"run_id": "r", "engine": "perdure"}, {"run_id": "r"}, False),
    ],
)
def test_a_hook_uses_the_trainers_engines_by_default(
    given: dict[str, Any], rest: dict[str, Any], is_trainers: bool
) -> None:
    """The hook's engine options are not fields of a rollout."""
    fields, engine = trainer_engine.engine_of_run(given, ACCEPTED)

    assert (fields, engine is not None) == (rest, is_trainers)


def test_another_engine_is_refused() -> None:
    """It is refused by name, with the two that there are."""
    with pytest.raises(ConfigurationError, match=r"engine is 'own': use 'trainer'.*or 'perdure'"):
        trainer_engine.engine_of_run({"run_id": "r", "engine": "own"}, ACCEPTED)


async def test_gateways_reach_it_where_it_reaches_temporal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one host that is the loopback address, which other hosts do not reach."""
    config = SimpleNamespace(target_host="localhost:7233")

    async def connection() -> Any:
        client = SimpleNamespace(service_client=SimpleNamespace(config=config))
        return SimpleNamespace(client=client)

    monkeypatch.setattr(trainer_hooks, "connection", connection)

    assert await trainer_engine.own_address() == HERE
    config.target_host = "no address"
    with pytest.raises(ConfigurationError, match="set `engine_host`"):
        await trainer_engine.own_address()
