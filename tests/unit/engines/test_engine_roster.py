"""Allowed transitions of an engine's state, and one roster for many processes."""

import asyncio
from pathlib import Path

import numpy
import pytest

from perdure.engines.clients.vllm_control import read_vitals
from perdure.engines.configured_engine import check_engine_settings, engine_specs
from perdure.engines.engine_roster import (
    InMemoryRoster,
    ModelFormat,
    Roster,
    StoredRoster,
    add_engine,
    roster_key,
)
from perdure.engines.engine_state import EngineRecord, EngineSpec, EngineState, backoff_s, name_of
from perdure.engines.health_check import Finding, apply
from perdure.engines.model_choice import chosen_model
from perdure.engines.pool.token_salvage import Salvage
from perdure.errors import ConfigurationError, GatewayUnavailable
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import EngineSpan, VersionSpan

DEAD, PAUSED, READY, STARTING, SUSPECT = (
    EngineState.DEAD,
    EngineState.PAUSED,
    EngineState.READY,
    EngineState.STARTING,
    EngineState.SUSPECT,
)


def record(state: EngineState = READY, **fields: object) -> EngineRecord:
    given = {"name": "h:1", "url": "http://h:1", "model": "policy", "generation": 3}
    return EngineRecord.model_validate({**given, "state": state, **fields})


def test_a_dead_engine_comes_back_as_a_new_generation() -> None:
    """A generation is never reused, not even for another engine."""
    dead = Roster().having(record(DEAD, start_id="1.0"))
    back = apply(dead, record(DEAD, start_id="1.0"), Finding(READY, start_id="2.0")).get("h:1")

    assert back is not None
    assert (back.generation, back.state, back.start_id) == (4, READY, "2.0")


def test_the_same_start_keeps_its_generation() -> None:
    """A suspicion that turns out to be wrong changes nothing."""
    roster = Roster().having(record(SUSPECT, start_id="1.0"))
    back = apply(roster, record(SUSPECT, start_id="1.0"), Finding(READY, start_id="1.0")).get("h:1")

    assert back is not None
    assert (back.generation, back.state) == (3, READY)


def test_a_stale_finding_changes_nothing() -> None:
    """A finding about an earlier generation does not apply to this one."""
    roster = Roster().having(record(READY, generation=4))

    assert apply(roster, record(READY), Finding(DEAD, "late news")) == roster


def test_a_health_check_from_before_an_update_changes_nothing() -> None:
    """The engine was updated since: generation and state are the same, but the period is a later
    one."""
    roster = Roster().having(record(READY, since=2.0, version=8))

    assert apply(roster, record(READY, since=1.0, version=7), Finding(PAUSED)) == roster


def test_only_reborn_leads_out_of_dead() -> None:
    """A late answer cannot make a dead engine ready."""
    with pytest.raises(ValueError, match="is dead and cannot become ready"):
        record(DEAD).to(READY)


def test_a_crash_looping_engine_is_probed_less_often() -> None:
    """The first death costs no wait; after that the wait doubles up to a limit."""
    assert [backoff_s(n) for n in (1, 2, 3, 4, 99)] == [0.0, 1.0, 2.0, 4.0, 300.0]


def test_a_condemned_start_may_not_return_but_its_successor_may() -> None:
    """Broken weights are gone once their process has ended."""
    condemned = record(DEAD, start_id="1.0", condemned="1.0")

    assert (condemned.may_return("1.0"), condemned.may_return("2.0")) == (False, True)


async def test_concurrent_writers_lose_no_change(tmp_path: Path) -> None:
    """Each change is applied to the newest roster."""
    key = roster_key(b"a secret of many letters")
    rosters = [StoredRoster(LocalStore(tmp_path), key) for _ in range(4)]

    async def add(number: int) -> None:
        new = record(name=f"h:{number}", generation=1)
        await rosters[number % 4].change(
            lambda roster: roster.having(
                new.model_copy(update={"generation": roster.next_generation})
            )
        )

    await asyncio.gather(*(add(number) for number in range(12)))
    found = await rosters[0].read()

    assert sorted(engine.generation for engine in found.engines) == list(range(1, 13))


def test_settings_name_many_engines() -> None:
    """A comma-separated list, each with an optional weight after an equals sign."""
    specs = engine_specs("http://a:8000/v1, http://b:8000=2.5")

    assert [(name_of(spec.url), spec.weight) for spec in specs] == [
        ("a:8000", 1.0),
        ("b:8000", 2.5),
    ]


@pytest.mark.parametrize(
    "url", ["http://a:1=0", "http://a:1=x", "http://a:1,ftp://b", "http://a:b"]
)
def test_a_wrong_engine_url_is_named(tmp_path: Path, url: str) -> None:
    """It is refused before the gateway starts."""
    with pytest.raises(ConfigurationError, match=r"engine|ENGINE__URL"):
        check_engine_settings(Settings(home=tmp_path, engine={"url": url}))


def test_metrics_of_all_ranks_are_read() -> None:
    """Values are summed over the ranks of one server; they include requests that wait for KV room
    and the size of the cache."""
    vitals = read_vitals(
        "# HELP x\n"
        'vllm:num_requests_running{engine="0",model_name="policy"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="policy"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 9.0\n'
        'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="46592"} 1.0\n'
        "process_start_time_seconds 1.7637e+09\n"
    )

    assert (vitals.running, vitals.starved, vitals.kv_tokens) == (7.0, 2.0, 46592)
    assert vitals.started == "1763700000.00"


def test_a_reported_version_replaces_the_assumed_one() -> None:
    """Salvaged tokens have the version known on arrival, until the engine reports another one."""
    salvage = Salvage()
    salvage.begin("a", 1, 7)
    salvage.add([1, 2], [-0.1, -0.2], 7)
    salvage.add([3], [-0.3], None)
    salvage.begin("b", 2)
    salvage.add([4], [-0.4], 7)
    salvage.add([5], [-0.5], 7)
    salvage.report([VersionSpan(version=8, start=0, end=2)])

    assert salvage.engines == [
        EngineSpan(engine="a", generation=1, start=0, end=3),
        EngineSpan(engine="b", generation=2, start=3, end=5),
    ]
    assert salvage.versions == [
        VersionSpan(version=7, start=0, end=2),
        VersionSpan(version=8, start=3, end=5),
    ]


def test_tokens_buffered_during_an_update_have_no_version() -> None:
    """An engine sends several tokens together, of which only the last was sampled just now. If the
    weights changed since the previous tokens, it is unknown which version sampled the others."""
    salvage = Salvage()
    salvage.begin("a", 1, 7)
    salvage.add([1], [-0.1], 7)
    salvage.add([2, 3, 4], [-0.2, -0.3, -0.4], 8)
    salvage.add([5, 6], [-0.5, -0.6], 8)

    assert salvage.versions == [
        VersionSpan(version=7, start=0, end=1),
        VersionSpan(version=8, start=3, end=6),
    ]


def test_a_whole_answer_across_an_update_has_one_token_of_known_version() -> None:
    """The call began before the update, and the engine sent everything at the end."""
    salvage = Salvage()
    salvage.begin("a", 1, 7)
    salvage.add([1, 2, 3], [-0.1, -0.2, -0.3], 8)

    assert salvage.versions == [VersionSpan(version=8, start=2, end=3)]


def test_experts_of_dropped_tokens_are_dropped() -> None:
    """The next engine returns those of its own tokens, and the rows join at the last token that stays."""
    first, second = (numpy.full((rows, 2, 2), number) for rows, number in ((4, 1), (2, 2)))
    salvage = Salvage(prompt_rows=1)
    salvage.begin("a", 1, 7)
    salvage.add([5, 6, 7], [-0.1] * 3, 7)
    salvage.add_experts(first, 4)
    salvage.cut(1)
    salvage.begin("b", 2, 7)
    salvage.add([8, 9], [-0.1] * 2, 7)
    salvage.add_experts(second, 2)

    assert salvage.experts is not None
    assert salvage.experts.tolist() == [*first[:2].tolist(), *second.tolist()]


def test_a_changed_engine_keeps_its_place() -> None:
    """A changed record keeps its position, so a rolling update follows the order of joining."""
    first, second = (
        EngineRecord(name=name, url=f"http://{name}", model="policy", generation=1)
        for name in ("a:1", "b:1")
    )
    roster = Roster().having(first).having(second).having(first.to(EngineState.READY))

    assert [engine.name for engine in roster.engines] == ["a:1", "b:1"]


async def test_a_model_has_one_tokenizer_which_is_given_once() -> None:
    """Engines that share a model share its sessions, whose recorded ids belong to one tokenizer."""
    roster, spec = InMemoryRoster(), EngineSpec("http://h:1")
    two, qwen3 = EngineSpec("http://h:2"), ModelFormat(tokenizer="qwen3")
    with pytest.raises(ConfigurationError, match="the model judge is new: give its tokenizer"):
        await add_engine(roster, spec, "judge")
    await add_engine(roster, spec, "judge", model_format=qwen3)
    await add_engine(roster, two, "judge")
    with pytest.raises(ConfigurationError, match=r"engine h:2 has the model judge with .*'qwen3'"):
        await add_engine(roster, spec, "judge", model_format=ModelFormat(tokenizer="/another"))
    with pytest.raises(ConfigurationError, match="set PERDURE_ENGINE__TOKENIZER"):
        await add_engine(roster, spec, "policy", model_format=qwen3)

    assert (await roster.read()).formats == {"judge": qwen3}


async def test_an_engine_that_is_added_again_keeps_its_model_and_its_run() -> None:
    """Another weight changes nothing else; another model begins a new generation, because calls and
    versions of the old one say nothing about it."""
    roster, qwen3 = InMemoryRoster(), ModelFormat(tokenizer="qwen3")
    first = await add_engine(
        roster, EngineSpec("http://h:1"), "judge", model_format=qwen3, run="r-*"
    )
    heavier = await add_engine(roster, EngineSpec("http://h:1", 2.0))
    other = await add_engine(roster, EngineSpec("http://h:1"), "policy", run="")

    assert heavier == first.model_copy(update={"weight": 2.0})
    assert (other.model, other.run) == ("policy", "")
    assert other.generation > first.generation


def test_a_model_may_be_named_as_its_engines_report_it() -> None:
    """By its owner's name or its folder. A similar name is another model, and an engine that is starting
    may still report this one."""
    policy = record(served={"root": "Qwen/Qwen3-8B"})
    roster = Roster().having(policy)
    starting = record(STARTING, name="h:2", model="judge", generation=4)

    assert chosen_model(roster, "mine/Qwen3-8B") == "policy"
    with pytest.raises(ConfigurationError, match="no engine has the model Qwen/Qwen3-8B-old"):
        chosen_model(roster, "Qwen/Qwen3-8B-old")
    with pytest.raises(GatewayUnavailable, match="still starting"):
        chosen_model(roster.having(starting), "Qwen/Qwen3-8B-old")


def test_an_engine_of_other_settings_has_no_model_here() -> None:
    """The roster keeps it for the gateway whose settings name it."""
    roster = Roster().having(record(model="theirs", from_settings=True))

    assert chosen_model(roster.used_with({"h:1"}), "theirs") == "theirs"
    with pytest.raises(ConfigurationError, match="no engine has the model theirs"):
        chosen_model(roster.used_with(()), "theirs")
