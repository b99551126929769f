"""The findings of a health check, and their effect on the engine's calls."""

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from perdure.engines.clients.engine_connections import Connections
from perdure.engines.clients.vllm import VllmEngine
from perdure.engines.clients.vllm_control import EngineControl, EngineSilent
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.engine_state import EngineRecord, EngineState, name_of
from perdure.engines.health_check import HealthCheck, Load, Rendering
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.policy_versions import Versions
from perdure.engines.pool.pool_metrics import pool_metrics
from perdure.engines.pool.pooled_engine import PooledEngine, RunningCall
from perdure.engines.pool.token_salvage import Salvage
from perdure.errors import ControlPlaneError
from perdure.gateway.rendering.tokenizers import tokenizer_canary
from perdure.testing.scripted_engine import ScriptedEngine
from perdure.types import FinishReason
from tests.engine_wire import Step, answering, plain

HOUR_S = 3600.0
LOOPBACK, NOWHERE = "127.0.0.1", "255.255.255.255"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


def record(url: str, state: EngineState, **fields: object) -> EngineRecord:
    given = {"name": name_of(url), "url": url, "model": "policy", "generation": 3, "state": state}
    return EngineRecord.model_validate({**given, **fields})


def seated(url: str, client: httpx.AsyncClient) -> PooledEngine:
    control = EngineControl(url, client)
    watch = HealthCheck(control, hang_s=1.0)
    ready = record(url, EngineState.READY, version=7)
    return PooledEngine(ready, VllmEngine("vllm e", url, Connections()), control, watch)


async def forever() -> FinishReason:
    await asyncio.Event().wait()
    return FinishReason.STOP


def resumed(pooled: PooledEngine, *, since_s: float = 0.0) -> RunningCall:
    """A call with 40 tokens of another engine, whose newest token came this long ago."""
    salvage = Salvage()
    salvage.begin("vllm other", 1)
    salvage.add(list(range(40)), [-0.1] * 40, version=7)
    salvage.begin("vllm e", 3)
    began = time.monotonic() - since_s
    call = RunningCall(asyncio.create_task(forever()), salvage, Versions(), began, 40, began)
    pooled.running.add(call)
    return call


async def test_a_ready_engine_gets_no_call_before_its_tokenizer_is_checked(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Another process may have found it ready for prompts of another tokenizer. So it is after its restart,
    which has another generation."""
    pooled = seated(engine.url, client)
    pooled.health.rendering = Rendering("qwen3", tokenizer_canary("qwen3"), is_default=True)
    before = pooled.serves
    await pooled.health.look(pooled.record, Load())
    after = pooled.serves
    pooled.record = pooled.record.model_copy(update={"generation": 4})

    assert (before, after, pooled.serves) == (False, True, False)


# --- one host's view ------------------------------------------------------------------------------


async def test_a_process_without_file_descriptors_knows_nothing_of_an_engine(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """It cannot connect anywhere, which says nothing about the engine and must not mark it as
    dead."""
    control = EngineControl(engine.url, client)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (0, most[1])
    )  # descriptors that are closed now also stay closed
    try:
        with pytest.raises(EngineSilent) as silent:
            await control.is_paused()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)

    assert not silent.value.gone


async def test_a_connection_that_ended_with_an_error_is_not_reused(
    client: httpx.AsyncClient,
) -> None:
    """After a failed update, vLLM closes the connection without announcing it; then the engine is
    resumed."""

    async def end_at_the_next_request(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read(1)
        writer.transport.abort()

    failed: list[Step] = [plain("500 Internal Server Error", b"{}"), end_at_the_next_request]
    async with answering(failed, [plain("200 OK", b"{}")]) as wire:
        control = EngineControl(wire.url, client)
        with pytest.raises(ControlPlaneError, match="500"):
            await control.update_weights({})
        await control.resume()

    assert len(wire.heads) == 2


async def test_a_refused_connection_means_that_the_engine_is_dead(
    client: httpx.AsyncClient,
) -> None:
    """A refused connection proves that the host answers and that the engine does not run."""
    with pytest.raises(EngineSilent) as silent:
        await EngineControl("http://127.0.0.1:9", client).is_paused()

    assert silent.value.gone


async def test_an_unreachable_address_does_not_hide_a_refusal_by_the_next(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's `localhost` is also `::1`, which it cannot reach; the engine is gone all the
    same."""
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 9)) for ip in (NOWHERE, LOOPBACK)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    with pytest.raises(EngineSilent) as silent:
        await EngineControl("http://engine.example:9", client).is_paused()

    assert silent.value.gone


async def test_a_name_that_cannot_be_resolved_does_not_mean_dead(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short failure of a name server affects all engines at once."""

    def away(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    with pytest.raises(EngineSilent) as silent:
        await EngineControl("http://engine.example:9", client).is_paused()

    assert not silent.value.gone


async def test_a_clock_that_was_ahead_does_not_delay_a_probe_for_hours(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """The time of death comes from another host's clock; this host's clock measures the backoff."""
    ahead = time.time() + HOUR_S
    dead = record(engine.url, EngineState.DEAD, since=ahead, not_before=ahead)
    watch = HealthCheck(EngineControl(engine.url, client), hang_s=5.0)
    verdict = await watch.look(dead, Load())

    assert verdict is not None
    assert verdict.state is EngineState.READY


@pytest.mark.parametrize(
    ("state", "held"), [(EngineState.PAUSED, "update 7"), (EngineState.SUSPECT, "")]
)
async def test_a_clock_that_was_behind_does_not_end_the_patience(
    client: httpx.AsyncClient, state: EngineState, held: str
) -> None:
    """A host whose clock is hours behind has just recorded an update or a suspicion."""
    past = time.time() - 9 * HOUR_S
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = record(url, state, since=past, held_by=held)
        control = EngineControl(url, client, probe_s=0.05)
        verdict = await HealthCheck(control, hang_s=5.0).look(begun, Load())

    assert verdict is None or verdict.state is state


async def test_a_refusal_is_cleared_when_another_process_proved_the_engine(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """Otherwise calls would be refused instead of waiting while the engine is full or paused."""
    watch = HealthCheck(EngineControl(engine.url, client), hang_s=5.0)
    engine.control(kind="status", status=404)
    await watch.look(record(engine.url, EngineState.STARTING), Load())
    refused = watch.refused
    engine.control(kind=None)
    await watch.look(record(engine.url, EngineState.READY), Load())

    assert (bool(refused), watch.refused) == (True, "")


async def test_an_engine_that_samples_is_not_asked_whether_it_is_paused(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """Each gateway checks each engine every second. The next check finds a pause."""
    asked: list[str] = []

    async def note(request: httpx.Request) -> None:
        asked.append(request.url.path)

    client.event_hooks["request"].append(note)
    ready = record(engine.url, EngineState.READY)
    control = EngineControl(engine.url, client)
    watch = HealthCheck(control, hang_s=5.0)
    await watch.look(ready, Load())
    await control.round_trip("policy")
    asked.clear()
    sampled = await watch.look(ready, Load())
    await control.round_trip("policy")
    await control.pause("keep")
    amid = await watch.look(ready, Load())
    after = await watch.look(ready, Load())

    assert asked.count("/is_paused") == 1
    assert (sampled, amid) == (None, None)
    assert after is not None
    assert after.state is EngineState.PAUSED


# --- calls on the engine --------------------------------------------------------------------------


async def test_a_resumed_call_may_queue_like_a_new_one(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """Tokens of the lost engine prove nothing about this one, where many calls queue after a
    death."""
    pooled = seated(engine.url, client)
    call = resumed(pooled, since_s=30.0)
    pooled.evict_stalled(1.0, begun_only=True)
    queued = call.evicted
    pooled.evict_stalled(1.0)

    assert (queued, call.evicted is not None) == (None, True)


async def test_each_update_during_a_turn_is_judged_separately(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """Proving the first update does not prove the second."""
    pooled = seated(engine.url, client)
    call = resumed(pooled)
    for version in (8, 9):
        held = f"update {version}"
        paused = pooled.record.to(EngineState.PAUSED, held, held_by=held, coming=version)
        pooled.become(paused, 1.0)
        call.salvage.add([version], [-0.1], version=None)
        if version == 8:
            pooled.become(paused.to(EngineState.READY, held_by="", coming=None, version=8), 1.0)

    assert not call.judged.is_set()
    assert call.salvage.sure == 41


def test_an_event_with_an_invalid_id_adds_no_token() -> None:
    """Otherwise every later logprob would be off by one."""
    salvage = Salvage()
    salvage.begin("vllm e", 1)
    for ids in ([5, "x"], [5, 1 << 40], [5, -1], [5, 6, 7]):
        with pytest.raises((TypeError, OverflowError, ValueError)):
            salvage.add(ids, [-0.1, -0.2], version=1)  # type: ignore[arg-type]  # an engine may send it
    salvage.add([5, 6], [-0.1, -0.2], version=1)

    assert (list(salvage.ids), list(salvage.logprobs)) == ([5, 6], [-0.1, -0.2])


async def test_an_unknown_version_is_not_shown_as_zero(client: httpx.AsyncClient) -> None:
    """Versions start at 0, so the metric shows -1 for an unknown version."""
    pool = EnginePool(InMemoryRoster(), client)
    pooled = seated("http://10.0.0.7:8000", client)
    pooled.record = pooled.record.model_copy(update={"version": None})
    pool.fleet.engines["10.0.0.7:8000"] = pooled

    labels = b'{engine="10.0.0.7:8000",model="policy"}'
    assert b"perdure_engine_policy_version%s -1.0" % labels in pool_metrics(pool)


# --- logprobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.DEAD])
async def test_an_engine_with_raw_logprobs_does_not_join(
    engine: ScriptedEngine, client: httpx.AsyncClient, state: EngineState
) -> None:
    """Its logprobs do not belong to the distribution that it samples from; the reason names the
    flag."""
    engine.raw_logprobs = True
    watch = HealthCheck(EngineControl(engine.url, client), hang_s=5.0)

    finding = await watch.look(record(engine.url, state), Load())

    assert finding is not None
    assert finding.state is state
    assert "--logprobs-mode processed_logprobs" in watch.refused


async def test_the_logprobs_of_a_serving_engine_are_not_checked_again(
    engine: ScriptedEngine, client: httpx.AsyncClient
) -> None:
    """The flag cannot change within one start, so a suspect engine returns with its first token."""
    engine.raw_logprobs = True
    watch = HealthCheck(EngineControl(engine.url, client), hang_s=5.0)

    finding = await watch.look(record(engine.url, EngineState.SUSPECT), Load())

    assert finding is not None
    assert finding.state is EngineState.READY
