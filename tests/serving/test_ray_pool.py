"""Engines on real Ray nodes that are killed: run by `make test-serving` (slow)."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray

from perdure.engines.base import Completion
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_state import EngineState
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.weights.weight_publishing import Published, published_key
from perdure.engines.weights.weight_update import WeightCanary
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.serving.replica_status import ReplicaStatus
from perdure.storage.local_store import LocalStore
from perdure.testing.scripted_engine import WEIGHTS_FILE, logprob
from tests.serving.conftest import KEY, PATIENCE_S, Pool, engine_pid

TOKENIZER = load_tokenizer("qwen3")
PROMPT = [
    *TOKENIZER.encode_plain("The task."),
    TOKENIZER.convert_tokens_to_ids("<|im_start|>"),
    *TOKENIZER.encode_plain("assistant\n"),
]
SAMPLING: dict[str, Any] = {"max_tokens": 4000, "temperature": 0.0, "stop_token_ids": [151_645]}


@asynccontextmanager
async def gateway(pool: Pool) -> AsyncIterator[EnginePool]:
    """What a gateway uses engines with, on the roster of the same home."""
    async with new_client() as client:
        engines = EnginePool(pool.roster, client, options=PoolOptions(poll_s=0.1, hang_s=5.0))
        await engines.start()
        try:
            yield engines
        finally:
            await engines.aclose()


async def serving(engines: EnginePool, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(pooled.record.serves for pooled in engines.engines.values()) != count:
            await asyncio.sleep(0.05)


def ask(engines: EnginePool, session: str) -> "asyncio.Task[Completion]":
    return asyncio.ensure_future(
        engines.generate(GenerateCall(PROMPT, SAMPLING, session, f"{session}-0"))
    )


async def test_replicas_spread_and_a_lost_node_costs_no_answer(pool: Pool) -> None:
    """Two nodes hold one replica each; one is killed under load: every call is answered whole, and
    a new node gets the replacement as a new generation."""
    nodes = [pool.add_node(), pool.add_node()]
    await pool.apply(replicas=2)
    before = await pool.joined(2)
    assert len({replica.node for replica in before}) == 2

    async with gateway(pool) as engines:
        await serving(engines, 2)
        calls = [ask(engines, f"s{number}") for number in range(4)]
        while not all(pooled.running for pooled in engines.engines.values()):
            await asyncio.sleep(0.02)
        lost = next(one for one in before if one.node == nodes[0].node_id)
        server = os.pidfd_open(engine_pid(pool, lost))
        pool.cluster.remove_node(nodes[0], allow_graceful=False)

        answers = await asyncio.gather(*calls)

        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        assert select.select([server], [], [], PATIENCE_S)[0], "the killed node's engine runs on"
        os.close(server)
        pool.add_node()
        await pool.until(
            lambda now: all(
                one.engine and one.generation != lost.generation for one in now.replicas
            )
        )
        await serving(engines, 2)


async def test_a_killed_actor_leaves_no_engine_behind(pool: Pool) -> None:
    """SIGKILL of the actor's process ends its server, and the slot gets a new replica."""
    pool.add_node()
    await pool.apply(replicas=1)
    (first,) = await pool.joined(1)
    server = os.pidfd_open(engine_pid(pool, first))

    os.kill(await pool.actor_pid(first), signal.SIGKILL)

    assert select.select([server], [], [], PATIENCE_S)[0]
    os.close(server)
    await pool.until(lambda now: now.replicas[0].engine and now.replicas[0].generation > 1)


async def test_a_model_that_does_not_fit_is_reported_and_not_tried_again(pool: Pool) -> None:
    """The slot is given up with its cause; the log's end can be read."""
    pool.add_node()
    words = "ValueError: No available memory for the cache blocks."
    command = (sys.executable, "-c", f"raise SystemExit({words!r})")

    await pool.apply(replicas=1, command=command)

    status = await pool.until(lambda now: now.replicas and now.replicas[0].state == "given up")
    assert "KV cache for 0 sequences" in status.replicas[0].reason
    assert words.encode() in await pool.actor.tail.remote(0)


async def test_a_replica_without_a_node_says_what_it_lacks(pool: Pool) -> None:
    """It waits with a reason, and starts once a node joins."""
    await pool.apply(replicas=1)
    waiting = await pool.until(lambda now: now.replicas and now.replicas[0].reason)

    pool.add_node()

    assert waiting.replicas[0].reason == "no node has 1 GPU and 0.1 CPU for one replica"
    assert (await pool.joined(1))[0].reason == ""


async def test_a_drain_notice_moves_the_replica_before_the_node_goes(pool: Pool) -> None:
    """Sessions leave a node with a preemption notice, and another node replaces it."""
    leaving = pool.add_node()
    await pool.apply(replicas=1)
    (first,) = await pool.joined(1)
    pool.add_node()
    async with gateway(pool) as engines:
        await serving(engines, 1)
        call = ask(engines, "s")

        words = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        words += ["--address", pool.cluster.address, "--node-id", leaving.node_id]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        subprocess.run([*words, "--deadline-remaining-seconds", "60"], check=True)

        await pool.until(
            lambda now: (
                now.replicas[0].engine
                and now.replicas[0].node != first.node
                and first.engine not in now.managed
            )
        )
        await call
        assert (await pool.read()).get(first.engine) is None


async def until_another(pool: Pool, manager: int) -> ReplicaStatus:
    """The replica as the next manager's process shows it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ray.exceptions.RayError):
                if await pool.actor.pid.remote() != manager:
                    return (await pool.joined(1))[0]
            await asyncio.sleep(0.1)


async def test_a_restarted_manager_takes_over_its_replicas(pool: Pool) -> None:
    """Ray restarts the manager, which finds the replica by name: same generation, same process."""
    pool.add_node()
    await pool.apply(replicas=1)
    (first,) = await pool.joined(1)
    server = engine_pid(pool, first)

    manager = await pool.actor.pid.remote()
    os.kill(manager, signal.SIGKILL)

    again = await until_another(pool, manager)
    assert (again.engine, again.generation, engine_pid(pool, again)) == (
        first.engine,
        first.generation,
        server,
    )


async def test_an_engine_that_gateways_found_dead_is_replaced(pool: Pool) -> None:
    """If the pool finds an engine hung although its health route answers, the manager ends that start."""
    pool.add_node()
    await pool.apply(replicas=1)
    (first,) = await pool.joined(1)
    server = os.pidfd_open(engine_pid(pool, first))

    record = (await pool.read()).get(first.engine)
    assert record is not None
    await pool.roster.change(lambda now: now.having(record.to(EngineState.DEAD, "it hangs")))

    assert select.select([server], [], [], PATIENCE_S)[0]
    os.close(server)
    await pool.until(
        lambda now: now.replicas[0].engine and now.replicas[0].generation > first.generation
    )


async def test_wanting_fewer_ends_replicas(pool: Pool) -> None:
    """`--replicas 0` drains what runs; nothing of it is left in the pool."""
    pool.add_node()
    await pool.apply(replicas=1)
    (first,) = await pool.joined(1)
    server = os.pidfd_open(engine_pid(pool, first))

    async with gateway(pool):
        await pool.apply(replicas=0)
        await pool.until(lambda now: not now.managed)

    assert select.select([server], [], [], PATIENCE_S)[0]
    os.close(server)


async def test_a_replica_is_shown_until_it_has_gone(pool: Pool) -> None:
    """Who waits for an empty pool waits for the roster too: only gateways that read there that an
    engine drains can say when its sessions have moved."""
    pool.add_node()
    await pool.apply(replicas=1)
    (first,) = await pool.joined(1)

    with LocalStore(pool.settings.store_url)._locked(KEY):  # the drain cannot be written yet
        await pool.apply(replicas=0)
        status = await pool.until(lambda now: not any(one.engine for one in now.replicas))

    assert status.managed == {first.engine}


async def publish(pool: Pool, version: int) -> None:
    """What a trainer leaves in the home: the version's checkpoint, and its word on a prompt."""
    store = LocalStore(pool.settings.store_url)
    weights = json.dumps({"weights": version}).encode()
    await store.put(f"checkpoints/{version}/{WEIGHTS_FILE}", weights)
    first = TOKENIZER.encode_plain("word0")[0]
    said = WeightCanary(
        prompt_ids=tuple(PROMPT),
        token_id=first,
        logprob=logprob(first, 0, version),
        tolerance=0.01,
    )
    found = Published(version=version, source=f"checkpoints/{version}", canaries=(said,))
    await store.put(published_key(KEY, "policy"), found.model_dump_json().encode())


async def test_another_model_is_not_given_the_weights_of_the_first(pool: Pool) -> None:
    """A plan for another model loads that model's checkpoint, until a trainer publishes weights for
    it."""
    pool.add_node()
    await pool.apply(replicas=0)
    await publish(pool, 2)

    await pool.apply(replicas=1, model="another")

    async with gateway(pool) as engines:
        await serving(engines, 1)
        answer = await ask(engines, "s")
    assert answer.logprobs[0] == logprob(answer.token_ids[0], 0, 0)


async def test_a_replica_that_restarts_serves_what_was_published(pool: Pool) -> None:
    """Not the checkpoint that it was started with: neither one that serves when a version becomes the
    published one, nor the one that takes the place of a killed one."""
    pool.add_node()
    await pool.apply(replicas=1)
    (first,) = await pool.joined(1)
    async with gateway(pool) as engines:
        await serving(engines, 1)
        await publish(pool, 2)
        async with asyncio.timeout(PATIENCE_S):
            while [pooled.record.version for pooled in engines.engines.values()] != [2]:
                await asyncio.sleep(0.02)
        os.kill(await pool.actor_pid(first), signal.SIGKILL)
        await pool.until(
            lambda now: now.replicas[0].engine and now.replicas[0].generation > first.generation
        )

        answers = [await ask(engines, "s1"), await ask(engines, "s2")]

    for answer in answers:
        assert [(span.version, span.start) for span in answer.versions] == [(2, 0)]
        assert answer.logprobs[0] == logprob(answer.token_ids[0], 0, 2)
